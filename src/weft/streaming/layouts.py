"""Layouts: which element of a base each element of a view is, in mixed-radix digits.

Contract: a layout is exact; a view that is not a layout raises `Unfollowed`. A dim of the view is a list of digits,
outermost first. A digit of size n and stride t counts from 0 to n - 1 in steps of t elements of the base, whose
elements are numbered in row-major order. Element (i, j, ...) of the view is the element of the base at the offset plus
the sum of the digits of i, j, ..., each times its stride. A gather along dim 1, however the graph spells it, is the
layout whose dim 1 begins with the digit of the ranks. Reordered or repeated shards give another layout, or none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from weft.graph.metadata import contiguous_strides


class Digit(NamedTuple):
    """A factor of a dim: its size, and the distance in elements of the base between two values."""

    size: int
    stride: int


Dim = tuple[Digit, ...]


class Unfollowed(Exception):  # noqa: N818  # a signal between our own functions, never shown to a caller
    """A view is not a layout: its elements are not evenly spaced. The text says what the view does instead."""


@dataclass(frozen=True)
class Layout:
    """A view of a base, dim by dim."""

    dims: tuple[Dim, ...]
    offset: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(digit.size for digit in dim) for dim in self.dims)

    @property
    def digits(self) -> list[Digit]:
        """The digits of all dims, outermost first."""
        return [digit for dim in self.dims for digit in dim]

    def covers(self, numel: int) -> bool:
        """Whether the view contains every element of a base of this size exactly once."""
        step = 1
        for digit in sorted(self.digits, key=lambda digit: digit.stride):
            if digit.stride != step:
                return False
            step *= digit.size
        return step == numel and self.offset == 0

    # Views of this view.

    def reshaped(self, shape: Sequence[int]) -> Layout:
        """The same elements in the same order, with another shape."""
        rest = list(_merged(self.digits))
        dims: list[Dim] = []
        for size in shape:
            dim: list[Digit] = []
            while size > 1:
                if not rest:
                    raise Unfollowed("it changes the number of elements")
                first = rest.pop(0)
                if size % first.size == 0:
                    size //= first.size
                elif first.size % size == 0:
                    inner = first.size // size
                    rest.insert(0, Digit(inner, first.stride))
                    first, size = Digit(size, first.stride * inner), 1
                else:
                    raise Unfollowed("its dims cut through the shards of ranks")
                dim.append(first)
            dims.append(tuple(dim))
        return Layout(_canonical(dims), self.offset)

    def permuted(self, order: Sequence[int]) -> Layout:
        """The dims in another order."""
        return Layout(tuple(self.dims[d] for d in order), self.offset)

    def sliced(self, dim: int, start: int, length: int) -> Layout:
        """A range of one dim."""
        kept, offset = _range(self.dims[dim], start, length)
        return Layout((*self.dims[:dim], kept, *self.dims[dim + 1 :]), self.offset + offset)

    def without(self, dim: int) -> Layout:
        """The layout without a dim of size one."""
        return Layout((*self.dims[:dim], *self.dims[dim + 1 :]), self.offset)

    # Digits and boundaries.

    def refined(self, boundaries: Iterable[int]) -> Layout:
        """The same layout with digits split, so that each lies wholly below or above every boundary (in elements)."""
        dims = [list(dim) for dim in self.dims]
        for boundary in sorted(set(boundaries), reverse=True):
            for dim in dims:
                dim[:] = [part for digit in dim for part in _cut(digit, boundary)]
        return Layout(tuple(map(tuple, dims)), self.offset)

    def inverse(self, shape: Sequence[int]) -> Layout:
        """The base, of this shape, as a view of the view's elements in row-major order. It must cover the base."""
        if not self.covers(prod(shape)):
            raise Unfollowed("it does not contain every element once")
        fine = self.refined(contiguous_strides(shape))
        steps = contiguous_strides([digit.size for digit in fine.digits])
        turned = sorted(zip(fine.digits, steps, strict=True), key=lambda pair: -pair[0].stride)
        rest = [Digit(digit.size, step) for digit, step in turned]
        dims: list[Dim] = []
        for size in shape:
            dim: list[Digit] = []
            while size > 1:
                first = rest.pop(0)
                dim.append(first)
                size //= first.size
            dims.append(tuple(dim))
        return Layout(_canonical(dims))

    def over(self, other: Layout) -> Layout:
        """This view of a base as a view of another view with the same elements."""
        boundaries = [digit.stride for layout in (self, other) for digit in layout.digits]
        mine, theirs = self.refined(boundaries), other.refined(boundaries)
        steps = contiguous_strides([digit.size for digit in theirs.digits])
        found = dict(zip(theirs.digits, steps, strict=True))
        if any(digit not in found for digit in mine.digits):
            raise Unfollowed("it contains other elements")
        return Layout(_canonical([[Digit(digit.size, found[digit]) for digit in dim] for dim in mine.dims]))


