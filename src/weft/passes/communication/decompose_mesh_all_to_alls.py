"""Exchange inside each node first, then across nodes, where an all-to-all is faster so.

Why: in an all-to-all over several nodes, each rank sends a small message to every other rank. If the ranks of a node
first exchange what goes to ranks with the same place in other nodes, fewer and larger messages cross the network.

Before::

    a2a: f32[4, 8] = all_to_all(x, [1, 1, 1, 1], [1, 1, 1, 1], 'ep')
    w: f32[4, 8] = wait(a2a)

After::

    w_view: f32[2, 2, 8] = view(x, [2, 2, 8])
    w_transpose: f32[2, 2, 8] = transpose.int(w_view, 0, 1)
    w_clone: f32[2, 2, 8] = clone(w_transpose, memory_format=contiguous_format)
    w_all_to_all: f32[2, 2, 8] = all_to_all(w_clone, [1, 1], [1, 1], 'inner')
    w_wait: f32[2, 2, 8] = wait(w_all_to_all)
    ...
    w_all_to_all_1: f32[2, 2, 8] = all_to_all(w_clone_1, [1, 1], [1, 1], 'outer')
    w_wait_1: f32[2, 2, 8] = wait(w_all_to_all_1)
    w_view_1: f32[4, 8] = view(w_wait_1, [4, 8])

Other launches of the graph must use the two groups, one of consecutive ranks of the whole group and one across these.
No new groups are made.

Declines: any all-to-all without a cluster to predict times on; exchanges that are not faster in two steps, with the two
copies that sort their parts; parts of different sizes, or sizes that the data decides; groups that hold different
graphs.
Numerics: exact. Bytes on the wire: as many between nodes, more inside of them. Memory: two copies of the parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph

from weft.cost.cluster import Cluster
from weft.graph import ops
from weft.graph.collective import num_bytes
from weft.graph.listings.call_lines import GroupOf
from weft.graph.ops import Kind
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.launches import group_of, known_groups
from weft.rewriting.mesh_axes import MeshAxis, axes_of
from weft.rewriting.pattern import ANY, Match, Var, match_at, op
from weft.rewriting.rules import why_not_apply

EXCHANGE = op("wait", op("all_to_all", Var("sent"), Var("received"), Var("parts"), ANY).named("launch"))


@dataclass(frozen=True)
class DecomposeMeshAllToAlls(GraphwisePass):
    """Exchange over one axis of a mesh after the other where this is faster than at once."""

    numerics = Numerics.EXACT
    reorders_launches = True
    why_not_nested = "whether and how often its collectives run is not known"

    always: bool = False
    """Exchange in two steps even where it saves no time."""

    def plan_one(self, graph: Graph, context: Context) -> Step:
        if ops.op_of("all_to_all") not in {node.target for node in graph.nodes}:
            return self.step([], [])
        draft = Draft(graph)
        known = [MeshAxis(*found) for found in known_groups(draft, context)]
        decisions: list[Decision] = []
        for node in draft.dag.nodes:
            match = match_at(draft, EXCHANGE, node) if ops.is_wait(node.target) else None
            axes = axes_of(group_of(draft, match["launch"], context), known) if match is not None else None
            if match is None or axes is None:
                continue
            name = match["launch"].name
            refusal = self._why_not(draft, match, axes, context) or _rewrite(draft, match, *axes)
            if refusal is not None:
                draft.forget()
                decisions.append(self.decision(refusal.reason, refusal.sentence, name, blocking=refusal.blocking))
                continue
            sentence = f"exchanged {name} over {axes[0].group.name!r}, then over {axes[1].group.name!r}"
            decisions.append(self.decision(Reason.APPLIED, sentence, name))
        return self.step(draft.actions, decisions)

    def _why_not(self, draft: Draft, match: Match, axes: tuple[MeshAxis, MeshAxis], context: Context) -> Refusal | None:
        launch, value = match["launch"], draft.value(match["sent"])
        parts = [*match["received"], *match["parts"]]
        full = num_bytes(value) if isinstance(value, Tensor) else None
        if full is None or not all(type(n) is int for n in (*value.shape, *parts)):
            return Refusal(Reason.UNKNOWN_SIZE, f"{launch.name} stays: the sizes of its parts are not known")
        if len(set(parts)) != 1 or not full:
            return Refusal(Reason.DOES_NOT_SPLIT, f"{launch.name} stays: its parts are empty, or differ in size")
        if not value.is_contiguous() or draft.num_users(launch) > 1:
            return Refusal(
                Reason.UNSUPPORTED_FORM, f"{launch.name} stays: its input is strided, or it has several users"
            )
        withheld = next((a.group.name for a in axes if a.group.name in context.withheld), None)
        if withheld is not None:
            return Refusal(Reason.OTHER_RANKS, f"{launch.name} stays: {context.withheld[withheld]}")
        refusal = why_not_apply(draft, match)
        if refusal is not None or self.always:
            return refusal
        if context.cluster is None:
            return Refusal(Reason.NO_GAIN, f"{launch.name} stays: without a cluster the gain is unknown")
        whole = context.cluster.collective_us(Kind.ALL_TO_ALL, group_of(draft, launch, context), full)
        steps = _steps_us(context.cluster, axes, full)
        if steps is None or steps >= whole:
            return Refusal(Reason.NO_GAIN, f"{launch.name} stays: two steps are not faster")
        return None


def _steps_us(cluster: Cluster, axes: Iterable[MeshAxis], full_bytes: int) -> float | None:
    """The time of the launches and of the copies before them; None if the rate of copies is unknown."""
    copy_ns = cluster.device.traffic_ns(2 * full_bytes)
    if copy_ns is None:
        return None
    launches = [cluster.collective_us(Kind.ALL_TO_ALL, axis.group, full_bytes) for axis in axes]
    return sum(us + (copy_ns + cluster.device.kernel_ns) / 1000 for us in launches)


def _rewrite(draft: Draft, match: Match, inner: MeshAxis, outer: MeshAxis) -> Refusal | None:
    """Plan the two exchanges. Rank (o, i) sends the part for rank (o', i') to rank (o, i') first."""
    root, sent = match.root, match["sent"]
    shape = list(draft.value(sent).shape)
    num_inner, num_outer = inner.group.size, outer.group.size
    rest = math.prod(shape) // (num_inner * num_outer)
    parts: AnyNode = draft.call("view", sent, [num_outer, num_inner, rest], before=root)
    for axis in (inner, outer):
        turned = draft.call("transpose.int", parts, 0, 1, before=root)
        sorted_parts = draft.call("clone", turned, before=root, memory_format=torch.contiguous_format)
        even = [1] * axis.group.size
        started = draft.call("all_to_all", sorted_parts, even, even, GroupOf(axis.launch), before=root)
        parts = draft.call("wait", started, before=root)
    whole = draft.call("view", parts, shape, before=root)
    return draft.why_not_replace(root, whole) or draft.replace({root: whole}, match.nodes)
