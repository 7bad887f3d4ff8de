"""Take a matmul that only moves memory apart into a product of elements and a sum.

Why: a matmul of many rows with a few columns does so little per element that a fused pointwise kernel, which needs no
tiles, can be faster; with a single column of the left factor, where there is nothing to sum, it is.

Before::

    m: f32[20480, 4] = mm(x, w)

After::

    m_unsqueeze: f32[20480, 8, 1] = unsqueeze(x, 2)
    m_unsqueeze_1: f32[1, 8, 4] = unsqueeze(w, 0)
    m_mul: f32[20480, 8, 4] = mul(m_unsqueeze, m_unsqueeze_1)
    m_sum: f32[20480, 4] = sum.dim_IntList(m_mul, [1])

It pays where a compiler below fuses the product into the sum: on a GPU, by the device of the tensors or a cluster that
is given. A batch of one matrix (bmm) becomes the product of that matrix (mm) anywhere: other passes look for it, and
its kernels are tuned for more sizes.

Declines: on a CPU, unless asked for; sizes outside the limits or unknown; 16-bit floats, which would be rounded early.
Numerics: reassociates; on a CPU a bmm of one f32 matrix and its mm differ in the last digit for some sizes.
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
    """Take a matmul that only moves memory apart."""

    numerics = Numerics.REASSOCIATES

    min_rows: int = 10240
    """The least number of rows of the result (with the batch) for which it pays."""

    max_terms: int = 1
    """The largest number of terms of each sum for which it pays.

    On an H200 (torch 2.11 compiled, 15 November 2026, `benchmarks/gpu/rewrites.py`) one term took a third of the time;
    8 terms from a third to 1.6 times, by the number of rows; 16 and 32 terms twice to twelve times as long.
    """

    max_columns: int = 32
    """The largest number of columns for which it pays."""

    anywhere: bool = False
    """Whether to do so on a CPU too."""

    def rules(self, context: Context) -> Iterable[Rule]:
        def apart(draft: Draft, match: Match) -> Replacement:
            x, w = draft.value(match["x"]), draft.value(match["w"])
            if not isinstance(x, Tensor) or not isinstance(w, Tensor):
                return None
            return self._why_not(x, w, match.root.name, context) or _taken_apart(draft, match, x.dim() - 2)

        single = Rule(op("bmm", Var("x"), Var("w")), _single)
        return [single, *(Rule(op(name, Var("x"), Var("w")), apart) for name in ("mm", "bmm"))]

    def _why_not(self, x: Tensor, w: Tensor, name: str, context: Context) -> Refusal | None:
        if any(type(size) is not int for size in (*x.shape, *w.shape)):
            return Refusal(Reason.UNKNOWN_SIZE, f"{name} stays: not all of its sizes are known")
        rows, terms, columns = x.shape[-2] * (x.shape[0] if x.dim() == 3 else 1), x.shape[-1], w.shape[-1]
        is_thin = rows >= self.min_rows and terms <= self.max_terms and columns <= self.max_columns
        if not is_thin:
            return Refusal(Reason.NO_GAIN, f"{name} stays: it computes more than it moves")
        if x.dtype not in DTYPES:
            return Refusal(
                Reason.UNSUPPORTED_FORM, f"{name} stays: its products would be rounded before they are summed"
            )
        if not self.anywhere and not is_on_gpu(x, context):
            return Refusal(Reason.NO_GAIN, f"{name} stays: on a CPU nothing fuses its products into the sum")
        return None


def _single(draft: Draft, match: Match) -> Replacement:
    """A batch of one matrix as that matrix."""
    root, factors = match.root, (match["x"], match["w"])
    values = [draft.value(factor) for factor in factors]
    if not all(isinstance(value, Tensor) and type(value.shape[0]) is int and value.shape[0] == 1 for value in values):
        return None
    product = draft.call("mm", *(draft.call("select.int", f, 0, 0, before=root) for f in factors), before=root)
    return draft.call("unsqueeze", product, 0, before=root)


def _taken_apart(draft: Draft, match: Match, batch: int) -> Replacement:
    root = match.root
    if draft.value(match["x"]).shape[-1] == 1:  # nothing to sum
        return draft.call("mul", match["x"], match["w"], before=root)
    left = draft.call("unsqueeze", match["x"], batch + 2, before=root)
    right = draft.call("unsqueeze", match["w"], batch, before=root)
    product = draft.call("mul", left, right, before=root)
    return draft.call("sum.dim_IntList", product, [batch + 1], before=root)
