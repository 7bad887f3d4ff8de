"""Remove casts through an intermediate dtype that loses nothing.

Why: mixed precision casts up and back down; where another rewrite removes the operators in between, both casts are
wasted copies.

Before::

    wide: f32[4, 4] = _to_copy(x, dtype=f32)
    back: bf16[4, 4] = _to_copy(wide, dtype=bf16)

After::

    (x itself)

Two casts become one if the intermediate dtype holds every value of the first: bf16 to f32 to f16 is bf16 to f16. Both
are removed if the last dtype is the first. NaN stays NaN; its payload is ignored. A float outside the range of an
integer dtype converts to a number that depends on the float's dtype and the device, so such casts stay.

Declines: an intermediate dtype that loses information (f32 to bf16 to f32, i64 to i32 to i64); casts to an integer
dtype, through a float dtype, that may not hold every value.
Numerics: exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from weft.graph import ops
from weft.graph.listings.types import DTYPE_NAMES
from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.pattern import Match, Var, op
from weft.rewriting.rules import Replacement, Rule

WIDER = {
    "b8": "u8 i8 i16 i32 i64 f16 bf16 f32 f64",
    "u8": "i16 i32 i64 f16 bf16 f32 f64",
    "i8": "i16 i32 i64 f16 bf16 f32 f64",
    "i16": "i32 i64 f32 f64",
    "i32": "i64 f64",
    "f16": "f32 f64",
    "bf16": "f32 f64",
    "f32": "f64",
    "f8e4m3fn": "f16 bf16 f32 f64",
    "f8e5m2": "f16 bf16 f32 f64",
}
"""For each dtype, the dtypes that hold all of its values."""

CASTS = (
    lambda inner: op("_to_copy", inner, dtype=Var("dtype")),
    lambda inner: op("prims.convert_element_type.default", inner, Var("dtype")),
)
INNER = (
    op("_to_copy", Var("x"), dtype=Var("between")),
    op("prims.convert_element_type.default", Var("x"), Var("between")),
)


@dataclass(frozen=True)
class RemoveRedundantCasts(RewritePass):
    """Remove casts through an intermediate dtype that loses nothing."""

    numerics = Numerics.EXACT

    def rules(self, context: Context) -> Iterable[Rule]:
        return [Rule(outer(inner), _direct) for outer in CASTS for inner in INNER]


def _direct(draft: Draft, match: Match) -> Replacement:
    source, between = match["x"], match["between"]
    value = draft.value(source) if isinstance(source, AnyNode) else None
    if not isinstance(value, Tensor) or between is None or match["dtype"] is None:
        return None
    first, middle = DTYPE_NAMES.get(value.dtype, ""), DTYPE_NAMES.get(between, "")
    if first == middle:
        return None  # the inner cast does nothing; remove-noops removes it
    if middle not in WIDER.get(first, "").split():
        return Refusal(
            Reason.UNSUPPORTED_FORM, f"{match.root.name} stays: {middle} does not hold every value of {first}"
        )
    if match["dtype"] == value.dtype:
        return source
    last = DTYPE_NAMES.get(match["dtype"], "")
    is_whole = not (match["dtype"].is_floating_point or match["dtype"].is_complex or last == "b8")
    if is_whole and between.is_floating_point and last not in WIDER[first].split():
        return Refusal(Reason.UNSUPPORTED_FORM, f"{match.root.name} stays: {last} does not hold every value of {first}")
    if match.root.target is ops.op_of("_to_copy"):
        return draft.call("_to_copy", source, dtype=match["dtype"], before=match.root)
    return draft.call(match.root.target, source, match["dtype"], before=match.root)
