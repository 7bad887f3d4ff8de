"""Send the parts of an f32 reduce-scatter in bf16, and sum them in f32 on the rank that gets them.

Why: a reduce-scatter in bf16 rounds after every addition. An all-to-all in bf16 sends as few bytes, and each part is
rounded only once, before it is sent.

Before::

    rs: f32[2, 8] = reduce_scatter(g, 'sum', 2, 'dp')
    w: f32[2, 8] = wait(rs)

After::

    w_to_copy: bf16[4, 8] = _to_copy(g, dtype=bf16)
    w_all_to_all: bf16[4, 8] = all_to_all(w_to_copy, [2, 2], [2, 2], 'dp')
    w_wait: bf16[4, 8] = wait(w_all_to_all)
    w_view: bf16[2, 2, 8] = view(w_wait, [2, 2, 8])
    w_sum: f32[2, 8] = sum(w_view, [0], dtype=f32)

An element of w differs from its original by at most 1/256 of the sum of the magnitudes of its terms, besides the
rounding of the sum in f32.

Declines: anything but sums and averages of gradients in f32; any reduce-scatter without a cluster to predict times on;
those that would not become faster, such as small ones.
Numerics: changes-dtype: the terms are rounded to bf16. Bytes on the wire: half. Memory: the received parts take half of
the whole tensor. No preset contains this pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from weft.graph.collective import Collective, num_bytes
from weft.graph.ops import Kind
from weft.graph.roles import Role, Roles
from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.launches import LINEAR, exchanged, group_of, why_not_alone, why_not_faster
from weft.rewriting.pattern import ANY, Match, Var, op
from weft.rewriting.rules import Replacement, Rule

PATTERN = op("wait", op("reduce_scatter", Var("sent"), Var("reduce_op"), Var("size"), ANY).named("launch"))


@dataclass(frozen=True)
class CompressReduceScatters(RewritePass):
    """Send the parts of an f32 reduce-scatter in bf16, and sum them in f32."""

    numerics = Numerics.CHANGES_DTYPE

    always: bool = False
    """Compress even where it saves no time."""

    def rules(self, context: Context) -> Iterable[Rule]:
        roles = functools.cache(lambda draft: Roles(draft.dag))

        def replace(draft: Draft, match: Match) -> Replacement:
            launch = match["launch"]
            role = roles(draft).of(Collective(launch)) if isinstance(launch, Node) else Role.GRADIENTS
            return self._why_not(draft, match, role, context) or _compressed(draft, match)

        return [Rule(PATTERN, replace)]

    def _why_not(self, draft: Draft, match: Match, role: Role, context: Context) -> Refusal | None:
        name, value, size = match.root.name, draft.value(match["sent"]), match["size"]
        if role is not Role.GRADIENTS:
            return Refusal(Reason.OTHER_ROLE, f"{name} stays: it carries {role.value}, not gradients")
        if value.dtype is not torch.float32:
            return Refusal(Reason.NO_GAIN, f"{name} stays: it is not reduced in f32")
        if match["reduce_op"] not in LINEAR:
            return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: it reduces by {match['reduce_op']}")
        if not value.is_contiguous() or not all(type(each) is int for each in value.shape):
            return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: the reduced tensor is not contiguous or static")
        refusal = why_not_alone(draft, match["launch"], match.root)
        if refusal is not None or self.always:
            return refusal
        full = num_bytes(value) or 0
        casts = full + full // 2 + full // 2 + full // size  # to bf16, and the sum
        group, sent = group_of(draft, match["launch"], context), full // 2
        return why_not_faster(name, context, group, (Kind.REDUCE_SCATTER, full), (Kind.ALL_TO_ALL, sent), casts)


def _compressed(draft: Draft, match: Match) -> AnyNode:
    root, size = match.root, match["size"]
    narrow = draft.call("_to_copy", match["sent"], dtype=torch.bfloat16, before=root)
    received = exchanged(draft, narrow, size, match["launch"], root)
    parts = draft.call("view", received, [size, *draft.value(root).shape], before=root)
    reduction = "sum.dim_IntList" if match["reduce_op"] == "sum" else "mean.dim"
    return draft.call(reduction, parts, [0], dtype=torch.float32, before=root)
