"""Gather later, or not at all: compute on each rank's shard, and all-reduce where shards are summed.

Why: the Gram matrix of a gathered tensor is the sum of the Gram matrices of its shards. Optimizers with orthogonalised
or preconditioned updates (Muon, Shampoo) gather whole weights for products that are far smaller than the weights.

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

Pointwise operators, permutations and matmuls with tensors that are equal on all ranks commute with a gather. A result
that is needed as a whole is gathered after them. Nodes that depend on each other are rewritten together or not at all,
whichever takes less time on the cluster or, without one, sends fewer bytes. `rank` and `own` mean the same as for
fuse-sliced-all-reduces. A gather of the result of another gather may sink in the next run.

Declines: rewrites whose all-reduces and later gathers would take longer; results that are not contiguous; unknown calls
in between.
Numerics: reassociates; sums are computed shard by shard. Bytes on the wire: fewer. Compute: divided among the ranks.
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
    """Compute on the shards of gathered tensors, and all-reduce where they are summed."""

    numerics = Numerics.REASSOCIATES
    reorders_launches = True
    why_not_nested = "whether and how often its collectives run is not known"

    rank: int | None = None
    """The rank that runs this graph. None: unknown, and no slice counts as the rank's own part."""
    own: tuple[str, ...] = ()
    """The nodes that take the rank's own part on every rank, as `own_parts` finds them."""

    def plan_one(self, graph: Graph, context: Context) -> Step:
        if not any(node.target is GATHER for node in graph.nodes):
            return self.step([], [])
        draft = Draft(graph)
        shards = Shards(draft, context, self.rank, self.own)
        decisions: list[Decision] = []
        replacements: dict[Node, AnyNode] = {}
        for family in shards.families():
            names = [launch.name for launch in family.launches]
            if set(family.leaks) >= {n for n in family.nodes if n.args and n.args[0] in family.launches}:
                sentence = f"{names[0]} stays: the gathered tensor itself is needed"
                decisions.append(self.decision(Reason.NO_GAIN, sentence, *names))
                continue
            refusal = _why_not(draft, shards, family, context)
            if refusal is None:
                _sink(draft, shards, family, replacements)
                sums = [n.name for n in family.nodes if n in shards.sums]
                reduced = f", and all-reduced {', '.join(sums)}" if sums else ""
                sentence = f"computed on the shards of {', '.join(names)}{reduced}"
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
        return Refusal(Reason.HAS_EFFECT, f"{name} stays: the unknown call {block.name} follows it", block.name)
    sizes = [(Kind.ALL_REDUCE, n) for n in family.nodes if n in shards.sums]
    sizes += [(Kind.ALL_GATHER, n) for n in family.leaks]
    time = sum(price(context, kind, group, num_bytes(ops.value_of(n)) or 0) for kind, n in sizes)
    gathers = [num_bytes(ops.value_of(launch)) or 0 for launch in family.launches]
    if group.size < 2 or time >= sum(price(context, Kind.ALL_GATHER, group, full) for full in gathers):
        return Refusal(Reason.NO_GAIN, f"{name} stays: the all-reduces and later gathers would not be faster")
    for _, node in sizes:
        if not ops.value_of(node).is_contiguous():
            return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: {node.name} is not contiguous", node.name)
    owned = [n for n in family.nodes if n in shards.own]
    return next(filter(None, (why_not_own(draft, n, shards.dims[shards.own[n]]) for n in owned)), None)


def _sink(draft: Draft, shards: Shards, family: Family, replacements: dict[Node, AnyNode]) -> None:
    """Plan the computation on shards, node by node; results needed as a whole are reduced or gathered in place."""
    part: dict[Node, AnyNode] = {}
    launch = family.launches[0]
    size = shards.group_size(launch)
    everything = [*family.nodes, *family.launches]
    for node in family.nodes:
        if node in shards.own:
            local = part[shards.own[node]]
            is_fresh = not isinstance(local, Node) and not draft.is_alias(local)
            replacement = local if is_fresh else draft.call("clone", local, before=node)
            draft.replace({node: replacement}, everything)
        elif node in shards.same:
            part[node] = part[shards.same[node]]
        elif node.args and node.args[0] in family.launches:
            part[node] = draft.bind(node.args[0])["input"]  # type: ignore[arg-type]
        elif node in shards.sums:
            replacements[node] = all_reduced(draft, _call(draft, node, {**replacements, **part}), "sum", launch, node)
            draft.replace({node: replacements[node]}, everything)
        elif node in shards.dims:
            part[node] = _call(draft, node, {**replacements, **part})
        if node in family.leaks:
            draft.replace({node: gathered(draft, part[node], shards.dims[node], size, launch, node)}, everything)


def _call(draft: Draft, node: Node, part: dict[Node, AnyNode]) -> AnyNode:
    """The same call on shards, and on the replacements of sums."""

    def by_parts(source: Node) -> Any:
        return part.get(source, source)

    args, kwargs = map_arg((node.args, dict(node.kwargs)), by_parts)
    return draft.call(node.target, *args, before=node, name=f"{node.name}_part", **kwargs)
