"""Scatter over one mesh axis, all-reduce over the others, and gather again, where that makes a sum faster.

Why: DTensor all-reduces a gradient over one mesh axis after the other, so every rank sends the whole tensor over the
slow links between nodes. If the ranks of a node scatter it first, each rank sends one part over these links.

Before::

    ar: f32[4, 4] = all_reduce(g, 'sum', 'outer')
    w: f32[4, 4] = wait(ar)
    ar1: f32[4, 4] = all_reduce(w, 'sum', 'inner')
    w1: f32[4, 4] = wait(ar1)

After::

    w1_reduce_scatter: f32[2, 4] = reduce_scatter(g, 'sum', 2, 'inner')
    w1_wait: f32[2, 4] = wait(w1_reduce_scatter)
    w1_all_reduce: f32[2, 4] = all_reduce(w1_wait, 'sum', 'outer')
    w1_wait_1: f32[2, 4] = wait(w1_all_reduce)
    w1_all_gather: f32[4, 4] = all_gather(w1_wait_1, 2, 'inner')
    w1_wait_2: f32[4, 4] = wait(w1_all_gather)

A single all-reduce is decomposed in the same way if other launches of the graph use groups that are the axes of its
group. A chain becomes a single all-reduce if another launch uses the group of all its ranks. No new groups are made.

Declines: any sum without a cluster to predict times on; forms that are slower alone or for large buckets; groups that
are not axes of one mesh; reduce operators that do not commute; sizes that do not split evenly; ranks whose graphs
differ.
Numerics: reassociates. Bytes on the wire: fewer over the axes that are all-reduced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Graph

from weft.cost.cluster import Cluster
from weft.graph import ops
from weft.graph.collective import num_bytes
from weft.graph.groups import Group, are_all_axes_of
from weft.graph.ops import Kind
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.launches import (
    all_reduced,
    gathered,
    group_of,
    known_groups,
    scattered,
    why_not_axes,
    why_not_commute,
)
from weft.rewriting.pattern import ANY, Match, Var, match_at, op
from weft.rewriting.rules import why_not_apply

SUM = op("wait", op("all_reduce", Var("sent"), Var("reduce_op"), ANY).named("launch"))
MAX_AXES = 4
"""Axes of one sum for which every form is tried; no mesh in use has more."""
Estimate = Callable[[Cluster, Kind, Group, int], float]


@dataclass(frozen=True)
class _Axis:
    """A reduction over one group, which a launch of the graph names."""

    reduce_op: str
    group: Group
    launch: AnyNode


@dataclass(frozen=True)
class _Form:
    """A way to reduce over several axes: scatter over the first ones, all-reduce over the others, gather again."""

    scattered: tuple[_Axis, ...]
    reduced: tuple[_Axis, ...]

    @property
    def num_parts(self) -> int:
        return math.prod(axis.group.size for axis in self.scattered)

    def us(self, estimate: Estimate, cluster: Cluster, full_bytes: int) -> float:
        """The time of all launches, one after the other."""
        total = 0.0
        for axis in self.scattered:
            total += sum(estimate(cluster, k, axis.group, full_bytes) for k in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER))
            full_bytes //= axis.group.size
        return total + sum(estimate(cluster, Kind.ALL_REDUCE, axis.group, full_bytes) for axis in self.reduced)


ESTIMATES: tuple[Estimate, ...] = (Cluster.collective_us, Cluster.least_us)
"""The time of a launch alone, and the time that its bytes add to a large bucket: the planner merges small launches."""


@dataclass
class _Chain:
    """All-reduces over several groups in a row, or one over a group whose axes the graph knows; last wait first."""

    waits: list[Match]

    @property
    def root(self) -> AnyNode:
        return self.waits[0].root

    @property
    def match(self) -> Match:
        return Match(self.waits[0].bound, [node for match in self.waits for node in match.nodes], self.waits[0].roots)

    @property
    def launches(self) -> tuple[str, ...]:
        return tuple(match["launch"].name for match in reversed(self.waits))


@dataclass(frozen=True)
class DecomposeMeshAllReduces(GraphwisePass):
    """Scatter, all-reduce and gather over different mesh axes where this is faster than all-reduces of the whole."""

    numerics = Numerics.REASSOCIATES
    reorders_launches = True
    why_not_nested = "whether and how often its collectives run is not known"

    always: bool = False
    """Scatter over as many axes as split evenly, even where it saves no time."""

    def plan_one(self, graph: Graph, context: Context) -> Step:
        if ops.op_of("all_reduce") not in {node.target for node in graph.nodes}:
            return self.step([], [])
        draft = Draft(graph)
        known = [_Axis("", group, launch) for group, launch in known_groups(draft, context)]
        decisions: list[Decision] = []
        for node in draft.dag.nodes:
            site = _site(draft, node) if ops.is_wait(node.target) else None
            if site is None:
                continue
            given = [_Axis(m["reduce_op"], group_of(draft, m["launch"], context), m["launch"]) for m in site.waits]
            others = list(_other_forms(given, known))
            if not others:
                continue
            chosen = _why_not(draft, site, given, context) or self._choose(draft, site, given, others, context)
            refusal = chosen if isinstance(chosen, Refusal) else _rewrite(draft, site, chosen)
            if refusal is not None:
                draft.forget()
                decision = self.decision(refusal.reason, refusal.sentence, *site.launches, blocking=refusal.blocking)
                decisions.append(decision)
            elif isinstance(chosen, _Form):
                decisions.append(self.decision(Reason.APPLIED, _sentence(site, chosen), *site.launches))
        return self.step(draft.actions, decisions)

    def _choose(
        self, draft: Draft, site: _Chain, given: Sequence[_Axis], others: Sequence[_Form], context: Context
    ) -> _Form | Refusal:
        """The fastest other form, or why the graph keeps its own."""
        name, value = site.root.name, draft.value(site.root)
        elements, full = value.numel(), num_bytes(value)
        if type(elements) is not int or full is None:
            return Refusal(Reason.UNKNOWN_SIZE, f"{name} stays: its size is not known")
        even = [form for form in others if elements and elements % form.num_parts == 0]
        if not even:
            return Refusal(Reason.DOES_NOT_SPLIT, f"{name} stays: its elements do not split evenly over any axis")
        if self.always:
            return max(even, key=lambda form: len(form.scattered))
        cluster = context.cluster
        if cluster is None:
            return Refusal(Reason.NO_GAIN, f"{name} stays: without a cluster the gain of other launches is unknown")
        now = _Form((), tuple(given))
        faster = [
            form
            for form in even
            if all(form.us(estimate, cluster, full) < now.us(estimate, cluster, full) for estimate in ESTIMATES)
        ]
        if not faster:
            return Refusal(Reason.NO_GAIN, f"{name} stays: no other form over the same axes is faster")
        return min(faster, key=lambda form: form.us(Cluster.collective_us, cluster, full))


def _site(draft: Draft, node: AnyNode) -> _Chain | None:
    """The chain of all-reduces that ends at a node, as long as nothing else reads a sum in between."""
    match = match_at(draft, SUM, node)
    if match is None or _is_summed_again(draft, node):
        return None
    site = _Chain([match])
    while draft.num_users(site.waits[-1]["sent"]) == 1:
        match = match_at(draft, SUM, site.waits[-1]["sent"])
        if match is None:
            break
        site.waits.append(match)
    return site


def _is_summed_again(draft: Draft, node: AnyNode) -> bool:
    users = draft.users(node)
    return len(users) == 1 and any(match_at(draft, SUM, after) is not None for after in draft.users(users[0]))


def _other_forms(given: Sequence[_Axis], known: Sequence[_Axis]) -> Iterator[_Form]:
    """The forms that reduce over the same ranks as the given launches."""
    chains = [list(given)] if len(given) > 1 else _factors(given[0], known)
    for axes in chains:
        if len(axes) > MAX_AXES:
            continue
        for number in range(1, len(axes)):
            for chosen in itertools.permutations(axes, number):
                yield _Form(chosen, tuple(axis for axis in axes if axis not in chosen))
    if len(given) > 1 and len({axis.reduce_op for axis in given}) == 1:
        for other in known:
            if are_all_axes_of(other.group, tuple(axis.group for axis in given)):
                yield _Form((), (_Axis(given[0].reduce_op, other.group, other.launch),))


def _factors(whole: _Axis, known: Sequence[_Axis]) -> Iterator[list[_Axis]]:
    """The sets of known groups that are the axes of one group."""
    parts = [axis for axis in known if 1 < axis.group.size < whole.group.size]
    for number in range(2, MAX_AXES + 1):
        for chosen in itertools.combinations(parts, number):
            if are_all_axes_of(whole.group, tuple(axis.group for axis in chosen)):
                yield [_Axis(whole.reduce_op, axis.group, axis.launch) for axis in chosen]


def _why_not(draft: Draft, site: _Chain, given: Sequence[_Axis], context: Context) -> Refusal | None:
    name, value = site.root.name, draft.value(site.waits[-1]["sent"])
    if not value.is_contiguous():
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: the reduced tensor is not contiguous")
    several = next((m["launch"] for m in site.waits if draft.num_users(m["launch"]) > 1), None)
    if several is not None:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: {several.name} has several users", several.name)
    refusal = why_not_axes(name, [axis.group for axis in reversed(given)], context)
    refusal = refusal or why_not_commute(name, [axis.reduce_op for axis in given], value.dtype)
    return refusal or why_not_apply(draft, site.match)


def _rewrite(draft: Draft, site: _Chain, form: _Form) -> Refusal | None:
    """Plan the launches of a form in place of those of a site; returns why they cannot replace them."""
    root, sent = site.root, site.waits[-1]["sent"]
    shape = list(draft.value(sent).shape)
    is_flat = bool(form.scattered) and (not shape or shape[0] % form.num_parts != 0)
    new = draft.call("view", sent, [math.prod(shape)], before=root) if is_flat else sent
    for axis in form.scattered:
        new = scattered(draft, new, axis.reduce_op, axis.group.size, axis.launch, root)
    for axis in form.reduced:
        new = all_reduced(draft, new, axis.reduce_op, axis.launch, root)
    for axis in reversed(form.scattered):
        new = gathered(draft, new, 0, axis.group.size, axis.launch, root)
    if is_flat:
        new = draft.call("view", new, shape, before=root)
    return draft.why_not_replace(root, new) or draft.replace({root: new}, site.match.nodes)


def _sentence(site: _Chain, form: _Form) -> str:
    launches, reduced = ", ".join(site.launches), _names(form.reduced)
    if not form.scattered:
        return f"all-reduced {launches} at once over {reduced}"
    return f"scattered {launches} over {_names(form.scattered)}, to all-reduce one part over {reduced}"


def _names(axes: Iterable[_Axis]) -> str:
    return " and ".join(repr(axis.group.name) for axis in axes)
