"""Decompose a memory-bound matmul into an elementwise product and a sum.

Why: a matmul with many rows and few columns computes so little per element that a fused pointwise kernel can be faster.
With one term per sum there is nothing to add, and it is faster: see `max-terms`.

Before::

    m: f32[20480, 4] = mm(x, w)

After::

    m_unsqueeze: f32[20480, 8, 1] = unsqueeze(x, 2)
    m_unsqueeze_1: f32[1, 8, 4] = unsqueeze(w, 0)
    m_mul: f32[20480, 8, 4] = mul(m_unsqueeze, m_unsqueeze_1)
    m_sum: f32[20480, 4] = sum.dim_IntList(m_mul, [1])

The pass acts where a compiler fuses the product into the sum: on tensors of a GPU, and on any tensor if a cluster is
given. A bmm with a batch of one becomes an mm on every device: other passes look for mm, and its kernels are tuned for
more sizes.

Declines: tensors on a CPU, unless `anywhere` is set; sizes outside the limits or unknown; 16-bit floats, whose products
would be rounded before they are summed.
Numerics: reassociates; on a CPU, a bmm with a batch of one and the mm differ in the last bit for some f32 sizes.
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
from weft.rewriting.pattern import Match, Var, op
from weft.rewriting.rules import Replacement, Rule
from weft.rewriting.uses import is_on_gpu

DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class DecomposeMatmuls(RewritePass):
    """Decompose a memory-bound matmul."""

    numerics = Numerics.REASSOCIATES

    min_rows: int = 10240
    """Minimum number of rows of the result, counted over the whole batch."""

    max_terms: int = 1
    """Maximum number of terms of each sum.

    On an H200 (torch 2.11 compiled, 15 November 2026, `benchmarks/gpu/rewrites.py`), one term took a third of the time;
    8 terms took from a third to 1.6 times, depending on the rows; 16 and 32 terms took 2 to 12 times as long.
    """

    max_columns: int = 32
    """Maximum number of columns of the result."""

    anywhere: bool = False
    """Decompose on a CPU too."""

    def rules(self, context: Context) -> Iterable[Rule]:
        def replace(draft: Draft, match: Match) -> Replacement:
            x, w = draft.value(match["x"]), draft.value(match["w"])
            if not isinstance(x, Tensor) or not isinstance(w, Tensor):
                return None
            return self._why_not(x, w, match.root.name, context) or _decomposed(draft, match, x.dim() - 2)

        single = Rule(op("bmm", Var("x"), Var("w")), _single)
        return [single, *(Rule(op(name, Var("x"), Var("w")), replace) for name in ("mm", "bmm"))]

    def _why_not(self, x: Tensor, w: Tensor, name: str, context: Context) -> Refusal | None:
        if any(type(size) is not int for size in (*x.shape, *w.shape)):
            return Refusal(Reason.UNKNOWN_SIZE, f"{name} stays: not all of its sizes are known")
        rows, terms, columns = x.shape[-2] * (x.shape[0] if x.dim() == 3 else 1), x.shape[-1], w.shape[-1]
        is_thin = rows >= self.min_rows and terms <= self.max_terms and columns <= self.max_columns
        if not is_thin:
            return Refusal(Reason.NO_GAIN, f"{name} stays: its sizes are outside the limits, so it is bound by compute")
        if x.dtype not in DTYPES:
            return Refusal(
                Reason.UNSUPPORTED_FORM, f"{name} stays: its products would be rounded before they are summed"
            )
        if not self.anywhere and not is_on_gpu(x, context):
            return Refusal(Reason.NO_GAIN, f"{name} stays: on a CPU no compiler fuses its products into the sum")
        return None


def _single(draft: Draft, match: Match) -> Replacement:
    """A bmm with a batch of one as an mm."""
    root, factors = match.root, (match["x"], match["w"])
    values = [draft.value(factor) for factor in factors]
    if not all(isinstance(value, Tensor) and type(value.shape[0]) is int and value.shape[0] == 1 for value in values):
        return None
    product = draft.call("mm", *(draft.call("select.int", f, 0, 0, before=root) for f in factors), before=root)
    return draft.call("unsqueeze", product, 0, before=root)


def _decomposed(draft: Draft, match: Match, batch: int) -> Replacement:
    root = match.root
    if draft.value(match["x"]).shape[-1] == 1:  # nothing to sum
        return draft.call("mul", match["x"], match["w"], before=root)
    left = draft.call("unsqueeze", match["x"], batch + 2, before=root)
    right = draft.call("unsqueeze", match["w"], batch, before=root)
    product = draft.call("mul", left, right, before=root)
    return draft.call("sum.dim_IntList", product, [batch + 1], before=root)
