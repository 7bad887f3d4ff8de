"""Write down the running sum of a constant instead of computing it.

Why: positions and offsets are traced as sums of ones; a running sum is slow, an even row of numbers is free.

Before::

    ones: i64[16] = full([16], 1, dtype=i64)
    n: i64[16] = cumsum(ones, 0)

After::

    n_arange: i64[16] = arange.start_step(1, 17, 1, dtype=i64, device=device('cpu'))

Declines: floats whose sums are rounded on the way (their last number is too large, or they are no whole numbers).
Numerics: exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.passes.base import Context, Numerics
from weft.passes.draft import Draft, Refusal
from weft.passes.pattern import Match, Var, op
from weft.passes.rewriting import Replacement, RewritePass, Rule
from weft.planning.plan import Reason

LARGEST = {torch.float64: 1 << 53, torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8}
"""Up to here every whole number is a value of the dtype."""
CONSTANTS = (
    op("full", fill_value=Var("fill")).ignoring(),
    op("full_like", fill_value=Var("fill")).ignoring(),
    op("new_full", fill_value=Var("fill")).ignoring(),
    op(("ones", "ones_like", "new_ones")).named("ones").ignoring(),
    op(("zeros", "zeros_like", "new_zeros")).ignoring(),
)


@dataclass(frozen=True)
class FoldConstantCumsums(RewritePass):
    """Write down the running sum of a constant."""

    numerics = Numerics.EXACT

    def rules(self, context: Context) -> Iterable[Rule]:
        return [Rule(op("cumsum", c.named("constant"), Var("dim")).ignoring("dtype"), _folded) for c in CONSTANTS]


def _folded(draft: Draft, match: Match) -> Replacement:
    root = match.root
    value, dim = draft.value(root), match["dim"]
    fill = match.get("fill")
    if fill is None:
        fill = int(str(match["constant"].target).startswith(("aten.ones", "aten.new_ones")))
    if not isinstance(value, Tensor) or not isinstance(fill, int | float):
        return Refusal(Reason.UNKNOWN_SIZE, f"{root.name} stays: the number that it sums is not known")
    if any(type(size) is not int for size in value.shape) or not value.dim():
        return Refusal(Reason.UNKNOWN_SIZE, f"{root.name} stays: not all of its sizes are known")
    fill = _as_stored(draft.value(match["constant"]).dtype, fill)
    length = value.shape[dim]
    if not _is_exact(value.dtype, fill, length):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{root.name} stays: its sums are rounded on the way")
    return _row(draft, root, value, int(fill), dim % value.dim())


def _as_stored(dtype: torch.dtype, fill: Any) -> Any:
    """The number that a constant holds: a bool is 0 or 1, a whole number has no fraction."""
    if dtype is torch.bool:
        return int(bool(fill))
    return fill if dtype.is_floating_point else int(fill)


def _is_exact(dtype: torch.dtype, fill: Any, length: int) -> bool:
    if math.isnan(fill) or math.isinf(fill) or fill != int(fill) or (fill == 0 and math.copysign(1, fill) < 0):
        return False
    limit = LARGEST.get(dtype, 0) if dtype.is_floating_point else torch.iinfo(dtype).max
    return not dtype.is_complex and abs(fill) * length <= limit


def _row(draft: Draft, root: Any, value: Tensor, fill: int, dim: int) -> Replacement:
    keywords: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    if fill == 0:
        return draft.call("full", list(value.shape), 0, before=root, **keywords)
    length = value.shape[dim]
    row = draft.call("arange.start_step", fill, fill * (length + 1), fill, before=root, **keywords)
    if value.dim() == 1:
        return row
    shape = [1] * value.dim()
    shape[dim] = length
    row = draft.call("view", row, shape, before=root)
    wide = draft.call("expand", row, list(value.shape), before=root)
    return draft.call("clone", wide, memory_format=torch.contiguous_format, before=root)
