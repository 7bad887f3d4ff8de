"""Parallelisms by name: the axes of their meshes, and how each divides a model.

ddp       every rank holds all parameters; gradients are averaged, one all-reduce per parameter
ddp-dtensor  the same over a mesh of two axes, as DTensor writes it: averaged over `outer`, then over `inner`
fsdp      parameters are sharded; gathered to compute, gradients reduce-scattered
hsdp      fsdp inside, over `shard`; ddp outside, over `replicate`
hsdp-dtensor  the same as DTensor writes it: whole gradients are averaged over `replicate` before they are scattered
tp        blocks are split, norms see their part of the sequence
fsdp-tp   tp inside, fsdp outside
hsdp-tp   tp inside, hsdp outside
ep-fsdp   experts are split over `ep` and sharded over `dp`; everything else is sharded over all ranks
ep-tp     fsdp-tp with the axes `ep` and `tp`, but experts are split over `ep`; each sees a part of the sequence
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.arguments import check_choice
from weft.errors import CaptureError, compose, nearest
from weft.zoo.parallel.collectives import group_name
from weft.zoo.parallel.parameters import Axes, ParameterLayout, Precision, compute_in, spread
from weft.zoo.parallel.tensor import add_exchanges, check_split, split_layouts

RESHARDS = ("always", "default", "never")
"""Which weights backward gathers again: all, all but those of the last layer as torchtitan's default, or none."""
_RESHARD_NAMES: Mapping[bool | str, str] = {True: "always", False: "never"}
INNER_SIZE = 8
"""Ranks of the inner axis if only the total is given: one node."""


@dataclass(frozen=True)
class Strategy:
    """The use of each axis of a mesh."""

    axes: Axes
    shard: Axes = ()
    replicate: Axes = ()
    replicate_first: bool = False
    tensor: str | None = None
    expert: str | None = None

    @property
    def data_axes(self) -> Axes:
        """The axes whose ranks see different data."""
        return tuple(axis for axis in self.axes if axis != self.tensor)


STRATEGIES = {
    "none": Strategy(()),
    "ddp": Strategy(("dp",), replicate=("dp",)),
    "ddp-dtensor": Strategy(("outer", "inner"), replicate=("outer", "inner")),
    "fsdp": Strategy(("dp",), shard=("dp",)),
    "hsdp": Strategy(("replicate", "shard"), shard=("shard",), replicate=("replicate",)),
    "hsdp-dtensor": Strategy(("replicate", "shard"), shard=("shard",), replicate=("replicate",), replicate_first=True),
    "tp": Strategy(("tp",), tensor="tp"),
    "fsdp-tp": Strategy(("dp", "tp"), shard=("dp",), tensor="tp"),
    "hsdp-tp": Strategy(("replicate", "shard", "tp"), shard=("shard",), replicate=("replicate",), tensor="tp"),
    "ep-fsdp": Strategy(("dp", "ep"), shard=("dp", "ep"), expert="ep"),
    "ep-tp": Strategy(("ep", "tp"), shard=("ep",), tensor="tp", expert="ep"),
}


def strategy_of(parallel: str) -> Strategy:
    """The strategy of a name."""
    if parallel not in STRATEGIES:
        do = nearest(parallel, STRATEGIES) or f"use one of {', '.join(STRATEGIES)}"
        raise CaptureError(compose("zoo", f"no parallelism is called {parallel!r}", do=do))
    return STRATEGIES[parallel]


def mesh_of(parallel: str, ranks: int | None, mesh: Mapping[str, int] | None) -> dict[str, int]:
    """Axes and sizes of a mesh: as given, or for a number of ranks with up to eight on each inner axis."""
    axes = strategy_of(parallel).axes
    if mesh is not None:
        _check_axes(parallel, axes, tuple(mesh))
        if ranks is not None and prod(mesh.values()) != ranks:
            what = f"the mesh {dict(mesh)} has {prod(mesh.values())} ranks, {ranks} are asked for"
            raise CaptureError(compose("zoo", what, do="give one of the two"))
        return dict(mesh)
    count = 8 if ranks is None else ranks
    if len(axes) < 2:
        return dict.fromkeys(axes, count)
    sizes: list[int] = []
    for more in reversed(range(1, len(axes))):
        inner = _inner_size(count, 2**more)
        sizes.append(inner)
        count //= inner
    return dict(zip(axes, (count, *reversed(sizes)), strict=True))


