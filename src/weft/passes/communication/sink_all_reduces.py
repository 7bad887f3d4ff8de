"""Move an all-reduce after a reduce-scatter over another group, so that it reduces only one part.

Why: hybrid sharding averages each gradient between replicas and scatters it among shards. DTensor writes the all-reduce
first, so every rank sends the whole gradient over the slow links between nodes. The reduce-scatter first leaves each
rank one part to all-reduce.

Before::

    ar: f32[4, 4] = all_reduce(g, 'sum', 'replicate')
    w: f32[4, 4] = wait(ar)
    rs: f32[2, 4] = reduce_scatter(w, 'sum', 2, 'shard')
    part: f32[2, 4] = wait(rs)

After::

    part_reduce_scatter: f32[2, 4] = reduce_scatter(g, 'sum', 2, 'shard')
    part_wait: f32[2, 4] = wait(part_reduce_scatter)
    part_all_reduce: f32[2, 4] = all_reduce(part_wait, 'sum', 'replicate')
    part_wait_1: f32[2, 4] = wait(part_all_reduce)

Operators between the two that only move elements, or pad with zeros, are applied to the tensor before it is reduced.

Declines: groups that are not axes of one mesh, for which the parts of different ranks would be mixed up; reduce
operators that do not commute; an all-reduce result with other users; ranks whose graphs differ; a cluster on which
reducing the part takes as long.
Numerics: reassociates. Bytes on the wire: the all-reduce sends one part instead of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph

from weft.graph import ops
from weft.graph.collective import num_bytes
from weft.graph.ops import Kind
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step
from weft.rewriting.draft import AnyNode, Draft, New
from weft.rewriting.launches import (
    all_reduced,
    group_of,
    is_same_group,
    price,
    scattered,
    why_not_axes,
    why_not_commute,
)
from weft.rewriting.new_nodes import sources
from weft.rewriting.pattern import ANY, Match, Var, match_at, op
from weft.rewriting.rules import why_not_apply

SCATTER = op("reduce_scatter", Var("sent"), Var("reduce_op"), Var("size"), ANY).named("scatter")
PATTERN = op("wait", SCATTER)
SUM = op("wait", op("all_reduce", Var("sent"), Var("reduce_op"), ANY).named("launch"))
MOVES = frozenset(
    target
    for name in (
        *("view", "reshape", "_unsafe_view", "alias", "clone", "t", "transpose.int", "permute", "unsqueeze", "squeeze"),
        *("squeeze.dim", "squeeze.dims", "slice", "select.int", "narrow", "cat", "stack", "split", "split_with_sizes"),
        *("split.sizes", "chunk", "unsafe_split", "unsafe_split_with_sizes", "unbind.int", "operator.getitem"),
    )
    if (target := ops.op_of(name)) is not None
)
PAD = ops.op_of("constant_pad_nd")


@dataclass
class _Site:
    """A reduce-scatter whose elements all come from all-reduces."""

    match: Match
    moves: list[AnyNode] = field(default_factory=list[AnyNode])
    """The operators in between, sources first."""
    sums: dict[AnyNode, Match] = field(default_factory=dict[AnyNode, Match])
    """The waits for the all-reduces."""

    @property
    def first(self) -> Match:
        return next(iter(self.sums.values()))


@dataclass(frozen=True)
class SinkAllReduces(GraphwisePass):
    """All-reduce the part that a reduce-scatter leaves instead of the whole tensor before it."""

    numerics = Numerics.REASSOCIATES
    reorders_launches = True
    why_not_nested = "whether and how often its collectives run is not known"

    def plan_one(self, graph: Graph, context: Context) -> Step:
        wanted = {ops.op_of("all_reduce"), ops.op_of("reduce_scatter")}
        if not wanted <= {node.target for node in graph.nodes}:
            return self.step([], [])
        draft = Draft(graph)
        decisions: list[Decision] = []
        for node in draft.dag.nodes:
            site = _site(draft, node) if ops.is_wait(node.target) else None
            while site is not None:
                made = _why_not(draft, site, context) or _swap(draft, site)
                decisions.append(self._decided(draft, site, made, context))
                site = _site(draft, made) if not isinstance(made, Refusal) else None  # after a sum over a third axis
        return self.step(draft.actions, decisions)

    def _decided(self, draft: Draft, site: _Site, made: New | Refusal, context: Context) -> Decision:
        names = (*(match["launch"].name for match in site.sums.values()), site.match["scatter"].name)
        if isinstance(made, Refusal):
            draft.forget()
            return self.decision(made.reason, made.sentence, *names, blocking=made.blocking)
        sentence = f"moved the all-reduce over {_axis(draft, site, context)!r} after {names[-1]}, to one part"
        return self.decision(Reason.APPLIED, sentence, *names)


def _axis(draft: Draft, site: _Site, context: Context) -> str:
    return group_of(draft, site.first["launch"], context).name


def _site(draft: Draft, node: AnyNode) -> _Site | None:
    """The site whose wait a node is; None if the scatter uses anything but results of all-reduces."""
    match = match_at(draft, PATTERN, node)
    if match is None:
        return None
    site = _Site(match)
    seen: set[AnyNode] = set()
    stack: list[tuple[AnyNode, bool]] = [(match["sent"], False)]
    while stack:
        source, is_done = stack.pop()
        if is_done:
            site.moves.append(source)
            continue
        if source in seen:
            continue
        seen.add(source)
        found = match_at(draft, SUM, source)
        if found is not None:
            site.sums[source] = found
        elif _moves(draft, source):
            stack.append((source, True))
            stack += [(below, False) for below in reversed(sources(*draft.arguments(source)))]
        else:
            return None
    return site if site.sums else None


def _moves(draft: Draft, node: AnyNode) -> bool:
    """Whether each element of an operator's result is one element of an input, or zero."""
    if node.op != "call_function":
        return False
    return node.target in MOVES or (node.target is PAD and draft.bind(node)["value"] == 0)


