"""Multiply with int8 weights as they are, instead of with a copy of them in bf16.

Why: weights in int8 are half the bytes; a product that casts them first writes and reads them once more in full.

Before::

    t: i8[64, 32] = t(w)
    c: bf16[64, 32] = _to_copy(t, dtype=bf16)
    m: bf16[8, 32] = mm(x, c)
    s: bf16[8, 32] = mul(m, scale)

After::

    s_weight_int8pack_mm: bf16[8, 32] = _weight_int8pack_mm(x, w, scale)

Four forms: the weight is turned and cast or cast and turned, with or without views around the product.

Declines: another dtype than bf16 of activations and scales; scales that are not one for each column; products that
somebody else needs; weights or activations that are not contiguous; numbers of terms that the kernel does not take.
Numerics: reassociates; the product is rounded once, behind its scale.
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
"""Terms of a product are a multiple of this: one vector of bf16. torch 2.13's kernel ends the process at 7 terms."""
PRODUCT = op("mm", Var("x"), WEIGHT).named("product")


@dataclass(frozen=True)
class FuseInt8Matmuls(RewritePass):
    """Multiply with int8 weights as they are."""

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
        return Refusal(Reason.NO_KERNEL, f"{name} stays: the kernel takes multiples of {NUM_TERMS} terms")
    if list(weight.shape) != [w.shape[1], w.shape[0]]:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: its weight is not turned")
    if not isinstance(scale, Tensor) or list(scale.shape) != [w.shape[0]]:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: its scales are not one for each column")
    if {x.dtype, weight.dtype, scale.dtype} != {torch.bfloat16}:
        return Refusal(Reason.NO_KERNEL, f"{name} stays: activations and scales must be bf16")
    if not (x.is_contiguous() and w.is_contiguous() and scale.is_contiguous()):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: a factor is not contiguous")
    result, viewed = draft.value(match.root), match.get("viewed")
    if viewed is not None and (result.shape[-1] != w.shape[0] or any(type(n) is not int for n in result.shape)):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: its columns are not those of the product")
    if len(draft.users(product)) > 1 or (viewed is not None and len(draft.users(viewed)) > 1):
        return Refusal(Reason.HOLDS_MEMORY, f"{name} stays: others use {product.name} too")
    return None
