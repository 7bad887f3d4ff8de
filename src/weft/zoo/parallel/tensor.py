"""Tensor and sequence parallelism: modules compute with their part of the weights, norms with a part of the sequence.

A plan names modules by the end of their path and says how each is split:

    column       dim 0 of the weight; the rank computes its part of the output features
    row          dim 1 of the weight; the rank's output is a term of a sum
    block        gathers the sequence before it, and reduce-scatters it after it
    output       column, after a gather of the sequence
    vocabulary   the embedding's rows, and the columns of the logits in the loss
    sequence     a norm between blocks: sees its part of the sequence, so its gradient is a sum over ranks
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


def check_split(model: nn.Module, axis: str, size: int) -> None:
    """Raise unless heads, features, vocabulary and sequence split evenly."""
    config: Any = model.config
    for name in ("num_heads", "num_kv_heads", "ffn_dim", "vocabulary", "sequence"):
        if getattr(config, name) % size:
            what = f"{name} {getattr(config, name)} does not split over the {size} ranks of {axis!r}"
            raise CaptureError(compose("zoo", what, do=f"use an axis {axis!r} whose size divides it"))


def split_layouts(model: nn.Module, plan: Mapping[str, str], axis: str) -> dict[str, ParameterLayout]:
    """The layout of each parameter that a plan names."""
    layouts: dict[str, ParameterLayout] = {}
    for path, _ in model.named_parameters(remove_duplicate=False):
        word = _word(path.rpartition(".")[0], plan)
        if word in SPLIT_DIMS:
            layouts[path] = ParameterLayout(split=(axis, SPLIT_DIMS[word]))
        elif word == "sequence":
            layouts[path] = ParameterLayout(sum=(axis,))
    return layouts


def add_exchanges(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, axis: str) -> None:
    """Insert the communication of activations around the modules of a plan."""
    part = mesh[axis]
    for path, module in model.named_modules():
        word = _word(path, plan)
        if word in ("block", "output"):
            module.register_forward_pre_hook(_gather_first_argument(part))
        if word == "block" or (word == "vocabulary" and _has_rows(module)):
            module.register_forward_hook(_scatter_result(part))
        if word == "vocabulary":
            _tell_rows(model, module, mesh, axis)


def _word(path: str, plan: Mapping[str, str]) -> str | None:
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
