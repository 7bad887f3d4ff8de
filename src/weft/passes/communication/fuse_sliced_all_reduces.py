"""Fuse an all-reduce and the slice that each rank takes of it into a reduce-scatter.

Why: an all-reduce sends the whole sum to every rank. A rank that keeps only its own part needs half the bytes.

Before::

    ar: f32[4, 4] = all_reduce(g, 'sum', 'dp')
    w: f32[4, 4] = wait(ar)
    own: f32[2, 4] = slice(w, 0, 0, 2)  # on rank 0

After::

    own_reduce_scatter: f32[2, 4] = reduce_scatter(g, 'sum', 2, 'dp')
    own_wait: f32[2, 4] = wait(own_reduce_scatter)

The graph of one rank does not show whether every rank takes its own part. If all ranks took the first part, only the
first rank would launch a reduce-scatter, and all ranks would hang. So the pass needs `own`, the names of the nodes that
take the rank's own part on every rank; `weft.verification.agreement.agreement.own_parts` derives them from the graphs
of all ranks. A part is a slice of the sum, or an item of split or chunk, along any dim.

Declines: slices if `rank` is not given; slices that are not the rank's own part on every rank; sums that are used
outside the slice.
Numerics: reassociates; a reduce-scatter may sum in another order. Bytes on the wire: half.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from weft.graph import ops
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step
from weft.rewriting.draft import Draft, New
from weft.rewriting.launches import group_of, place_in, scattered, why_not_alone, why_not_own
from weft.rewriting.pattern import ANY, Match, Var, match_at, op
from weft.rewriting.rules import why_not_apply
from weft.rewriting.slices import PARTS, Slice, slice_on_any_dim

LAUNCH = op("all_reduce", Var("sent"), Var("reduce_op"), ANY).named("launch")
WHOLE = op("wait", LAUNCH).named("whole")
SLICE = op("slice", WHOLE).ignoring()
ITEM = op("operator.getitem", op(PARTS[:-1], WHOLE).named("parts").ignoring(), ANY)
ALL_REDUCE = ops.op_of("all_reduce")


@dataclass(frozen=True)
class FuseSlicedAllReduces(GraphwisePass):
    """Turn an all-reduce into a reduce-scatter if each rank uses only its own part."""

    numerics = Numerics.REASSOCIATES
    why_not_nested = "whether and how often its collectives run is not known"

    rank: int | None = None
    """The rank that runs this graph. None: unknown, and no slice is rewritten."""
    own: tuple[str, ...] = ()
    """The nodes that take the rank's own part on every rank, as `own_parts` finds them."""

    def plan_one(self, graph: Graph, context: Context) -> Step:
        if not any(node.target is ALL_REDUCE for node in graph.nodes):
            return self.step([], [])
        draft = Draft(graph)
        decisions: list[Decision] = []
        for node in draft.dag.nodes:
            match = next(filter(None, (match_at(draft, pattern, node) for pattern in (SLICE, ITEM))), None)
            piece = slice_on_any_dim(draft, node) if match is not None else None
            if match is None or piece is None or piece.is_whole:
                continue
            refusal = self._why_not(draft, match, piece, context) or why_not_apply(draft, match)
            if refusal is not None:
                decisions.append(self.decision(refusal.reason, refusal.sentence, node.name, blocking=refusal.blocking))
                continue
            made = _scattered(draft, match, piece, context)
            draft.replace({node: made}, match.nodes)
            sentence = f"replaced {node.name} with {made.name}"
            decisions.append(self.decision(Reason.APPLIED, sentence, match["launch"].name, node.name))
        return self.step(draft.actions, decisions)

    def _why_not(self, draft: Draft, match: Match, piece: Slice, context: Context) -> Refusal | None:
        name, launch, root = match.root.name, match["launch"], match.root
        refusal = why_not_alone(draft, launch, root)
        if refusal is not None:
            return refusal
        size = group_of(draft, launch, context).size
        part = piece.end - piece.start
        if size < 2 or part * size != piece.size:
            return Refusal(Reason.DOES_NOT_SPLIT, f"{name} stays: it is not one of {size} equal parts")
        if self.rank is None:
            sentence = f"{name} stays: the rank of this graph is not given"
            return Refusal(Reason.OTHER_RANKS, sentence)
        if name not in self.own:
            sentence = f"{name} stays: it is not known whether every rank takes its own part"
            return Refusal(Reason.OTHER_RANKS, sentence)
        own = place_in(group_of(draft, launch, context), self.rank)
        if own is None or piece.start != own * part:
            return Refusal(Reason.OTHER_RANKS, f"{name} stays: it is not the part of rank {self.rank}")
        users = [user for node in (match["whole"], match.get("parts")) if node for user in draft.users(node)]
        other = next((user for user in users if user not in (root, match.get("parts"))), None)
        if other is not None:
            return Refusal(Reason.NO_GAIN, f"{name} stays: {other.name} uses more of the sum", other.name)
        if piece.dim == 0 and not draft.value(match["sent"]).is_contiguous():
            return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: the reduced tensor is not contiguous")
        return why_not_own(draft, root, piece.dim)


def _scattered(draft: Draft, match: Match, piece: Slice, context: Context) -> New:
    sent, launch, root = match["sent"], match["launch"], match.root
    size = group_of(draft, launch, context).size
    if piece.dim:  # a reduce-scatter splits rows, so stack the parts along the first dim
        parts = draft.call("split", sent, piece.size // size, piece.dim, before=root)
        items = [draft.call("operator.getitem", parts, k, before=root) for k in range(size)]
        sent = draft.call("cat", items, before=root)
    return scattered(draft, sent, match["reduce_op"], size, launch, root)
