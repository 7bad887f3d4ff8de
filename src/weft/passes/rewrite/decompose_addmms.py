"""Take an addmm that only pointwise operators follow apart into a matmul and an addition.

Why: a compiler fuses the addition with what follows, for free; inside the addmm the bias keeps faster kernels away.

Before::

    s: f32[8, 6] = addmm(bias, x, w)
    r: f32[8, 6] = relu(s)

After::

    s_mm: f32[8, 6] = mm(x, w)
    s_add: f32[8, 6] = add(s_mm, bias)
    r: f32[8, 6] = relu(s_add)

The factors alpha and beta are kept. It pays where a compiler below fuses: on a GPU, by the device of the tensors or a
cluster that is given. What it takes apart, fuse-addmms leaves alone there.

Declines: on a CPU, unless asked for; 16-bit floats, if asked for; a factor of the product that is 0, by which an addmm
leaves the product out while a multiplication makes NaN of what is infinite; a factor of a product of 16-bit floats,
which may overflow before it is scaled.
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
    """Take an addmm that only pointwise operators follow apart."""

    numerics = Numerics.REASSOCIATES

    anywhere: bool = False
    """Whether to do so on a CPU too."""

    half: bool = True
    """Whether to do so for 16-bit floats, whose sum is then rounded to 16 bits twice."""

    def rules(self, context: Context) -> Iterable[Rule]:
        def apart(draft: Draft, match: Match) -> Replacement:
            if not only_pointwise_users(draft, match.root):
                return None
            return self._why_not(draft, match, context) or _taken_apart(draft, match)

        return [Rule(PATTERN, apart)]

    def _why_not(self, draft: Draft, match: Match, context: Context) -> Refusal | None:
        name, value = match.root.name, draft.value(match.root)
        if not self.anywhere and not is_on_gpu(value, context):
            return Refusal(Reason.NO_GAIN, f"{name} stays: on a CPU the sum is best computed with the product")
        if not self.half and value.dtype in HALVES:
            return Refusal(Reason.FORBIDDEN, f"{name} stays: 16-bit floats are to be summed before they are rounded")
        if match["alpha"] == 0:
            return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: infinite times zero is not a number")
        if match["alpha"] != 1 and value.dtype in HALVES:
            return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: its product may overflow before it is scaled")
        return None


def _taken_apart(draft: Draft, match: Match) -> Replacement:
    root = match.root
    product = draft.call("mm", match["x"], match["w"], before=root)
    if match["alpha"] != 1:
        product = draft.call("mul", product, match["alpha"], before=root)
    if match["beta"] == 0:  # addmm does not even look at the bias
        return product
    scaled: dict[str, Any] = {} if match["beta"] == 1 else {"alpha": match["beta"]}
    return draft.call("add", product, match["bias"], before=root, **scaled)
