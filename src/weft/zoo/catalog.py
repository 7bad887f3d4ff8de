"""Models by name, as graphs (`load`) and as modules to train (`build`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from weft.errors import CaptureError, compose, nearest
from weft.frontends.capture import Optimizer, Part, Reduce, TrainingStep, capture
from weft.frontends.min_cut import Partition
from weft.graph.about import ABOUT_KEY, HELD_KEY, TOKENS_KEY
from weft.graph.listings.types import DTYPE_NAMES
from weft.process import left_as_it_was
from weft.zoo import deepseek, dropless, llama, moe, vision
from weft.zoo.parallel.parameters import Precision
from weft.zoo.parallel.strategies import mesh_of, parallelise, strategy_of
from weft.zoo.vocabulary import held_by_loss

MakeBatch = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class ZooEntry:
    """One model: its constructor, its configuration and its batches."""

    make: Callable[[Any], nn.Module]
    config: Any
    batch: Callable[[Any, int, torch.Generator, torch.dtype], tuple[Tensor, ...]]


def _text(config: Any, size: int, generator: torch.Generator, _dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Tokens, and the next token of each."""
    tokens = torch.randint(0, config.vocabulary, (size, config.sequence + 1), generator=generator)
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()  # `contiguous` of a single sequence would be a view


