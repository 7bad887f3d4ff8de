"""Sharded parameters: gathered when a module uses them; their gradients are reduced to shards again.

Contract: after `spread`, each parameter is a DTensor over the mesh (plain if every rank holds all of them), under its
old name. A module that reads it gets a plain tensor in the compute dtype: the whole parameter, or the part that the
rank's share of the computation needs. Optimizers, checkpoints and gradient clipping see the DTensors.

    shard f32 -> bf16 -> all-gather -> used by the module              forward
    gradient bf16 -> f32 -> reduce-scatter -> gradient of the shard    backward
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from weft.compat import strided_shard
from weft.graph.operator_effects import profile
from weft.zoo.checkpointing import keep_gathered, recomputation_in
from weft.zoo.parallel.collectives import ALL_GATHER, WAIT, all_gather, all_reduce, group_name, reduce_scatter

__tracebackhide__ = True  # errors should show a line of the model

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step. Parameters and their gradients are f32."""

    compute: torch.dtype = torch.bfloat16
    """Dtype of gathered parameters and activations."""
    reduce: torch.dtype = torch.float32
    """Dtype in which gradients are summed."""


@dataclass(frozen=True)
class ParameterLayout:
    """How one parameter is divided among ranks, and how its gradient is reduced."""

    shard: Axes = ()
    """Axes over which dim 0 is sharded: gathered for compute, gradients averaged."""
    replicate: Axes = ()
    """Axes whose ranks hold copies and see different data: gradients are averaged."""
    replicate_first: bool = False
    """Average the whole gradient over `replicate` before scattering it, as DTensor does, not the part afterwards."""
    split: tuple[str, int] | None = None
    """Axis and dim over which the parameter is split; a rank computes with its part only."""
    sum: Axes = ()
    """Axes whose ranks hold copies and see different parts of one sequence: gradients are summed."""
    scale: float = 1.0
    """Factor of the gradient."""


def spread(
    model: nn.Module,
    layouts: dict[str, ParameterLayout],
    mesh: DeviceMesh,
    precision: Precision,
    reshards: Callable[[str], bool],
) -> None:
    """Leave each rank its part of every parameter; `layouts` has one for each path of `model.named_parameters()`.

    `reshards` says by a module's path whether backward gathers its weights again.
    """
    in_parts = any(
        layout.shard or layout.split for layout in layouts.values()
    )  # if one is a DTensor, all are: optimizers do not mix
    made: dict[nn.Parameter, nn.Parameter] = {}  # a parameter shared by two modules stays shared
    checkpointed: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if recomputation_in(module) is not None:
            checkpointed += (f"{path}.",)
            groups = {group for layout in layouts.values() for group, _ in Route.of(layout, mesh, precision).gather}
            keep_gathered(module, frozenset() if reshards(path) else frozenset(groups))
        own = dict(module.named_parameters(path, recurse=False))
        routes: dict[str, Route] = {}
        for full_name, parameter in own.items():
            layout = _possible(parameter, layouts[full_name], mesh)
            if parameter not in made:
                part = part_of(parameter.detach(), layout, mesh) if in_parts else parameter.detach()
                made[parameter] = nn.Parameter(part, parameter.requires_grad)
            name = full_name.rpartition(".")[2]
            module.register_parameter(name, made[parameter])
            routes[name] = Route.of(layout, mesh, precision)
        if routes:
            gathers = any(route.gather for route in routes.values())
            forgets = reshards(path) and not path.startswith(checkpointed)  # a checkpointed block forgets by itself
            _read_through(module, routes, forgets and gathers and _is_worth_resharding(module))
    let_gradients_wait(model)