def identity(shape: Sequence[int]) -> Layout:
    """A base as a view of itself."""
    strides = contiguous_strides(shape)
    return Layout(tuple((Digit(size, step),) if size > 1 else () for size, step in zip(shape, strides, strict=True)))


def joined(layouts: Sequence[Layout], dim: int) -> Layout:
    """The concatenation along a dim of views of one base."""
    first = layouts[0]
    if len(layouts) == 1:
        return first
    others = [(*layout.dims[:dim], *layout.dims[dim + 1 :]) for layout in layouts]
    if any(other != others[0] for other in others):
        raise Unfollowed("it joins parts with different layouts")
    run = _run([(layout.dims[dim], layout.offset) for layout in layouts])
    if run is not None:
        return Layout((*first.dims[:dim], (run,), *first.dims[dim + 1 :]), first.offset)
    steps = {after.offset - before.offset for before, after in itertools.pairwise(layouts)}
    if any(layout.dims[dim] != first.dims[dim] for layout in layouts) or len(steps) > 1:
        raise Unfollowed("it joins parts that are not evenly spaced")
    longer = (Digit(len(layouts), steps.pop()), *first.dims[dim])
    return Layout(_canonical([*first.dims[:dim], longer, *first.dims[dim + 1 :]]), first.offset)


def _run(parts: Sequence[tuple[Dim, int]]) -> Digit | None:
    """The single digit that consecutive parts of a dim form, of any lengths; None if they are not consecutive."""
    strides = {dim[0].stride for dim, _ in parts if len(dim) == 1}
    if len(strides) != 1 or any(len(dim) > 1 for dim, _ in parts):
        return None
    stride, total = strides.pop(), 0
    for dim, offset in parts:
        if offset != parts[0][1] + total * stride:
            return None
        total += dim[0].size if dim else 1
    return Digit(total, stride)


def _range(dim: Dim, start: int, length: int) -> tuple[Dim, int]:
    """The digits of a range of a dim, and its offset in the base."""
    if length == prod(digit.size for digit in dim) and start == 0:
        return dim, 0
    if length < 1 or not dim:
        raise Unfollowed("it is empty")
    inner = prod(digit.size for digit in dim[1:])
    outer = dim[0]
    if start % inner == 0 and length % inner == 0:
        count = length // inner
        kept = (Digit(count, outer.stride),) if count > 1 else ()
        return (*kept, *dim[1:]), start // inner * outer.stride
    if start // inner == (start + length - 1) // inner:
        kept, offset = _range(dim[1:], start % inner, length)
        return kept, offset + start // inner * outer.stride
    raise Unfollowed("it cuts through the shards of ranks")


def _cut(digit: Digit, boundary: int) -> tuple[Digit, ...]:
    size, stride = digit
    if not 0 < stride < boundary < size * stride:
        return (digit,)
    if boundary % stride or size * stride % boundary:
        raise Unfollowed("its dims cut through the shards of ranks")
    return Digit(size * stride // boundary, boundary), Digit(boundary // stride, stride)


def _merged(digits: Iterable[Digit]) -> list[Digit]:
    """The digits, with neighbours that count on from each other merged."""
    found: list[Digit] = []
    for digit in digits:
        if found and found[-1].stride == digit.size * digit.stride:
            digit = Digit(found.pop().size * digit.size, digit.stride)
        found.append(digit)
    return found


def _canonical(dims: Iterable[Iterable[Digit]]) -> tuple[Dim, ...]:
    return tuple(tuple(_merged(dim)) for dim in dims)
