"""Simplify arithmetic that returns its input.

Why: disabled options and gradients leave scales of one, offsets of zero and double negations. Each is a kernel, or part
of one.

Before::

    a: f32[4] = mul(x, 1.0)
    b: f32[4] = neg(a)
    c: f32[4] = neg(b)
    d: f32[4] = sub(c, 0.0)
    r: f32[4] = relu(d)

After::

    r: f32[4] = relu(x)

Only identities that hold for every value are used. For floats, x + 0.0 differs from x if x is -0.0 (x - 0.0 and
x + -0.0 do not), and x * 0.0 is not 0.0 if x is infinite or NaN; integers have neither problem. A complex product sums
products of the parts, so inf+0j times 1 has a NaN part. The dtype must not change: i64 * 1.0 is a float.

Declines: floats plus zero or times zero; complex numbers multiplied or divided by one.
Numerics: exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.passes.base import Numerics
from weft.passes.rewrite.remove_noops import is_same
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.pattern import Match, Var, op
from weft.rewriting.rules import Replacement, Rule

X = Var("x")
N = Var("n").where(lambda _, value: not isinstance(value, AnyNode), "a number")
ONES = op(("full", "full_like", "new_full", "ones", "ones_like", "zeros", "zeros_like", "new_zeros", "new_ones"))
FILL = ONES.ignoring().named("n")
MUL, ADD, SUB = ("mul", "mul.Scalar"), ("add", "add.Scalar"), ("sub", "sub.Scalar")
WHOLE = ("bitwise_or.Scalar", "bitwise_xor.Scalar", "__lshift__.Scalar", "__rshift__.Scalar")


@dataclass(frozen=True)
class SimplifyArithmetic(RewritePass):
    """Simplify arithmetic that returns its input."""

    numerics = Numerics.EXACT

    def rules(self, context: Context) -> Iterable[Rule]:
        both = (N, FILL)
        return [
            *(Rule(op(MUL, X, n).either_way(), _neutral(1)) for n in both),
            *(Rule(op(("div", "div.Scalar"), X, n), _neutral(1)) for n in both),
            *(Rule(op(ADD, X, n).either_way(), _neutral(0)) for n in both),
            *(Rule(op(SUB, X, n), _neutral(0)) for n in both),
            Rule(op(WHOLE, X, N), _neutral(0)),
            Rule(op(MUL, X, N).either_way(), _zero),
            Rule(op("neg", op("neg", X)), _negated),
            *(Rule(op(name, op(name, X)), _source) for name in ("bitwise_not", "logical_not")),
            *(Rule(op(name, op(name, X).named("inner")), _inner) for name in ("abs", "relu", "floor", "ceil", "trunc")),
            Rule(op(("maximum", "minimum", "bitwise_and", "bitwise_or"), X, X), _source),
            Rule(op("where.self", Var("condition"), X, X), _source),
        ]


def _kept(draft: Draft, match: Match, node: Any) -> Replacement:
    """The node if it has the type and strides of the root; None, no match, otherwise."""
    is_node = isinstance(node, AnyNode)
    return node if is_node and is_same(draft.value(match.root), draft.value(node)) else None


def _source(draft: Draft, match: Match) -> Replacement:
    return _kept(draft, match, match["x"])


def _negated(draft: Draft, match: Match) -> Replacement:
    """A doubly negated value. torch 2.13 on a CPU negates complex vectors by 0 - x, so -0.0 negated twice is 0.0."""
    found = _source(draft, match)
    if found is not None and draft.value(match.root).dtype.is_complex:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{match.root.name} stays: it turns -0.0 into 0.0")
    return found


def _inner(draft: Draft, match: Match) -> Replacement:
    return _kept(draft, match, match["inner"])


def _number(draft: Draft, value: Any) -> int | float | None:
    """The number that an argument is, or that a constant tensor is filled with; None if unknown."""
    if isinstance(value, AnyNode):
        held = draft.value(value)
        name = str(value.target).partition(".")[2].partition(".")[0]
        if not isinstance(held, Tensor) or not name.removeprefix("new_").startswith(("full", "ones", "zeros")):
            return None
        default = int("ones" in name)
        value = draft.bind(value).get("fill_value", default)
        if isinstance(value, int | float):  # as stored: integers have no negative zero
            is_float = held.dtype.is_floating_point or held.dtype.is_complex
            value = float(value) if is_float else int(value) if math.isfinite(value) else None
    return value if isinstance(value, int | float) else None


def _neutral(wanted: int) -> Callable[[Draft, Match], Replacement]:
    def source(draft: Draft, match: Match) -> Replacement:
        number, node = _number(draft, match["n"]), match["x"]
        if number is None or number != wanted:
            return None
        found = _kept(draft, match, node)
        if found is None:
            return None
        dtype = draft.value(node).dtype
        if wanted and dtype.is_complex:
            sentence = f"{match.root.name} stays: it changes complex numbers with infinite parts"
            return Refusal(Reason.UNSUPPORTED_FORM, sentence)
        is_added = str(match.root.target).startswith("aten.add")
        is_negative = math.copysign(1, number) < 0
        if not wanted and (dtype.is_complex or (dtype.is_floating_point and is_negative != is_added)):
            sentence = f"{match.root.name} stays: it turns -0.0 into 0.0"
            return Refusal(Reason.UNSUPPORTED_FORM, sentence)
        return found

    return source


def _zero(draft: Draft, match: Match) -> Replacement:
    """Integers times zero are zeros."""
    value = draft.value(match.root)
    if _number(draft, match["n"]) != 0 or not isinstance(value, Tensor):
        return None
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{match.root.name} stays: infinity times zero is NaN")
    return draft.call("zeros_like", match["x"], before=match.root)
