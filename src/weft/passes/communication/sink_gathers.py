"""Gather later, or not at all: compute on the part of each rank, and reduce where parts are summed.

Why: the Gram matrix of a gathered tensor is the sum of the Gram matrices of its parts. Optimizers with orthogonal or
preconditioned updates (Muon, Shampoo) gather whole weights for products that are far smaller than the weights.

Before::

    ag: f32[4096, 64] = all_gather(x, 2, 'dp')
    w: f32[4096, 64] = wait(ag)
    t: f32[64, 4096] = t(w)
    gram: f32[64, 64] = mm(t, w)

After::

    t_part: f32[64, 2048] = t(x)
    gram_part: f32[64, 64] = mm(t_part, x)
    gram_all_reduce: f32[64, 64] = all_reduce(gram_part, 'sum', 'dp')
    gram_wait: f32[64, 64] = wait(gram_all_reduce)

Pointwise operators, permutations and products with tensors that are the same on all ranks commute with a gather; what
is needed as a whole behind them is gathered there. All that depends on each other is changed or left together: by the
time on the cluster, and without one by the bytes that a rank sends. `rank` and `own` are those of
fuse-sliced-all-reduces. A gather of what another gather gave may sink at the next run.

Declines: where reductions and later gathers would take longer; results that are not contiguous; unknown calls between.
Numerics: reassociates; sums are added by parts. Bytes on the wire: less. Compute: divided by the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from weft.graph import ops
from weft.graph.collective import num_bytes
from weft.graph.ops import Kind
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.launches import all_reduced, gathered, group_of, price, why_not_own
from weft.rewriting.shards import GATHER, Family, Shards


@dataclass(frozen=True)
class SinkGathers(GraphwisePass):
    """Compute on the parts of gathered tensors, and reduce where they are summed."""

    numerics = Numerics.REASSOCIATES
    reorders_launches = True
    why_not_nested = "whether and how often its collectives run is not known"

    rank: int | None = None
    """The rank that the graph is of. None: no part is its own."""
    own: tuple[str, ...] = ()
    """The nodes that take the part of their own rank on every rank, as `own_parts` finds them."""

    def plan_one(self, graph: Graph, context: Context) -> Step:
        if not any(node.target is GATHER for node in graph.nodes):
            return self.step([], [])
        draft = Draft(graph)
        shards = Shards(draft, context, self.rank, self.own)
        decisions: list[Decision] = []
        heirs: dict[Node, AnyNode] = {}
        for family in shards.families():
            names = [launch.name for launch in family.launches]
            if set(family.leaks) >= {n for n in family.nodes if n.args and n.args[0] in family.launches}:
                sentence = f"{names[0]} stays: what it gathers is needed as it is"
                decisions.append(self.decision(Reason.NO_GAIN, sentence, *names))
                continue
            refusal = _why_not(draft, shards, family, context)
            if refusal is None:
                _sink(draft, shards, family, heirs)
                sums = [n.name for n in family.nodes if n in shards.sums]
                behind = f", {', '.join(sums)} reduced" if sums else ""
                sentence = f"{', '.join(names)} computed on by parts{behind}"
                decisions.append(self.decision(Reason.APPLIED, sentence, *names))
            else:
                decisions.append(self.decision(refusal.reason, refusal.sentence, *names, blocking=refusal.blocking))
        return self.step(draft.actions, decisions)


def _why_not(draft: Draft, shards: Shards, family: Family, context: Context) -> Refusal | None:
    name = family.launches[0].name
    group = group_of(draft, family.launches[0], context)
    begin, end = (draft.position(n) for n in (family.launches[0], family.nodes[-1]))
    block = draft.boundary(begin, end)
    if block is not None:
        return Refusal(Reason.HAS_EFFECT, f"{name} stays: nothing is known of {block.name}, behind it", block.name)
    sizes = [(Kind.ALL_REDUCE, n) for n in family.nodes if n in shards.sums]
    sizes += [(Kind.ALL_GATHER, n) for n in family.leaks]
    time = sum(price(context, kind, group, num_bytes(ops.value_of(n)) or 0) for kind, n in sizes)
    gathers = [num_bytes(ops.value_of(launch)) or 0 for launch in family.launches]
    if group.size < 2 or time >= sum(price(context, Kind.ALL_GATHER, group, full) for full in gathers):
        return Refusal(Reason.NO_GAIN, f"{name} stays: to reduce and to gather later would take longer")
    for _, node in sizes:
        if not ops.value_of(node).is_contiguous():
            return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: {node.name} behind it is not contiguous", node.name)
    owned = [n for n in family.nodes if n in shards.own]
    return next(filter(None, (why_not_own(draft, n, shards.dims[shards.own[n]]) for n in owned)), None)


def _sink(draft: Draft, shards: Shards, family: Family, heirs: dict[Node, AnyNode]) -> None:
    """Plan the computation by parts, node by node; what is needed as a whole is reduced or gathered where it was."""
    part: dict[Node, AnyNode] = {}
    launch = family.launches[0]
    size = shards.group_size(launch)
    everything = [*family.nodes, *family.launches]
    for node in family.nodes:
        if node in shards.own:
            local = part[shards.own[node]]
            is_fresh = not isinstance(local, Node) and not draft.is_alias(local)
            heir = local if is_fresh else draft.call("clone", local, before=node)
            draft.replace({node: heir}, everything)
        elif node in shards.same:
            part[node] = part[shards.same[node]]
        elif node.args and node.args[0] in family.launches:
            part[node] = draft.bind(node.args[0])["input"]  # type: ignore[arg-type]
        elif node in shards.sums:
            heirs[node] = all_reduced(draft, _call(draft, node, {**heirs, **part}), "sum", launch, node)
            draft.replace({node: heirs[node]}, everything)
        elif node in shards.dims:
            part[node] = _call(draft, node, {**heirs, **part})
        if node in family.leaks:
            draft.replace({node: gathered(draft, part[node], shards.dims[node], size, launch, node)}, everything)


def _call(draft: Draft, node: Node, part: dict[Node, AnyNode]) -> AnyNode:
    """The same call on parts, and on the heirs of sums."""

    def by_parts(source: Node) -> Any:
        return part.get(source, source)

    args, kwargs = map_arg((node.args, dict(node.kwargs)), by_parts)
    return draft.call(node.target, *args, before=node, name=f"{node.name}_part", **kwargs)
