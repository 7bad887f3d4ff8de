"""Replace the cumulative sum of a constant with an arange.

Why: positions and offsets are often traced as cumulative sums of ones. A cumulative sum is a slow scan; an arange is
almost free.

Before::

    ones: i64[16] = full([16], 1, dtype=i64)
    n: i64[16] = cumsum(ones, 0)

After::

    n_arange: i64[16] = arange.start_step(1, 17, 1, dtype=i64, device=device('cpu'))

The constant may be cast before it is summed, if every dtype on the way represents it exactly.

Declines: constants and sums that would round or wrap around (too large for their dtype, or not integers); sums of bools
or complex numbers.
Numerics: exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.graph import ops
from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.pattern import Match, Var, match_at, op
from weft.rewriting.rules import Replacement, Rule

LARGEST = {
    **{torch.float64: 1 << 53, torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8},
    **{dtype: torch.iinfo(dtype).max for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)},
}
"""For each dtype that torch.arange supports: up to here it represents every integer exactly."""
CONSTANTS = (
    op("full", fill_value=Var("fill")).ignoring(),
    op("full_like", fill_value=Var("fill")).ignoring(),
    op("new_full", fill_value=Var("fill")).ignoring(),
    op(("ones", "ones_like", "new_ones")).named("ones").ignoring(),
    op(("zeros", "zeros_like", "new_zeros")).ignoring(),
)

CASTS = frozenset(ops.op_of(name) for name in ("_to_copy", "prims.convert_element_type.default", "to.dtype")) - {None}


@dataclass(frozen=True)
class FoldConstantCumsums(RewritePass):
    """Replace the cumulative sum of a constant with an arange."""

    numerics = Numerics.EXACT

    def rules(self, context: Context) -> Iterable[Rule]:
        return [Rule(op("cumsum", Var("summed"), Var("dim")).ignoring("dtype"), _folded)]


def _folded(draft: Draft, match: Match) -> Replacement:
    root, value, dim = match.root, draft.value(match.root), match["dim"]
    chain = _chain(draft, match["summed"])
    found = next(filter(None, (match_at(draft, constant, chain[0]) for constant in CONSTANTS)), None) if chain else None
    if found is None:
        return None
    match.nodes += chain
    fill = found.get("fill")
    if fill is None:
        fill = int(str(chain[0].target).startswith(("aten.ones", "aten.new_ones")))
    if not isinstance(value, Tensor) or not isinstance(fill, int | float):
        return Refusal(Reason.UNKNOWN_SIZE, f"{root.name} stays: the constant that it sums is not known")
    if not value.dim():
        return Refusal(Reason.NO_GAIN, f"{root.name} stays: it sums a single number")
    if any(type(size) is not int for size in value.shape):
        return Refusal(Reason.UNKNOWN_SIZE, f"{root.name} stays: not all of its sizes are known")
    number = _as_stored(fill, [draft.value(node).dtype for node in chain])
    if number is None:
        sentence = f"{root.name} stays: not every dtype on the way holds {fill} as an integer"
        return Refusal(Reason.UNSUPPORTED_FORM, sentence)
    # The end of an integer arange is one step past the last value, and must fit the dtype as well.
    last = value.shape[dim] + (not value.dtype.is_floating_point)
    if not _holds(value.dtype, number * last):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{root.name} stays: its sums exceed the exact integers of their dtype")
    return _row(draft, root, value, number, dim % value.dim())


def _chain(draft: Draft, node: Any) -> list[AnyNode]:
    """The tensor that casts start from, followed by these casts in order."""
    found: list[AnyNode] = []
    while isinstance(node, AnyNode):
        found.append(node)
        node = next(iter(draft.bind(node).values())) if node.target in CASTS else None
    return found[::-1]


def _as_stored(number: float, dtypes: Iterable[torch.dtype]) -> int | None:
    """The constant as an integer, if it survives a cast to each dtype in turn; None otherwise."""
    for dtype in dtypes:
        number = int(bool(number)) if dtype is torch.bool else number
        is_whole = math.isfinite(number) and number == int(number) and (number != 0 or math.copysign(1, number) > 0)
        if not is_whole or not (dtype is torch.bool or _holds(dtype, number)):
            return None
    return int(number)


def _holds(dtype: torch.dtype, number: float) -> bool:
    """Whether a dtype that torch.arange supports represents all integers up to this one exactly."""
    return abs(number) <= LARGEST.get(dtype, -1) and (number >= 0 or dtype is not torch.uint8)


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
