"""Rules for calls that return one of their arguments, and for tensors filled with one number.

Contract: derived from the meaning of the operators and from nothing else in Weft; in particular not from the passes
that remove such calls. Each rule holds in every bit, except for the payload of a NaN: x + 0.0 is not x, since it turns
-0.0 into 0.0. A rule sees only the arguments that its law names in `laws`. It returns None where it does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from weft.verification.symbolic.index_maps import Call, LawRule, number_of, of_one_number
from weft.verification.symbolic.tensors import Run, Terms, Value, join


def given_back(call: Call, value: Any) -> list[Value] | None:
    """An argument as the result of a call, if it has the type of the result."""
    shape, dtype = call.results[0]
    if not isinstance(value, Value) or not call.same_device or len(call.results) != 1:
        return None
    return [Value(shape, dtype, value.runs)] if (value.shape, value.dtype) == (shape, dtype) else None


# Tensors filled with one number.

FILLED: Mapping[str, int | None] = {
    **dict.fromkeys(("full", "full_like", "new_full"), None),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0),
}
"""Operators that fill a tensor with one number, and the number if it is not an argument."""


def filled(call: Call) -> list[Value] | None:
    """A tensor filled with one number, known by the number and the device."""
    return _of_one(call, call.arguments.get("fill_value", FILLED[call.operator]))


def times_zero(call: Call) -> list[Value] | None:
    """A product of integers with zero."""
    return (
        _of_one(call, 0) if 0 in (_number(call.terms, call.arguments.get(key)) for key in ("self", "other")) else None
    )


def _of_one(call: Call, number: Any) -> list[Value]:
    return [of_one_number(call, number, *call.results[0])]


def _number(terms: Terms, value: Any) -> int | float | None:
    """The number that an argument is or is filled with, or None."""
    if isinstance(value, int | float):
        return value
    if not isinstance(value, Value) or not value.runs:
        return None
    labels = {terms.labels[atom] for atom, _, _ in value.runs}
    return number_of(labels.pop()) if len(labels) == 1 else None


# Rules.


def neutral(number: int, *, either_way: bool, negative_zero: bool = False) -> LawRule:
    """A rule: this number is neutral for the operator. Of the two zeros of floats, only one preserves signs."""

    def rule(call: Call) -> list[Value] | None:
        pairs = [("self", "other"), ("other", "self")] if either_way else [("self", "other")]
        for mine, theirs in pairs:
            value, found = call.arguments.get(mine), _number(call.terms, call.arguments.get(theirs))
            if not isinstance(value, Value) or found is None or found != number:
                continue
            is_float = value.dtype is None or value.dtype.is_floating_point
            if number == 0 and is_float and (math.copysign(1, found) < 0) != negative_zero:
                continue
            return given_back(call, value)
        return None

    return rule


def first_if(holds: Callable[[Mapping[str, Any]], bool], argument: str = "self") -> LawRule:
    """A rule: a call returns one of its arguments if `holds` is true of them."""

    def rule(call: Call) -> list[Value] | None:
        return given_back(call, call.arguments.get(argument)) if holds(call.arguments) else None

    return rule


def twice_is_none(call: Call) -> list[Value] | None:
    """An operator that is its own inverse."""
    return given_back(call, _inside(call))


def twice_is_once(call: Call) -> list[Value] | None:
    """An idempotent operator."""
    return given_back(call, call.arguments.get("self")) if _inside(call) is not None else None


def _inside(call: Call) -> Value | None:
    """The inner argument, if a unary operator is applied to its own result."""
    value, terms = call.arguments.get("self"), call.terms
    if not isinstance(value, Value) or not value.runs:
        return None
    runs: list[Run] = []
    for atom, start, length in value.runs:
        if terms.labels[atom] != ("elementwise", call.operator, value.dtype, (("self", value.dtype, False),)):
            return None
        ((inner, shift),) = terms.operands[atom]
        if shift != 0:
            return None
        runs.append((inner, start, length))
    return Value(value.shape, value.dtype, join(runs))


def both_alike(call: Call) -> list[Value] | None:
    """An operator that chooses between two equal values."""
    value, other = call.arguments.get("self"), call.arguments.get("other")
    if isinstance(value, Value) and isinstance(other, Value) and call.terms.number(value) == call.terms.number(other):
        return given_back(call, value)
    return None


def is_one(number: Any) -> bool:
    """Whether an argument is the number one."""
    return type(number) in (int, float) and number == 1


def covers_all(arguments: Mapping[str, Any]) -> bool:
    """Whether the scattered source covers the whole target."""
    target, source = arguments.get("self"), arguments.get("src")
    return isinstance(target, Value) and isinstance(source, Value) and target.shape == source.shape
