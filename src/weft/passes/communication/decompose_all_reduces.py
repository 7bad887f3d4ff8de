"""Split an all-reduce into a reduce-scatter and an all-gather where these are faster.

Why: on some measured clusters an all-reduce is slower than a reduce-scatter and an all-gather of the same bytes.
Moreover, two launches can be scheduled separately, each overlapping with other work.

Before::

    ar: f32[4, 4] = all_reduce(g, 'sum', 'dp')
    w: f32[4, 4] = wait(ar)

After::

    w_reduce_scatter: f32[2, 4] = reduce_scatter(g, 'sum', 2, 'dp')
    w_wait: f32[2, 4] = wait(w_reduce_scatter)
    w_all_gather: f32[4, 4] = all_gather(w_wait, 2, 'dp')
    w_wait_1: f32[4, 4] = wait(w_all_gather)

fuse-scattered-gathers is the inverse.

Declines: any all-reduce without a cluster to predict times on; all-reduces that would not become faster; rows that do
not split evenly over the ranks.
Numerics: reassociates; a reduce-scatter may sum in another order. Bytes on the wire: unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.graph.collective import num_bytes
from weft.graph.groups import Group
from weft.graph.ops import Kind
from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import Draft
from weft.rewriting.launches import gathered, group_of, price, scattered, why_not_alone
from weft.rewriting.pattern import ANY, Match, Var, op
from weft.rewriting.rules import Replacement, Rule

LAUNCH = op("all_reduce", Var("sent"), Var("reduce_op"), ANY).named("launch")


@dataclass(frozen=True)
class DecomposeAllReduces(RewritePass):
    """Split an all-reduce into a reduce-scatter and an all-gather where these are faster."""

    numerics = Numerics.REASSOCIATES

    always: bool = False
    """Split even where it saves no time."""

    def rules(self, context: Context) -> Iterable[Rule]:
        def replace(draft: Draft, match: Match) -> Replacement:
            group = group_of(draft, match["launch"], context)
            refusal = self._why_not(draft, match, group, context)
            if refusal is not None:
                return refusal
            sent, launch, root = match["sent"], match["launch"], match.root
            part = scattered(draft, sent, match["reduce_op"], group.size, launch, root)
            return gathered(draft, part, 0, group.size, launch, root)

        return [Rule(op("wait", LAUNCH), replace)]

    def _why_not(self, draft: Draft, match: Match, group: Group, context: Context) -> Refusal | None:
        name, value = match.root.name, draft.value(match["sent"])
        refusal = why_not_alone(draft, match["launch"], match.root)
        if refusal is not None:
            return refusal
        rows = value.shape[0] if value.dim() else 1
        if type(rows) is not int or group.size < 2 or rows % group.size:
            sentence = f"{name} stays: its rows do not split evenly over {group.size} ranks"
            return Refusal(Reason.DOES_NOT_SPLIT, sentence)
        if not value.is_contiguous():
            return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: the reduced tensor is not contiguous")
        if self.always:
            return None
        full = num_bytes(value)
        if context.cluster is None or full is None:
            return Refusal(Reason.NO_GAIN, f"{name} stays: without a cluster the gain of two launches is unknown")
        two_launches = sum(price(context, kind, group, full) for kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER))
        if two_launches >= price(context, Kind.ALL_REDUCE, group, full):
            return Refusal(Reason.NO_GAIN, f"{name} stays: two launches would not be faster")
        return None
