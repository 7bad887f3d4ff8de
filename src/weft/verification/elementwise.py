"""Operators that make each element of their result from the elements at the same place of their inputs.

Contract: an operator is taken apart element by element only if its result is correctly rounded, and so does not depend
on where in a vector register the element stands: `exp` of a concatenation may differ in its last bit from the
concatenation of `exp`s. With `reassociates`, where rounding may differ anyway, all elementwise operators are, sums are
taken as sets of terms, and a sum of reductions as the reduction of the sum.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from weft.verification.terms import (
    Run,
    Segment,
    Size,
    Terms,
    Undecided,
    Value,
    align,
    is_single,
    join,
    same_elements,
    settle,
)

CORRECTLY_ROUNDED = frozenset(
    (
        *("neg", "abs", "relu", "sign", "floor", "ceil", "trunc", "round", "sqrt", "isnan", "isinf"),
        *("add", "sub", "rsub", "mul", "div", "maximum", "minimum", "clamp", "clamp_min", "clamp_max"),
        *("eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill", "threshold_backward"),
        *("logical_and", "logical_or", "logical_not", "logical_xor"),
        *("bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor"),
    )
)
# Torch computes these with one rounding or with two, as the vector unit has it, unless the argument is left alone.
PLAIN_ONLY: Mapping[str, tuple[str, Any]] = {
    **dict.fromkeys(("add", "sub", "rsub"), ("alpha", 1)),
    "div": ("rounding_mode", None),
    "round": ("decimals", 0),
}
ADDITIVE = ("sum", "avg")


def is_taken_apart(name: str, arguments: Mapping[str, Any], *, all_of_them: bool) -> bool:
    """Whether an elementwise operator of this name (without overload or trailing underscore) is followed."""
    argument, plain = PLAIN_ONLY.get(name, ("", None))
    if argument in arguments and arguments[argument] != plain:
        return False
    return all_of_them or name in CORRECTLY_ROUNDED


def apply(
    terms: Terms,
    name: str,
    arguments: Mapping[str, Any],
    shape: tuple[Size, ...],
    dtype: torch.dtype,
    *,
    reassociates: bool = False,
) -> Value:
    """The result of an elementwise operator. Inputs have the shape of the result, or one element."""
    full: list[Value] = []
    slots: list[Hashable] = []
    ignored = PLAIN_ONLY.get(name, ("", None))[0]
    for argument, value in arguments.items():
        if argument == ignored:
            continue
        if not isinstance(value, Value):
            slots.append((argument if value is None else "", constant(value, dtype)))
        elif same_elements(value.shape, shape):
            slots.append((len(full), value.dtype))
            full.append(value)
        elif is_single(value):
            slots.append((terms.number(value), "for all"))
        else:
            raise Undecided
    if not full:
        raise Undecided
    label = ("elementwise", name, dtype, tuple(slots))
    is_sum = reassociates and name == "add" and len(full) == len(slots) == 2 and full[0].dtype == full[1].dtype == dtype
    segments = align([value.runs for value in full])
    if is_sum:
        return Value(shape, dtype, join(_added(terms, segment, dtype) for segment in segments))
    return Value(shape, dtype, join(terms.combined(label, segment, dtype) for segment in segments))


def constant(value: Any, dtype: torch.dtype | None = None) -> Hashable:
    """A scalar as part of a label: 0.0 is not -0.0 and True is not 1, but 2 is 2.0 where floats are computed."""
    if isinstance(value, Value):
        raise Undecided
    if type(value) is int and dtype is not None and dtype.is_floating_point and abs(value) <= 1 << 53:
        value = float(value)
    return type(value).__name__, repr(value)


# Sums as sets of terms.


def _added(terms: Terms, segment: Segment, dtype: torch.dtype) -> Run:
    """The sum of two runs, with the terms of inner sums, in an order that depends on the terms alone."""
    atoms, starts, length = segment
    found: list[tuple[int, Size]] = []
    for atom, start in zip(atoms, starts, strict=True):
        inner = terms.operands[atom] if terms.labels[atom] == ("sum", dtype) else ((atom, 0),)
        found += [(term, settle(start + shift)) for term, shift in inner]
    reduction = _common_reduction(terms, found, dtype)
    if reduction is not None:
        return (*reduction, length)
    found.sort(key=lambda term: (term[0], term[1] if type(term[1]) is int else str(term[1])))
    ordered = (tuple(a for a, _ in found), tuple(s for _, s in found), length)
    return terms.combined(("sum", dtype), ordered, dtype)


def _common_reduction(terms: Terms, found: list[tuple[int, Size]], dtype: torch.dtype) -> tuple[int, Size] | None:
    """The sum of reductions of one kind, op and group, as the reduction of the sums; None where they are not that."""
    label = terms.labels[found[0][0]]
    if not (isinstance(label, tuple) and label[0] in ("all_reduce", "reduce_scatter") and label[1] in ADDITIVE):
        return None
    if label[1] == "avg" and not (dtype.is_floating_point or dtype.is_complex):  # it rounds
        return None
    if any(terms.labels[atom] != label for atom, _ in found):
        return None
    columns = [[(a, settle(start + shift)) for a, shift in terms.operands[atom]] for atom, start in found]
    sums = [
        _added(terms, (tuple(a for a, _ in column), tuple(s for _, s in column), 1), dtype)
        for column in zip(*columns, strict=True)
    ]
    if label[0] == "all_reduce" or len(label) == 5:  # one operand, at an even step or not
        atom, start, _ = sums[0]
        return terms.atom(label, terms.sizes[atom], dtype, ((atom, 0),)), start
    run = terms.combined(label, (tuple(a for a, _, _ in sums), tuple(s for _, s, _ in sums), 1), dtype)
    return run[0], run[1]
