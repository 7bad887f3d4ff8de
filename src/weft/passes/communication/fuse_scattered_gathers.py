"""Fuse a reduce-scatter and the all-gather of its result into one all-reduce.

Why: a reduce-scatter followed by an all-gather of the same group is an all-reduce. One launch pays the latency once,
and may use a faster algorithm.

Before::

    rs: f32[2, 4] = reduce_scatter(g, 'sum', 2, 'dp')
    w: f32[2, 4] = wait(rs)
    ag: f32[4, 4] = all_gather(w, 2, 'dp')
    full: f32[4, 4] = wait(ag)

After::

    full_all_reduce: f32[4, 4] = all_reduce(g, 'sum', 'dp')
    full_wait: f32[4, 4] = wait(full_all_reduce)

decompose-all-reduces is the inverse, for clusters on which two launches are faster.

Declines: launches of different groups; a scattered part with other users; a cluster on which the all-reduce is slower.
Numerics: reassociates; an all-reduce may sum in another order. Bytes on the wire: unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.graph.collective import num_bytes
from weft.graph.ops import Kind
from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import Draft
from weft.rewriting.launches import all_reduced, group_of, is_same_group, price
from weft.rewriting.pattern import ANY, Match, Var, op
from weft.rewriting.rules import Replacement, Rule

SCATTER = op("reduce_scatter", Var("sent"), Var("reduce_op"), ANY, ANY).named("scatter")
PART = op("wait", SCATTER).named("part")
PATTERN = op("wait", op("all_gather", PART, ANY, ANY).named("gather"))


@dataclass(frozen=True)
class FuseScatteredGathers(RewritePass):
    """Fuse a reduce-scatter and the all-gather of its result into one all-reduce."""

    numerics = Numerics.REASSOCIATES

    def rules(self, context: Context) -> Iterable[Rule]:
        def fused(draft: Draft, match: Match) -> Replacement:
            return _why_not(draft, match, context) or all_reduced(
                draft, match["sent"], match["reduce_op"], match["gather"], match.root
            )

        return [Rule(PATTERN, fused)]


def _why_not(draft: Draft, match: Match, context: Context) -> Refusal | None:
    name, scatter, gather, part = match.root.name, match["scatter"], match["gather"], match["part"]
    if not is_same_group(draft, scatter, gather):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: {scatter.name} and {gather.name} use different groups")
    other = next((n for node in (scatter, part) for n in draft.users(node) if n not in (part, gather)), None)
    if other is not None:
        return Refusal(Reason.NO_GAIN, f"{name} stays: {other.name} also uses the scattered part", other.name)
    full = num_bytes(draft.value(match["sent"]))
    if context.cluster is None or full is None:
        return None
    group = group_of(draft, gather, context)
    two_launches = sum(price(context, kind, group, full) for kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER))
    if price(context, Kind.ALL_REDUCE, group, full) > two_launches:
        return Refusal(Reason.NO_GAIN, f"{name} stays: on this cluster two launches are faster")
    return None
