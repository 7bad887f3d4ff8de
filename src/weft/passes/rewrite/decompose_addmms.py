"""Decompose an addmm into a matmul and an addition if only pointwise operators use its result.

Why: a compiler fuses the addition into the pointwise kernel that follows, at no cost; a bias inside the addmm excludes
faster matmul kernels.

Before::

    s: f32[8, 6] = addmm(bias, x, w)
    r: f32[8, 6] = relu(s)

After::

    s_mm: f32[8, 6] = mm(x, w)
    s_add: f32[8, 6] = add(s_mm, bias)
    r: f32[8, 6] = relu(s_add)

The factors alpha and beta are kept. The pass acts where a compiler fuses pointwise operators: on tensors of a GPU, and
on any tensor if a cluster is given. There fuse-addmms leaves such additions alone, so the two do not undo each other.

Declines: tensors on a CPU, unless `anywhere` is set; 16-bit floats if `half` is unset; alpha = 0, with which an addmm
skips the product, whereas a multiplication turns infinities into NaN; any other alpha with 16-bit floats, whose product
may overflow before it is scaled.
Numerics: reassociates; the sum is rounded twice instead of once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import Draft
from weft.rewriting.pattern import Match, Var, op
from weft.rewriting.rules import Replacement, Rule
from weft.rewriting.uses import is_on_gpu, only_pointwise_users

PATTERN = op("addmm.default", Var("bias"), Var("x"), Var("w"), beta=Var("beta"), alpha=Var("alpha"))
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DecomposeAddmms(RewritePass):
    """Decompose an addmm that only pointwise operators use."""

    numerics = Numerics.REASSOCIATES

    anywhere: bool = False
    """Decompose on a CPU too."""

    half: bool = True
    """Decompose for 16-bit floats too, although that rounds to 16 bits twice."""

    def rules(self, context: Context) -> Iterable[Rule]:
        def replace(draft: Draft, match: Match) -> Replacement:
            if not only_pointwise_users(draft, match.root):
                return None
            return self._why_not(draft, match, context) or _decomposed(draft, match)

        return [Rule(PATTERN, replace)]

    def _why_not(self, draft: Draft, match: Match, context: Context) -> Refusal | None:
        name, value = match.root.name, draft.value(match.root)
        if not self.anywhere and not is_on_gpu(value, context):
            return Refusal(Reason.NO_GAIN, f"{name} stays: on a CPU one kernel for product and sum is faster")
        if not self.half and value.dtype in HALVES:
            return Refusal(
                Reason.FORBIDDEN, f"{name} stays: the option half is off, and its sum would be rounded to 16 bits twice"
            )
        if match["alpha"] == 0:
            return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: its alpha is 0, and infinity times zero is NaN")
        if match["alpha"] != 1 and value.dtype in HALVES:
            return Refusal(
                Reason.UNSUPPORTED_FORM, f"{name} stays: its 16-bit product may overflow before it is scaled"
            )
        return None


def _decomposed(draft: Draft, match: Match) -> Replacement:
    root = match.root
    product = draft.call("mm", match["x"], match["w"], before=root)
    if match["alpha"] != 1:
        product = draft.call("mul", product, match["alpha"], before=root)
    if match["beta"] == 0:  # addmm ignores the bias then, even its NaNs
        return product
    scaled: dict[str, Any] = {} if match["beta"] == 1 else {"alpha": match["beta"]}
    return draft.call("add", product, match["bias"], before=root, **scaled)