def _why_not(draft: Draft, site: _Site, context: Context) -> Refusal | None:
    match, name = site.match, site.match.root.name
    launches = [found["launch"] for found in site.sums.values()]
    scatter, launch = match["scatter"], launches[0]
    replicas, shards = group_of(draft, launch, context), group_of(draft, scatter, context)
    if any(not is_same_group(draft, launch, other) for other in launches[1:]):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: its all-reduces use several groups", launch.name)
    sums = [found["reduce_op"] for found in site.sums.values()]
    if len(set(sums)) > 1:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: its all-reduces reduce by {', '.join(sums)}")
    refusal = why_not_axes(name, (replicas, shards), context)
    refusal = refusal or why_not_commute(name, [match["reduce_op"], *sums], draft.value(match.root).dtype)
    if refusal is not None:
        return refusal
    refusal = _why_not_alone(draft, site) or why_not_apply(draft, _everything(site))
    if refusal is not None:
        return refusal
    whole = sum(num_bytes(draft.value(found["sent"])) or 0 for found in site.sums.values())
    part = num_bytes(draft.value(match.root))
    if context.cluster is None or part is None or not whole:
        return None
    if price(context, Kind.ALL_REDUCE, replicas, part) >= price(context, Kind.ALL_REDUCE, replicas, whole):
        return Refusal(Reason.NO_GAIN, f"{name} stays: reducing one part takes as long as reducing the whole")
    return None


def _everything(site: _Site) -> Match:
    """All nodes that are computed anew, as a match."""
    nodes = [*site.match.nodes, *site.moves, *(node for found in site.sums.values() for node in found.nodes)]
    return Match(site.match.bound, nodes, site.match.roots)


def _why_not_alone(draft: Draft, site: _Site) -> Refusal | None:
    """Why the site has other users: nothing else may read an all-reduce, or an operator between it and the scatter."""
    inside = {*_everything(site).nodes}
    for node in inside - {site.match.root}:
        other = next((user for user in draft.users(node) if user not in inside), None)
        if other is not None:
            return Refusal(Reason.NO_GAIN, f"{site.match.root.name} stays: {other.name} uses {node.name}", other.name)
    return None


def _swap(draft: Draft, site: _Site) -> New | Refusal:
    """Plan the reduce-scatter before the all-reduce; returns its wait, or why the two cannot replace the originals."""
    match, root = site.match, site.match.root
    made: dict[AnyNode, AnyNode] = {wait: _contiguous(draft, found["sent"], root) for wait, found in site.sums.items()}
    for node in site.moves:
        args, kwargs = draft.arguments(node)
        made[node] = draft.call(node.target, *_mapped(args, made), before=root, **_mapped(dict(kwargs), made))
    sent = made[match["sent"]]
    part = scattered(draft, sent, match["reduce_op"], match["size"], match["scatter"], root)
    new = all_reduced(draft, part, site.first["reduce_op"], site.first["launch"], root)
    refusal = draft.why_not_replace(root, new) or draft.replace({root: new}, _everything(site).nodes)
    return refusal or part


def _contiguous(draft: Draft, node: AnyNode, before: AnyNode) -> AnyNode | New:
    """The tensor, or a contiguous copy: a reduce-scatter needs one."""
    if draft.value(node).is_contiguous():
        return node
    return draft.call("clone", node, memory_format=torch.contiguous_format, before=before)


def _mapped(item: Any, made: Mapping[AnyNode, AnyNode]) -> Any:
    """Arguments with nodes replaced by planned calls."""
    if isinstance(item, AnyNode):
        return made.get(item, item)
    if isinstance(item, Mapping):
        return {key: _mapped(value, made) for key, value in item.items()}
    if isinstance(item, Sequence) and not isinstance(item, str):
        return type(item)(_mapped(part, made) for part in item)  # type: ignore[call-arg]
    return item
