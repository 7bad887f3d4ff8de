"""Launches in rewrites: reading, planning and pricing them in a draft.

Contract: a price is a predicted time if a cluster is given. Without one it is the number of bytes that a rank sends,
which serves for comparisons only. Only launches of a single tensor that return a new one are rewritten.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from weft.graph import ops
from weft.graph.groups import Group, are_axes_of_one_mesh, runtime_name
from weft.graph.listings.call_lines import GroupOf
from weft.graph.ops import Kind
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft, New
from weft.simulation.timeline import NS_PER_US

AS_STRIDED = ops.op_of("as_strided")
LINEAR = ("sum", "avg")
"""Reduce operators that commute with each other; any other one commutes only with itself."""


def group_of(draft: Draft, launch: AnyNode, context: Context) -> Group:
    """The group of a launch, planned or in the graph."""
    return context.groups.group(argument_of(draft, launch))


def known_groups(draft: Draft, context: Context) -> list[tuple[Group, AnyNode]]:
    """The groups whose ranks are known and hold the same graph, each with a launch of the graph that uses it."""
    first: dict[str, AnyNode] = {}
    for node in draft.dag.nodes:
        if ops.launch_form(node.target) is not None:
            first.setdefault(group_of(draft, node, context).name, node)
    usable = first.keys() - context.groups.unplaced - context.withheld.keys()
    return [(group, first[group.name]) for group in context.groups if group.name in usable]


def argument_of(draft: Draft, launch: AnyNode) -> Any:
    """The group argument of a launch, planned or in the graph."""
    form = ops.launch_form(launch.target)
    argument = draft.bind(launch)[form.group] if form is not None else None
    while isinstance(argument, GroupOf):
        form = ops.launch_form(argument.launch.target)
        argument = draft.bind(argument.launch)[form.group] if form is not None else None
    return argument


def is_same_group(draft: Draft, first: AnyNode, second: AnyNode) -> bool:
    """Whether two launches use the same group."""
    return runtime_name(argument_of(draft, first)) == runtime_name(argument_of(draft, second))


def price(context: Context, kind: Kind, group: Group, full_bytes: int) -> float:
    """The price of a collective: microseconds on the given cluster, otherwise the bytes that a rank sends."""
    if context.cluster is not None:
        return context.cluster.estimate(kind, group, full_bytes).us
    return full_bytes * (group.size - 1) / max(group.size, 1) * (2 if kind is Kind.ALL_REDUCE else 1)


def all_reduced(draft: Draft, sent: AnyNode, reduce_op: str, launch: AnyNode, before: AnyNode) -> New:
    """Plan an all-reduce in the group of another launch; returns its wait."""
    started = draft.call("all_reduce", sent, reduce_op, GroupOf(launch), before=before)
    return draft.call("wait", started, before=before)


def scattered(draft: Draft, sent: AnyNode, reduce_op: str, size: int, launch: AnyNode, before: AnyNode) -> New:
    """Plan a reduce-scatter; returns its wait."""
    started = draft.call("reduce_scatter", sent, reduce_op, size, GroupOf(launch), before=before)
    return draft.call("wait", started, before=before)


def gathered(draft: Draft, sent: AnyNode, dim: int, size: int, launch: AnyNode, before: AnyNode) -> New:
    """Plan an all-gather along a dim; returns its wait, or for dims other than 0 the concatenation of the parts."""
    if not draft.value(sent).is_contiguous():
        sent = draft.call("clone", sent, memory_format=torch.contiguous_format, before=before)
    started = draft.call("all_gather", sent, size, GroupOf(launch), before=before)
    done = draft.call("wait", started, before=before)
    if dim == 0:
        return done
    parts = draft.call("split", done, draft.value(sent).shape[0], before=before)
    items = [draft.call("operator.getitem", parts, k, before=before) for k in range(size)]
    return draft.call("cat", items, dim, before=before)


def exchanged(draft: Draft, sent: AnyNode, size: int, launch: AnyNode, before: AnyNode) -> New:
    """Plan an all-to-all of equal parts along dim 0; returns its wait."""
    splits = [draft.value(sent).shape[0] // size] * size
    started = draft.call("all_to_all", sent, splits, splits, GroupOf(launch), before=before)
    return draft.call("wait", started, before=before)


def why_not_faster(
    name: str,
    context: Context,
    group: Group,
    launch: tuple[Kind, int],
    other: tuple[Kind, int],
    copied_bytes: int,
) -> Refusal | None:
    """Why a launch should not become another one; both are given by kind and bytes. The other one needs kernels that
    copy `copied_bytes`."""
    moving_ns = context.cluster.device.traffic_ns(copied_bytes) if context.cluster is not None else None
    if moving_ns is None:
        return Refusal(Reason.NO_GAIN, f"{name} stays: without a cluster that describes its devices no gain is known")
    kind, num_bytes = other
    if price(context, kind, group, num_bytes) + moving_ns / NS_PER_US >= price(context, launch[0], group, launch[1]):
        return Refusal(Reason.NO_GAIN, f"{name} stays: with its casts, sending fewer bytes would not be faster")
    return None


def is_written(draft: Draft, *nodes: AnyNode) -> bool:
    """Whether anything but a launch or a wait writes memory that one of the nodes holds."""
    written = draft.dag.effects.memory.written
    return any(written.intersection(draft.held(node)) for node in nodes)


def why_not_alone(draft: Draft, launch: AnyNode, root: AnyNode) -> Refusal | None:
    """Why a launch cannot be replaced by another: it has more than one user."""
    if draft.num_users(launch) == 1:
        return None
    names = ", ".join(user.name for user in draft.users(launch))
    return Refusal(Reason.UNSUPPORTED_FORM, f"{root.name} stays: {launch.name} has several users, {names}", launch.name)


def why_not_axes(name: str, groups: Sequence[Group], context: Context) -> Refusal | None:
    """Why collectives over several groups cannot come in another order: they are not axes of one mesh for all ranks."""
    unknown = next((group.name for group in groups if group.name in context.groups.unplaced), None)
    if unknown is not None:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: the ranks of {unknown!r} are not known")
    for first, second in itertools.combinations(groups, 2):
        if not are_axes_of_one_mesh(first, second):
            what = f"{name} stays: {first.name!r} and {second.name!r} are not two axes of one mesh"
            return Refusal(Reason.UNSUPPORTED_FORM, what)
    withheld = next((context.withheld[group.name] for group in groups if group.name in context.withheld), None)
    return Refusal(Reason.OTHER_RANKS, f"{name} stays: {withheld}") if withheld is not None else None


def why_not_commute(name: str, reduce_ops: Sequence[str], dtype: torch.dtype) -> Refusal | None:
    """Why reductions over different groups cannot be made in another order."""
    is_float, used = dtype.is_floating_point or dtype.is_complex, set(reduce_ops)
    if len(used) > 1 and not (used <= set(LINEAR) and is_float):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: reductions by {', '.join(reduce_ops)} do not commute")
    if not is_float and "avg" in used:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: each average of integers is rounded")
    return None


def place_in(group: Group, rank: int) -> int | None:
    """The index of a global rank within its group; None if the group does not contain it."""
    span = group.span
    parts = group.partition(span * (rank // span + 1) if group.ranks is None else span)
    return next((part.index(rank) for part in parts if rank in part), None)


def why_not_own(draft: Draft, part: AnyNode, dim: int) -> Refusal | None:
    """Why a slice of a tensor cannot get its own memory. The answer must not depend on the rank: all must agree."""
    if is_written(draft, part):
        return Refusal(Reason.MUTATED, f"{part.name} stays: its memory is written")
    stack = [part]
    while stack:
        for user in draft.users(stack.pop()):
            is_view = user.op == "call_function" and draft.is_alias(user)
            if user.target is AS_STRIDED or (dim and (is_view or not draft.is_stride_blind(user))):
                return Refusal(
                    Reason.UNSUPPORTED_FORM, f"{part.name} stays: {user.name} depends on its strides", user.name
                )
            stack += [user] if is_view else []
    return None
