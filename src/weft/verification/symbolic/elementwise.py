"""Operators that compute each element of their result from the elements at the same index of their inputs.

Contract: an operator is followed element by element only if its result does not depend on the position of the element
in a vector register. For example, `exp` of a concatenation may differ in its last bit from the concatenation of `exp`s,
and `maximum` of 0.0 and -0.0 is the first or the second depending on the memory layout. `laws` names the operators and
dtypes for which this holds. With `reassociates`, where rounding may differ anyway, all elementwise operators are
followed, sums are sets of terms, and a sum of reductions is the reduction of the sum.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch

from weft.verification.symbolic.index_maps import Call
from weft.verification.symbolic.tensors import (
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

FOREACH = "_foreach_"
OF_EACH: Mapping[str, str] = {"scalar": "other", "scalars": "other"}
"""Arguments of a `_foreach` operator, and their names in the operator on single tensors."""
MASKS = ("condition", "mask")
ADDITIVE = ("sum", "avg")


def applied(call: Call) -> list[Value]:
    """The result of an elementwise operator, exact in every bit.

    Its tensors have one dtype, except for a mask: a kernel may convert a scalar tensor next to a vector with or without
    rounding.
    """
    shape, dtype = call.results[0]
    if len({v.dtype for key, v in call.arguments.items() if isinstance(v, Value) and key not in MASKS}) > 1:
        raise Undecided
    return [apply(call.terms, call.operator, call.arguments, shape, dtype)]


def applied_to_each(call: Call) -> list[Value]:
    """A `_foreach` operator: the operator applied to each item of its lists."""
    return [item for one in each(call) for item in applied(one)]


def each(call: Call) -> list[Call]:
    """The single calls that a `_foreach` operator makes."""
    lists = {key: value for key, value in call.arguments.items() if isinstance(value, list)}
    if any(len(value) != len(call.results) for value in lists.values()):
        raise Undecided
    name = call.operator.removeprefix(FOREACH)
    return [
        replace(
            call,
            arguments={
                OF_EACH.get(key, key): lists[key][k] if key in lists else value for key, value in call.arguments.items()
            },
            results=[kind],
            operator=name,
        )
        for k, kind in enumerate(call.results)
    ]


def apply(
    terms: Terms,
    name: str,
    arguments: Mapping[str, Any],
    shape: tuple[Size, ...],
    dtype: torch.dtype,
    *,
    reassociates: bool = False,
) -> Value:
    """The result of an elementwise operator. Each input has the shape of the result, or one element."""
    full: list[Value] = []
    slots: list[Hashable] = []
    mixes_dtypes = len({value.dtype for value in arguments.values() if isinstance(value, Value)}) > 1
    for argument, value in arguments.items():
        if not isinstance(value, Value):
            slots.append((argument, constant(value, dtype)))
        elif same_elements(value.shape, shape):
            # Next to another dtype, a tensor without dims is converted like a number.
            slots.append((argument, value.dtype, mixes_dtypes and not value.shape))
            full.append(value)
        elif is_single(value):
            slots.append((argument, terms.number(value), "for all"))
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
    """A scalar as part of a label: 0.0 is not -0.0 and True is not 1, but 2 is 2.0 in floating-point arithmetic."""
    if value is not None and not isinstance(value, bool | int | float | str | complex | sympy.Basic | torch.dtype):
        raise Undecided
    if type(value) is int and dtype is not None and dtype.is_floating_point and abs(value) <= 1 << 53:
        value = float(value)
    return type(value).__name__, repr(value)


# Sums as sets of terms.


def _added(terms: Terms, segment: Segment, dtype: torch.dtype) -> Run:
    """The sum of two runs, flattened to its terms, in an order that depends only on the terms."""
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
    """A sum of reductions with one kind, op and group as the reduction of the sums; None for other sums."""
    label = terms.labels[found[0][0]]
    if not (isinstance(label, tuple) and label[0] in ("all_reduce", "reduce_scatter") and label[1] in ADDITIVE):
        return None
    if label[1] == "avg" and not (dtype.is_floating_point or dtype.is_complex):  # an integer average rounds
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
