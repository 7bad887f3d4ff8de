"""Calls that give back what they are given, and tensors that are filled with one number.

Contract: written from what the operators mean, and from nothing else in Weft; the passes that take such calls away are
not looked at. Each law holds for every value and every bit, but for the payload of what is no number: x + 0.0 is no x,
since it makes 0.0 of -0.0. A law gives what the result is; where its type is not that of the call, there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from weft.compat import OpOverload
from weft.verification.index_maps import FILL, Call, filled
from weft.verification.terms import Run, Terms, Value, join

Arguments = Mapping[str, Any]
Law = Callable[[Terms, str, Arguments], Value | None]


def known(call: Call, target: OpOverload) -> Value | None:
    """What a call gives, where a law says it; None for others."""
    namespace, _, full = target.name().partition("::")
    name = full.partition(".")[0].removesuffix("_")
    if namespace != "aten" or len(call.results) != 1:
        return None
    terms, arguments = call.terms, call.arguments
    shape, dtype = call.results[0]
    if name in FILLED:
        return filled(call, arguments.get("fill_value", FILLED[name]), *call.results[0])
    found = LAWS[name](terms, name, arguments)
    if found is None and name == "mul" and not _is_float(dtype) and 0 in _numbers(terms, arguments):
        return filled(call, 0, *call.results[0])
    if found is None or found.shape != shape or found.dtype != dtype or not call.same_device:
        return None
    return Value(shape, dtype, found.runs)


# Tensors of one number.

FILLED: Mapping[str, int | None] = {
    **dict.fromkeys(("full", "full_like", "new_full"), None),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0),
}


def _number(terms: Terms, value: Any) -> int | float | None:
    """The number that an argument is or is filled with; None where there is none."""
    if isinstance(value, int | float):
        return value
    if not isinstance(value, Value) or not value.runs:
        return None
    labels = {terms.labels[atom] for atom, _, _ in value.runs}
    label = labels.pop()
    if labels or not (isinstance(label, tuple) and label[0] == FILL):
        return None
    text = str(label[1])
    return {"True": 1, "False": 0}[text] if text in ("True", "False") else float(text) if "." in text else _whole(text)


def _whole(text: str) -> int | float:
    return int(text) if text.removeprefix("-").isdigit() else float(text)


def _numbers(terms: Terms, arguments: Arguments) -> list[int | float | None]:
    return [_number(terms, arguments.get(key)) for key in ("self", "other")]


def _is_float(dtype: torch.dtype | None) -> bool:
    return dtype is None or dtype.is_floating_point or dtype.is_complex


# Laws.


def _neutral(number: int, *, either_way: bool) -> Law:
    """An operator that leaves alone what it takes with this number; of zeros only the one that keeps the sign."""

    def law(terms: Terms, name: str, arguments: Arguments) -> Value | None:
        if arguments.get("alpha", 1) != 1 or arguments.get("rounding_mode") is not None:
            return None
        pairs = [("self", "other"), ("other", "self")] if either_way else [("self", "other")]
        for mine, theirs in pairs:
            value, found = arguments.get(mine), _number(terms, arguments.get(theirs))
            if not isinstance(value, Value) or found is None or found != number:
                continue
            wants_negative = name == "add"
            if number == 0 and _is_float(value.dtype) and (math.copysign(1, found) < 0) != wants_negative:
                continue
            if number == 0 and value.dtype is not None and value.dtype.is_complex:
                continue
            return value
        return None

    return law


def _first_if(holds: Callable[[Arguments, Value], bool], argument: str = "self") -> Law:
    """An argument of the call, where that holds of the call."""

    def law(terms: Terms, name: str, arguments: Arguments) -> Value | None:
        value = arguments.get(argument)
        return value if isinstance(value, Value) and holds(arguments, value) else None

    return law


def _twice_is_none(terms: Terms, name: str, arguments: Arguments) -> Value | None:
    """An operator that undoes itself."""
    return _inside(terms, name, arguments.get("self"))


def _twice_is_once(terms: Terms, name: str, arguments: Arguments) -> Value | None:
    """An operator that does nothing to its own results, nor, if it rounds, to whole numbers."""
    value = arguments.get("self")
    if not isinstance(value, Value):
        return None
    if name in ROUNDING and not _is_float(value.dtype):
        return value
    return value if _inside(terms, name, value) is not None else None


def _inside(terms: Terms, name: str, value: Any) -> Value | None:
    """What an operator of one argument was applied to, where a value is its result."""
    if not isinstance(value, Value) or not value.runs:
        return None
    runs: list[Run] = []
    for atom, start, length in value.runs:
        label = terms.labels[atom]
        if not (isinstance(label, tuple) and label[:2] == ("elementwise", name) and len(terms.operands[atom]) == 1):
            return None
        ((inner, shift),) = terms.operands[atom]
        if shift != 0 or terms.dtypes[inner] != value.dtype:
            return None
        runs.append((inner, start, length))
    return Value(value.shape, value.dtype, join(runs))


def _both_alike(terms: Terms, name: str, arguments: Arguments) -> Value | None:
    """An operator that chooses between two values that are one."""
    value, other = arguments.get("self"), arguments.get("other")
    if isinstance(value, Value) and isinstance(other, Value) and terms.number(value) == terms.number(other):
        return value
    return None


def _either(*laws: Law) -> Law:
    def law(terms: Terms, name: str, arguments: Arguments) -> Value | None:
        return next(filter(None, (each(terms, name, arguments) for each in laws)), None)

    return law


def _is_one(number: Any) -> bool:
    return type(number) in (int, float) and number == 1


def _covers_all(arguments: Arguments, source: Value) -> bool:
    """Whether what is scattered is as large as what it is scattered to."""
    target = arguments.get("self")
    return isinstance(target, Value) and target.shape == source.shape


ROUNDING = ("ceil", "floor", "round", "trunc")
LAWS: Mapping[str, Law] = {
    "mul": _neutral(1, either_way=True),
    "div": _neutral(1, either_way=False),
    "add": _neutral(0, either_way=True),
    "sub": _neutral(0, either_way=False),
    **dict.fromkeys(("bitwise_xor", "__lshift__", "__rshift__"), _neutral(0, either_way=False)),
    "bitwise_or": _either(_neutral(0, either_way=False), _both_alike),
    **dict.fromkeys(("maximum", "minimum", "bitwise_and", "where"), _both_alike),
    **dict.fromkeys(("neg", "bitwise_not", "logical_not"), _twice_is_none),
    **dict.fromkeys((*ROUNDING, "abs", "relu"), _twice_is_once),
    "pow": _first_if(lambda given, _: _is_one(given.get("exponent"))),
    "repeat": _first_if(lambda given, _: all(n == 1 for n in given["repeats"])),
    "constant_pad_nd": _first_if(lambda given, _: all(n == 0 for n in given["pad"])),
    "slice_scatter": _first_if(_covers_all, "src"),
    "copy": _first_if(_covers_all, "src"),
}
NAMES = frozenset((*FILLED, *LAWS))
"""The operators that there are laws of, without overload and trailing underscore."""