def _images(config: Any, size: int, generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Images and their classes."""
    images = torch.randn(size, 3, config.image_size, config.image_size, generator=generator)
    return images.to(dtype), torch.randint(0, config.num_classes, (size,), generator=generator)


ENTRIES: dict[str, ZooEntry] = {
    **{f"llama-{name}": ZooEntry(llama.Llama, config, _text) for name, config in llama.PRESETS.items()},
    **{f"moe-{name}": ZooEntry(moe.MoE, config, _text) for name, config in moe.PRESETS.items()},
    **{f"dropless-{name}": ZooEntry(dropless.Dropless, config, _text) for name, config in dropless.PRESETS.items()},
    **{f"deepseek-{name}": ZooEntry(deepseek.Deepseek, config, _text) for name, config in deepseek.PRESETS.items()},
    **{f"vision-{name}": ZooEntry(vision.Vision, config, _images) for name, config in vision.PRESETS.items()},
}


def names() -> list[str]:
    """The names of all models."""
    return list(ENTRIES)


@left_as_it_was()
def build(
    name: str,
    parallel: str = "none",
    mesh: DeviceMesh | None = None,
    *,
    layers: int | None = None,
    reshard: bool | str = True,
    compute_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> tuple[nn.Module, MakeBatch]:
    """A model to train, spread over a live mesh, and a function that makes its batches.

    `model(*make_batch(size, seed))` is the loss of this rank. All ranks must build it from the same random state. Ranks
    that share a batch get the same one. `changes` are fields of the model's configuration.
    """
    entry = _entry(name, layers, changes)
    model = entry.make(entry.config)
    parallelise(model, parallel, mesh, Precision(compute_dtype, reduce_dtype), reshard)
    data_rank = _data_rank(parallel, mesh)

    def make_batch(size: int = 1, seed: int = 0) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + data_rank)
        return entry.batch(entry.config, size, generator, compute_dtype)

    return model, make_batch


@left_as_it_was()
def load(
    name: str,
    parallel: str = "fsdp",
    ranks: int | None = None,
    layers: int | None = None,
    part: Part = "joint",
    batch: int = 1,
    mesh: Mapping[str, int] | None = None,
    reshard: bool | str = True,
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    optimizer: Optimizer | str = "adamw",
    clip_norm: float = 0.0,
    accumulate: int = 1,
    reduce: Reduce = "last",
    dynamic: bool = False,
    rank: int = 0,
    partition: Partition = "autograd",
    memory_budget: float = 1.0,
    **changes: Any,
) -> GraphModule:
    """The graph of a model's training step, as every rank of a mesh runs it.

    If only `ranks` is given, the inner axis of a two-dimensional mesh gets up to eight ranks. Parameters are f32. They
    are gathered and used in `compute_dtype`, and their gradients are reduced in `reduce_dtype`. `reshard` says
    which large weights backward gathers again: `always` (or True) all of them, `default` all but those of the last
    layer, `never` (or False) none. `batch` is the size of one of `accumulate` microbatches. `changes` are fields of the
    model's configuration.
    """
    entry = _entry(name, layers, changes)
    axes = mesh_of(parallel, ranks, mesh)

    def make(live: DeviceMesh | None) -> nn.Module:
        model = entry.make(entry.config)
        parallelise(model, parallel, live, Precision(compute_dtype, reduce_dtype), reshard)
        return model

    if batch < 1:
        raise CaptureError(compose("zoo", f"batch is {batch}, expected 1 or more", do="use batch=1 or more"))
    example = entry.batch(entry.config, batch * max(accumulate, 1), torch.Generator().manual_seed(0), compute_dtype)
    about = {
        "model": name,
        "parallel": parallel,
        "layers": entry.config.num_layers,
        "batch": batch,
        "dtypes": {"parameters": "f32", "compute": _dtype(compute_dtype), "reduce": _dtype(reduce_dtype)},
        "reshard": reshard,
        **_differences(entry.config, ENTRIES[name].config),
    }
    if entry.batch is _text:
        ranks_with_data = prod(axes[axis] for axis in strategy_of(parallel).data_axes)
        about[TOKENS_KEY] = batch * accumulate * entry.config.sequence * ranks_with_data
    about |= {"accumulate": accumulate, "reduce": reduce} if accumulate > 1 else {}
    if part == "step":
        about |= {"optimizer": optimizer} if isinstance(optimizer, str) and optimizer != "adamw" else {}
        about |= {"clip_norm": clip_norm} if clip_norm else {}
    step = TrainingStep(make, optimizer=optimizer, clip_norm=clip_norm, accumulate=accumulate, reduce=reduce)
    made = capture(
        step,
        example,
        axes or None,
        part,
        dynamic,
        rank=rank,
        partition=partition,
        memory_budget=memory_budget,
        about=about,
    )
    if found := held_by_loss(made.graph):
        made.meta[ABOUT_KEY][HELD_KEY] = [list(each) for each in found]
    return made


def _differences(config: Any, preset: Any) -> dict[str, Any]:
    """The fields of a configuration that are not as in the preset; the number of layers is not among them."""
    found = {field.name: getattr(config, field.name) for field in fields(config)}
    return {key: value for key, value in found.items() if value != getattr(preset, key) and key != "num_layers"}


def _dtype(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype))


def _entry(name: str, layers: int | None, changes: Mapping[str, Any]) -> ZooEntry:
    if name not in ENTRIES:
        do = nearest(name, ENTRIES) or f"use one of {', '.join(ENTRIES)}"
        raise CaptureError(compose("zoo", f"no model is called {name!r}", do=do))
    entry = ENTRIES[name]
    known = [field.name for field in fields(entry.config)]
    unknown = next((key for key in changes if key not in known), None)
    if unknown is not None:
        do = nearest(unknown, known) or f"use one of {', '.join(known)}"
        raise CaptureError(compose("zoo", f"{name} has no field called {unknown!r}", do=do))
    if layers is not None and layers < 1:
        raise CaptureError(compose("zoo", f"layers is {layers}, expected 1 or more", do="use layers=1 or more"))
    shape = dict(changes) if layers is None else {**changes, "num_layers": layers}
    return replace(entry, config=replace(entry.config, **shape))


def _data_rank(parallel: str, mesh: DeviceMesh | None) -> int:
    """Index of this rank among those that see different data."""
    number = 0
    for axis in strategy_of(parallel).data_axes if mesh is not None else ():
        number = number * mesh[axis].size() + mesh.get_local_rank(axis)  # type: ignore[index,union-attr]
    return number
