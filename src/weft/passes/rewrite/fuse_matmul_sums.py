"""Fuse the sum of two matmuls into one matmul.

Why: both products are written to memory and read back only to be added.

Before::

    a: f32[64, 64] = mm(x, w)
    b: f32[64, 64] = mm(y, v)
    s: f32[64, 64] = add(a, b)

After::

    s_cat: f32[64, 8] = cat([x, y], 1)
    s_cat_1: f32[8, 64] = cat([w, v])
    s_mm: f32[64, 64] = mm(s_cat, s_cat_1)

Products that share a factor are cheaper still: x w + x v = x (w + v). Otherwise the factors are concatenated, which
pays off if copying them costs less than writing, reading and adding one product.

Declines: products that differ in size or dtype, or have other users; factors that cost more to copy than the fusion
saves; a shared factor with 16-bit floats, since the sum of the other two would be rounded before it is multiplied.
Numerics: reassociates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from weft.compat import hint_of
from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import Draft
from weft.rewriting.pattern import Match, Var, op
from weft.rewriting.rules import Replacement, Rule

FIRST = op("mm", Var("x"), Var("w")).named("first")
SECOND = op("mm", Var("y"), Var("v")).named("second")

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FuseMatmulSums(RewritePass):
    """Fuse the sum of two matmuls into one matmul."""

    numerics = Numerics.REASSOCIATES

    def rules(self, context: Context) -> Iterable[Rule]:
        return [Rule(op("add", FIRST, SECOND), _fused)]


def _fused(draft: Draft, match: Match) -> Replacement:
    first, second, root = match["first"], match["second"], match.root
    if first is second:
        return None
    if any(draft.num_users(node) > 1 for node in (first, second)):
        return Refusal(Reason.HOLDS_MEMORY, f"{root.name} stays: {first.name} or {second.name} has other users")
    values = [draft.value(node) for node in (first, second, root)]
    if len({(tuple(map(str, v.shape)), v.dtype) for v in values}) > 1:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{root.name} stays: its products differ in size or dtype")
    if (match["x"] is match["y"] or match["w"] is match["v"]) and values[0].dtype in HALVES:
        sentence = f"{root.name} stays: the sum of its 16-bit factors would be rounded before it is multiplied"
        return Refusal(Reason.UNSUPPORTED_FORM, sentence)
    if match["x"] is match["y"]:
        total = draft.call("add", match["w"], match["v"], before=root)
        return draft.call("mm", match["x"], total, before=root)
    if match["w"] is match["v"]:
        total = draft.call("add", match["x"], match["y"], before=root)
        return draft.call("mm", total, match["w"], before=root)
    return _why_not_side_by_side(draft, match) or draft.call(
        "mm",
        draft.call("cat", [match["x"], match["y"]], 1, before=root),
        draft.call("cat", [match["w"], match["v"]], before=root),
        before=root,
    )


def _why_not_side_by_side(draft: Draft, match: Match) -> Refusal | None:
    """Why concatenating does not pay off.

    It reads and writes all factors; it saves writing one product, reading it, and adding it to the other.
    """
    root = match.root
    sizes = [hint_of(n) for name in "xywv" for n in draft.value(match[name]).shape]
    rows, columns = (hint_of(n) for n in draft.value(root).shape)
    if None in sizes or rows is None or columns is None:
        return Refusal(Reason.UNKNOWN_SIZE, f"{root.name} stays: not all of its sizes are known")
    depth = sum(hint_of(draft.value(match[name]).shape[1]) or 0 for name in "xy")
    if 2 * depth * (rows + columns) >= 3 * rows * columns:
        return Refusal(Reason.NO_GAIN, f"{root.name} stays: copying its factors costs more than the fusion saves")
    return None