def part_of(whole: Tensor, layout: ParameterLayout, mesh: DeviceMesh) -> DTensor:
    """This rank's part of a parameter."""
    part, placements = whole, dict.fromkeys(_axes(mesh), Replicate()) | dict.fromkeys(layout.shard, Shard(0))
    if layout.split is not None:
        axis, dim = layout.split
        part = part.chunk(mesh[axis].size(), dim)[mesh.get_local_rank(axis)]
        placements[axis] = Shard(dim)
        if dim == 0 and layout.shard:  # the split comes first, so a shard has strided rows of the whole
            placements |= dict.fromkeys(layout.shard, strided_shard(0, mesh[axis].size()))
    for axis in layout.shard:
        part = part.chunk(mesh[axis].size())[mesh.get_local_rank(axis)]
    return DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format),  # a view would keep the whole parameter alive
        mesh,
        [placements[axis] for axis in _axes(mesh)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _axes(mesh: DeviceMesh) -> Axes:
    return tuple(mesh.mesh_dim_names or ())


def _possible(parameter: Tensor, layout: ParameterLayout, mesh: DeviceMesh) -> ParameterLayout:
    """The layout, or one that replicates if dim 0 does not divide evenly: all ranks must run one graph."""
    rows = parameter.shape[0] if parameter.dim() else 1
    if layout.split is not None and layout.split[1] == 0:
        rows //= mesh[layout.split[0]].size()
    ranks = 1
    for axis in layout.shard:
        ranks *= mesh[axis].size()
    if rows % ranks == 0:
        return layout
    return replace(layout, shard=(), replicate=(*layout.replicate, *layout.shard))


# How a module reads its parameters.


def compute_in(model: nn.Module, precision: Precision) -> None:
    """Let every module read its parameters in the compute dtype; one rank has nothing to gather or reduce.

    Modules whose parameters have that dtype already stay what they are, for callers who shard them in their own way.
    """
    route = Route((), (), False, (), 1.0, precision.compute, precision.reduce)
    for module in model.modules():
        parameters = module.named_parameters(recurse=False)
        routes = {name: route for name, parameter in parameters if parameter.dtype != precision.compute}
        if routes:
            _read_through(module, routes, forgets=False)


@dataclass(frozen=True)
class Route:
    """A layout in terms of process groups, which is all that a running step needs."""

    gather: tuple[tuple[str, int], ...]
    average: tuple[str, ...]
    averages_first: bool
    add: tuple[str, ...]
    scale: float
    compute: torch.dtype
    reduce: torch.dtype

    @staticmethod
    def of(layout: ParameterLayout, mesh: DeviceMesh, precision: Precision) -> Route:
        """The groups of a layout on this rank."""
        sizes = 1
        for axis in layout.shard:
            sizes *= mesh[axis].size()
        return Route(
            ((group_name(mesh, layout.shard), sizes),) if layout.shard else (),
            tuple(group_name(mesh, (axis,)) for axis in layout.replicate),
            layout.replicate_first,
            tuple(group_name(mesh, (axis,)) for axis in layout.sum),
            layout.scale,
            precision.compute,
            precision.reduce,
        )

    def leaves(self, part: Tensor) -> bool:
        """Whether the part can be used as it is."""
        return not (self.gather or self.average or self.add) and self.scale == 1.0 and part.dtype == self.compute


class GatherParameter(torch.autograd.Function):
    """The tensor that a module computes with, from this rank's part; backward reduces the gradient to that part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, route: Route, pending: PendingGradient | None = None) -> Tensor:
        ctx.route, ctx.dtype, ctx.pending = route, part.dtype, pending
        whole = part.to(route.compute)
        for group, size in route.gather:
            whole = all_gather(whole, size, group)
        return whole if whole is not part else part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        route: Route = ctx.route
        pending: PendingGradient | None = ctx.pending
        gradient = gradients[0].to(route.reduce)
        if pending is not None:
            gradient = pending.add(gradient)
            if not pending.reduces:
                return None, None, None
            pending.total = None
        for group in route.add:
            gradient = all_reduce(gradient, "sum", group)
        for group in route.average if route.averages_first else ():
            gradient = all_reduce(gradient, "avg", group)
        for group, size in route.gather:
            gradient = reduce_scatter(gradient, "avg", size, group)
        for group in route.average if not route.averages_first else ():  # a part is smaller than the whole
            gradient = all_reduce(gradient, "avg", group)
        if route.scale != 1.0:
            gradient = gradient * route.scale
        return gradient.to(ctx.dtype), None, None


@dataclass
class PendingGradient:
    """The gradient of a gathered parameter over the microbatches so far, before it is reduced."""

    reduces: bool = True
    """Whether the microbatch that is running reduces it."""
    total: Tensor | None = None

    def add(self, gradient: Tensor) -> Tensor:
        """Add the gradient of a microbatch; returns the sum."""
        self.total = gradient if self.total is None else self.total + gradient
        return self.total


def let_gradients_wait(model: nn.Module) -> None:
    """Give the model FSDP2's method that switches the reduction of gradients off and on between microbatches."""
    pending: dict[nn.Module, dict[str, PendingGradient]] = {}

    def set_requires_gradient_sync(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        for module in model.modules() if recurse else (model,):
            routes: dict[str, Route] = getattr(module, "routes", {})
            if routes and module not in pending:
                pending[module] = {name: PendingGradient() for name in routes}
                module.pending = pending[module]  # type: ignore[assignment]
            for gradient in pending.get(module, {}).values():
                gradient.reduces = requires_gradient_sync

    model.set_requires_gradient_sync = set_requires_gradient_sync  # type: ignore[assignment]


def _read_through(module: nn.Module, routes: dict[str, Route], forgets: bool) -> None:
    """Give the module a class of its own, whose parameters are read through `GatherParameter`."""
    kind = type(module)
    members: dict[str, Any] = {name: property(_reader(name)) for name in routes} | {"routes": routes}
    if forgets:
        members["forward"] = _forgetful(kind.forward)
    module.__class__ = type(kind.__name__, (kind,), members)


def _reader(name: str) -> Any:
    def read(self: nn.Module) -> Tensor:
        part, gather = reading_of(self, name, self._parameters[name])
        return gather(part)

    return read


def reading_of(module: nn.Module, name: str, parameter: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """This rank's part of a parameter as a plain tensor, and the function that makes the tensor to compute with."""
    routes: dict[str, Route] = getattr(module, "routes", {})
    part: Any = parameter
    if isinstance(parameter, DTensor):
        part = parameter.to_local(grad_placements=parameter.placements)
    if name not in routes or routes[name].leaves(part):
        return part, lambda part: part
    pending: dict[str, PendingGradient] = getattr(module, "pending", {})
    route = (routes[name], pending[name]) if name in pending else (routes[name],)
    return part, lambda part: cast(Tensor, GatherParameter.apply(part, *route))


# Resharding after forward: a module drops its gathered weights and gathers them again in backward.


def _is_worth_resharding(module: nn.Module) -> bool:
    """False if gathered weights are small (norms) or backward does not need them (embeddings)."""
    large = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    return large and getattr(module, "backward_needs_weight", True)


def _forgetful(forward: Any) -> Any:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(forward, self, *args, **settings, context_fn=_keep_all_but_weights, **kwargs)

    return run


def _keep_all_but_weights() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Recompute gathers and the path from them to a matmul; all other results stay, unless a compiler knows better."""
    gathers = op in (ALL_GATHER, WAIT, torch.ops.aten._to_copy.default) or profile(op).is_view
    return CheckpointPolicy.MUST_RECOMPUTE if gathers else CheckpointPolicy.PREFER_SAVE
