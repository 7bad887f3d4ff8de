"""Where each element comes from when dims are put in another order.

Contract: written from what the operator means. What stays together is followed as it is; matrices of a batch are
turned one by one; what would fall into too many pieces is a new atom, named by the order of its dims and by all that
is turned.
"""

from __future__ import annotations

from weft.verification.symbolic.tensors import Run, Size, Terms, Value, cut, join, product

MAX_BLOCKS = 1 << 11
"""Pieces that one operator may cut."""


def turned(terms: Terms, value: Value, order: tuple[int, ...]) -> tuple[Run, ...]:
    """The elements of a value whose dims, none of size one, are put in another order."""
    value, order = _unturned(terms, value, order)
    if order == tuple(range(len(order))):
        return value.runs
    blocks = _blocks(value.shape, order)
    if blocks is not None:
        inner, places = blocks
        strips = cut(value.runs, [inner] * len(places))
        return join(run for place in places for run in strips[place])
    fixed = next(k for k, d in enumerate(order) if d != k)
    count = product(value.shape[:fixed])
    if fixed and type(count) is int and count <= MAX_BLOCKS:
        shape, rest = tuple(value.shape[fixed:]), tuple(d - fixed for d in order[fixed:])
        parts = cut(value.runs, [product(shape)] * count)
        return join(run for part in parts for run in turned(terms, Value(shape, value.dtype, join(part)), rest))
    shape = tuple(value.shape[d] for d in order)
    return terms.whole(("permute", order), shape, value.dtype, (terms.number(value),)).runs


def _unturned(terms: Terms, value: Value, order: tuple[int, ...]) -> tuple[Value, tuple[int, ...]]:
    """Two orders of dims, one behind the other, as one of what was there before."""
    label = terms.labels[value.runs[0][0]] if len(value.runs) == 1 else None
    if not (isinstance(label, tuple) and label[0] == "permute" and value.runs[0][1:] == (0, product(value.shape))):
        return value, order
    before = terms.numbered[terms.values[value.runs[0][0]][0]]
    first: tuple[int, ...] = label[1]
    if tuple(before.shape[d] for d in first) != value.shape:
        return value, order
    return before, tuple(first[d] for d in order)


def _blocks(extents: tuple[Size, ...], order: tuple[int, ...]) -> tuple[Size, list[int]] | None:
    """The elements that stay together, and where each such block came from; None where there are too many blocks."""
    still = 0
    while order[-1 - still] == len(order) - 1 - still:
        still += 1
    moved = order[: len(order) - still]
    sizes = extents[: len(moved)]
    if any(type(n) is not int for n in sizes) or product(sizes) > MAX_BLOCKS:
        return None
    steps = [product(sizes[d + 1 :]) for d in range(len(sizes))]
    places = [0]
    for d in moved:
        places = [place + k * steps[d] for place in places for k in range(sizes[d])]
    return product(extents[len(moved) :]), places
