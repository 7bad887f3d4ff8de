"""Multiply by int8 weights directly instead of by a bf16 copy of them.

Why: int8 weights take half the bytes of bf16 ones. Casting them first writes and reads a full bf16 copy.

Before::

    t: i8[64, 32] = t(w)
    c: bf16[64, 32] = _to_copy(t, dtype=bf16)
    m: bf16[8, 32] = mm(x, c)
    s: bf16[8, 32] = mul(m, scale)

After::

    s_weight_int8pack_mm: bf16[8, 32] = _weight_int8pack_mm(x, w, scale)

The weight may be transposed before or after the cast, and the product may be viewed before it is scaled.

Declines: activations or scales other than bf16; scales that are not one per column; products with other users; weights
or activations that are not contiguous; numbers of terms that the kernel does not support.
Numerics: reassociates; the product is rounded once, after it is scaled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import Draft
from weft.rewriting.pattern import ANY, VIEWS, Either, Match, Var, op
from weft.rewriting.rules import Replacement, Rule

TURNS = ("t", "permute", "transpose.int")
CASTS = ("_to_copy", "prims.convert_element_type.default")
WEIGHT = Either(
    op(CASTS, op(TURNS, Var("w")).ignoring()).named("weight").ignoring(),
    op(TURNS, op(CASTS, Var("w")).ignoring()).named("weight").ignoring(),
)
NUM_TERMS = 32
"""The number of terms must be a multiple of this, one vector of bf16. torch 2.13's kernel aborts with 7 terms."""
PRODUCT = op("mm", Var("x"), WEIGHT).named("product")


@dataclass(frozen=True)
class FuseInt8Matmuls(RewritePass):
    """Multiply by int8 weights directly."""

    numerics = Numerics.REASSOCIATES

    def rules(self, context: Context) -> Iterable[Rule]:
        viewed = op(VIEWS, PRODUCT, ANY).named("viewed")
        return [
            Rule(op("mul", PRODUCT, Var("scale")).either_way(), _fused),
            Rule(op("mul", viewed, Var("scale")).either_way(), _fused),
        ]


def _fused(draft: Draft, match: Match) -> Replacement:
    root, w = match.root, draft.value(match["w"])
    if not isinstance(w, Tensor) or w.dtype != torch.int8 or w.dim() != 2:
        return None
    refusal = _why_not(draft, match)
    if refusal is not None:
        return refusal
    product = draft.call("_weight_int8pack_mm", match["x"], match["w"], match["scale"], before=root)
    if match.get("viewed") is None:
        return product
    return draft.call("view", product, list(draft.value(root).shape), before=root)


def _why_not(draft: Draft, match: Match) -> Refusal | None:
    name, product = match.root.name, match["product"]
    x, w, weight = (draft.value(match[key]) for key in ("x", "w", "weight"))
    scale = draft.value(match["scale"]) if not isinstance(match["scale"], int | float) else None
    if type(w.shape[1]) is not int or w.shape[1] % NUM_TERMS:
        return Refusal(Reason.NO_KERNEL, f"{name} stays: the kernel needs a multiple of {NUM_TERMS} terms")
    if list(weight.shape) != [w.shape[1], w.shape[0]]:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: its weight is not transposed")
    if not isinstance(scale, Tensor) or list(scale.shape) != [w.shape[0]]:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: it does not have one scale per column")
    if {x.dtype, weight.dtype, scale.dtype} != {torch.bfloat16}:
        return Refusal(Reason.NO_KERNEL, f"{name} stays: activations and scales must be bf16")
    if not (x.is_contiguous() and w.is_contiguous() and scale.is_contiguous()):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: a factor is not contiguous")
    result, viewed = draft.value(match.root), match.get("viewed")
    if viewed is not None and (result.shape[-1] != w.shape[0] or any(type(n) is not int for n in result.shape)):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: the view changes the columns of the product")
    if len(draft.users(product)) > 1 or (viewed is not None and len(draft.users(viewed)) > 1):
        return Refusal(Reason.HOLDS_MEMORY, f"{name} stays: {product.name} has other users")
    return None
