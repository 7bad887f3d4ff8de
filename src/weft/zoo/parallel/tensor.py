"""Tensor and sequence parallelism: modules compute with their part of the weights, norms with a part of the sequence.

A plan names modules by the end of their path and says how each is split:

    column       dim 0 of the weight; the rank computes its part of the output features
    row          dim 1 of the weight; the rank's output is a term of a sum
    block        gathers the sequence before it, and reduce-scatters it after it
    output       column, after a gather of the sequence
    vocabulary   the embedding's rows, and the columns of the logits in the loss
    sequence     a norm between blocks: sees its part of the sequence, so its gradient is a sum over ranks
    sum          a block that every rank gives the whole sequence: its results, and the gradients of its input, are sums

A plan with `sum` needs nothing else of a model than the names of its modules: `plan_by_names` has it for common ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from weft.errors import CaptureError, compose
from weft.zoo.parallel.collectives import group_name
from weft.zoo.parallel.parameters import ParameterLayout

__tracebackhide__ = True  # errors should show a line of the model

SPLIT_DIMS = {"column": 0, "output": 0, "vocabulary": 0, "row": 1}
PLANS_BY_NAME: tuple[Mapping[str, str], ...] = (
    # Llama of Hugging Face, and models with its names
    {"self_attn": "sum", **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "column"), "o_proj": "row"},
    {"mlp": "sum", **dict.fromkeys(("gate_proj", "up_proj"), "column"), "down_proj": "row"},
    # nanoGPT without biases; its attention makes query, key and value in one product, which does not split by columns
    {"mlp": "sum", "c_fc": "column", "c_proj": "row"},
)
"""For each kind of block: its name, and those of all linear layers directly in it."""


def plan_by_names(model: nn.Module) -> dict[str, str]:
    """A plan for the blocks of a model whose names are known; empty if it has no such block."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        layers = {name for name, child in module.named_children() if isinstance(child, nn.Linear)}
        for plan in PLANS_BY_NAME:
            block, *parts = plan
            if path.rpartition(".")[2] == block and layers == {*parts}:
                found |= {path: "sum", **{f"{path}.{name}": plan[name] for name in parts}}
    return found


def why_not_split(model: nn.Module, plan: Mapping[str, str], size: int) -> str | None:
    """Why the blocks of a plan with `sum` cannot be split over `size` ranks."""
    for path, module in model.named_modules():
        word = word_of(path, plan)
        if word not in SPLIT_DIMS:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if word == "row" and parameter.dim() < 2:
                return f"{path}.{name} would be added once on every rank"
            parent = model.get_submodule(path.rpartition(".")[0])
            unit = getattr(parent, "head_dim", 1) if word == "column" else 1
            if parameter.shape[SPLIT_DIMS[word]] % (size * unit):
                heads = f" in heads of {unit}" if unit > 1 else ""
                return f"{path}.{name} of {tuple(parameter.shape)}{heads} does not split over {size} ranks"
    return None


def check_split(model: nn.Module, plan: Mapping[str, str], axis: str, size: int) -> None:
    """Raise unless heads, features, vocabulary and sequence split evenly."""
    if "sum" in plan.values():
        if (why := why_not_split(model, plan, size)) is not None:
            raise CaptureError(compose("zoo", why, do=f"use an axis {axis!r} of another size"))
        return
    config: Any = model.config
    for name in ("num_heads", "num_kv_heads", "ffn_dim", "vocabulary", "sequence"):
        if getattr(config, name) % size:
            what = f"{name} {getattr(config, name)} does not split over the {size} ranks of {axis!r}"
            raise CaptureError(compose("zoo", what, do=f"use an axis {axis!r} whose size divides it"))


def split_layouts(model: nn.Module, plan: Mapping[str, str], axis: str) -> dict[str, ParameterLayout]:
    """The layout of each parameter that a plan names."""
    layouts: dict[str, ParameterLayout] = {}
    for path, _ in model.named_parameters(remove_duplicate=False):
        word = word_of(path.rpartition(".")[0], plan)
        if word in SPLIT_DIMS:
            layouts[path] = ParameterLayout(split=(axis, SPLIT_DIMS[word]))
        elif word == "sequence":
            layouts[path] = ParameterLayout(sum=(axis,))
    return layouts


def add_exchanges(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, axis: str) -> None:
    """Insert the communication of activations around the modules of a plan."""
    part = mesh[axis]
    for path, module in model.named_modules():
        word = word_of(path, plan)
        if word in ("block", "output"):
            module.register_forward_pre_hook(_gather_first_argument(part))
        if word == "block" or (word == "vocabulary" and _has_rows(module)):
            module.register_forward_hook(_scatter_result(part))
        if word == "sum":
            module.register_forward_pre_hook(_copy_first_tensor(part), with_kwargs=True)
            module.register_forward_hook(_sum_result(part))
        if word == "vocabulary":
            _tell_rows(model, module, mesh, axis)


def word_of(path: str, plan: Mapping[str, str]) -> str | None:
    """How a plan splits the module of this path; None if it leaves the module alone."""
    ends = [end for end in plan if path == end or path.endswith(f".{end}")]
    return plan[max(ends, key=len)] if ends else None


def _has_rows(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _tell_rows(model: nn.Module, module: nn.Module, mesh: DeviceMesh, axis: str) -> None:
    """Set the first vocabulary row of a module, as a tensor: a number would make the ranks' graphs differ."""
    config: Any = model.config
    rows: int = config.vocabulary // mesh[axis].size()
    module.register_buffer("first_row", torch.tensor(rows * mesh.get_local_rank(axis)), persistent=False)
    if not _has_rows(module):
        module.group = group_name(mesh, (axis,))  # type: ignore[assignment]


def _gather_first_argument(mesh: DeviceMesh) -> Any:
    def gather(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_sequence(args[0], mesh), *args[1:]

    return gather


def _scatter_result(mesh: DeviceMesh) -> Any:
    def scatter(_module: nn.Module, _args: Any, result: Tensor) -> Tensor:
        return scatter_sequence(result, mesh)

    return scatter


def gather_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather the sequence (dim 1) from all ranks; backward reduce-scatters the gradients."""
    parts = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def scatter_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Reduce-scatter the sequence (dim 1) over ranks; backward gathers."""
    terms = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return terms.redistribute(placements=[Shard(1)]).to_local()


def _copy_first_tensor(mesh: DeviceMesh) -> Any:
    """A hook after which the gradient of a module's first differentiable argument is a sum over ranks."""

    def copy(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        for place, value in values.items():
            if isinstance(value, Tensor) and value.requires_grad:
                whole = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
                values[place] = whole.to_local(grad_placements=[Partial()])
                break
        return tuple(values[k] for k in range(len(args))), {name: values[name] for name in kwargs}

    return copy


def _sum_result(mesh: DeviceMesh) -> Any:
    """A hook that sums the result of a module, or the first of several, over ranks."""

    def add_up(_module: nn.Module, _args: Any, result: Any) -> Any:
        first, *others = result if isinstance(result, tuple) else (result,)
        terms = DTensor.from_local(first, mesh, [Partial()], run_check=False)
        whole = terms.redistribute(placements=[Replicate()]).to_local()
        return (whole, *others) if isinstance(result, tuple) else whole

    return add_up