def _inner_size(count: int, least_outside: int) -> int:
    """The largest size that leaves at least `least_outside` of the ranks to the other axes."""
    sizes = (size for size in range(INNER_SIZE, 0, -1) if count % size == 0 and count // size >= least_outside)
    return next(sizes, 1)


def _check_axes(parallel: str, axes: Axes, found: Axes) -> None:
    if found != axes:
        what = f"{parallel} needs a mesh with the axes {', '.join(axes)}, found {', '.join(found) or 'none'}"
        example = ", ".join(f"{axis!r}: 2" for axis in axes)
        raise CaptureError(compose("zoo", what, do=f"give mesh={{{example}}}"))


def parallelise(
    model: nn.Module, parallel: str, mesh: DeviceMesh | None, precision: Precision, reshard: bool | str = True
) -> None:
    """Reduce the model to this rank's part, and insert the communication."""
    check_choice("zoo", "reshard", _RESHARD_NAMES.get(reshard, reshard), RESHARDS, error=CaptureError)
    strategy = strategy_of(parallel)
    if mesh is None:
        _check_axes(parallel, strategy.axes, ())
        compute_in(model, precision)
        return
    _check_axes(parallel, strategy.axes, tuple(mesh.mesh_dim_names or ()))
    if mesh.size() != dist.get_world_size():
        what = f"the mesh has {mesh.size()} ranks, the world {dist.get_world_size()}"
        raise CaptureError(compose("zoo", what, do="use a mesh of all ranks"))
    special = _special_layouts(model, parallel, strategy, mesh)
    _share_statistics(model, strategy, mesh)
    plain = ParameterLayout(strategy.shard, strategy.replicate, strategy.replicate_first)
    layouts = {path: _combine(plain, special.get(path)) for path, _ in model.named_parameters(remove_duplicate=False)}
    kept = _kept(model, _RESHARD_NAMES.get(reshard, reshard))
    spread(model, layouts, mesh, precision, lambda path: not f"{path}.".startswith(kept))


def _kept(model: nn.Module, reshard: bool | str) -> tuple[str, ...]:
    """Starts of the paths of modules that keep their gathered weights for backward."""
    if reshard == "default":
        return (f"layers.{len(getattr(model, 'layers', ())) - 1}.",)
    return () if reshard == "always" else ("",)


def _combine(plain: ParameterLayout, special: ParameterLayout | None) -> ParameterLayout:
    if special is None:
        return plain
    taken = special.split[0] if special.split is not None else None
    shard = tuple(axis for axis in plain.shard if axis != taken)
    return replace(special, shard=shard, replicate=plain.replicate)


def _special_layouts(
    model: nn.Module, parallel: str, strategy: Strategy, mesh: DeviceMesh
) -> dict[str, ParameterLayout]:
    """Layouts of the parameters that tensor or expert parallelism splits; inserts communication into the modules."""
    layouts: dict[str, ParameterLayout] = {}
    if strategy.tensor is not None:
        plan = _ask(model, parallel, "tensor_plan")
        check_split(model, plan, strategy.tensor, mesh[strategy.tensor].size())
        layouts |= split_layouts(model, plan, strategy.tensor)
        add_exchanges(model, plan, mesh, strategy.tensor)
    if strategy.expert is not None:
        paths: list[str] = _ask(model, parallel, "expert_parameters")()
        size = mesh[strategy.expert].size()
        count: int = _ask(model, parallel, "config").num_experts
        if count % size:
            what = f"{count} experts do not split over {size} ranks"
            raise CaptureError(compose("zoo", what, do=f"use an axis {strategy.expert!r} whose size divides them"))
        split: Any = _ask(model, parallel, "split_experts")
        split(group_name(mesh, (strategy.expert,)), size)
        for path in paths:
            layout = layouts.get(path, ParameterLayout())
            layouts[path] = replace(layout, split=(strategy.expert, 0), scale=1 / size)
    return layouts


def _ask(model: nn.Module, parallel: str, name: str) -> Any:
    found = getattr(model, name, None)
    if found is None:
        what = f"{type(model).__name__} cannot be run under {parallel}"
        raise CaptureError(compose("zoo", what, do="use ddp, fsdp or hsdp, which any model can"))
    return found


def _share_statistics(model: nn.Module, strategy: Strategy, mesh: DeviceMesh) -> None:
    """Let norms over the batch see the batches of all ranks."""
    for module in model.modules():
        share: Any = getattr(module, "share_statistics", None)
        if share is not None and strategy.data_axes:
            share(group_name(mesh, strategy.data_axes), prod(mesh[axis].size() for axis in strategy.data_axes))
