"""Symbolic tensors: each is a list of runs over its elements in row-major order.

Contract: equal numbers mean equal values on every rank, whatever the data. A run (atom, start, length) names `length`
consecutive elements of an atom. An atom is a tensor of unknown data, known by the call that made it. Adjacent runs are
joined, so two values whose elements have the same names have the same runs. Runs follow the order of elements, not of
memory: a view, a copy and a reshape have the runs of their source.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

Size = Any
"""An int, or a sympy expression that has been expanded."""
Run = tuple[int, Size, Size]
Segment = tuple[tuple[int, ...], tuple[Size, ...], Size]

MAX_RUNS = 1 << 16
"""Maximum number of runs of a value, and of pieces that one operator cuts; beyond it an operator counts as unknown."""


class Undecided(Exception):  # noqa: N818  # a signal between our own functions, never shown to a caller
    """An index map cannot be followed, because sizes cannot be compared or there are too many runs.

    The operator is then treated as opaque.
    """


@dataclass(slots=True, eq=False)
class Value:
    """A tensor: its shape, its dtype and the names of its elements."""

    shape: tuple[Size, ...]
    dtype: torch.dtype | None
    runs: tuple[Run, ...]
    number: int = -1
    """Assigned by `Terms.number` on first use; equal numbers mean equal values."""


class Terms:
    """The table of atoms that both graphs share: how each atom was made, and its size."""

    def __init__(self) -> None:
        self.labels: list[Hashable] = []
        self.operands: list[tuple[tuple[int, Size], ...]] = []
        """For each atom, the atoms that it is computed from elementwise, each with its shift relative to the first."""
        self.values: list[tuple[int, ...]] = []
        """For each atom, the numbers of the whole values that it is computed from."""
        self.sizes: list[Size] = []
        self.dtypes: list[torch.dtype | None] = []
        self.numbered: list[Value] = []
        self.origins: list[dict[int, str]] = [{}, {}]
        """For each side, the first node that made each atom."""
        self.side = 0
        self.node = ""
        self._atoms: dict[Hashable, int] = {}
        self._numbers: dict[Hashable, int] = {}

    def atom(
        self,
        label: Hashable,
        size: Size,
        dtype: torch.dtype | None,
        operands: tuple[tuple[int, Size], ...] = (),
        values: tuple[int, ...] = (),
    ) -> int:
        """The number of an atom; equal arguments give the same atom."""
        key = (label, operands, values, size, dtype)
        atom = self._atoms.get(key)
        if atom is None:
            atom = self._atoms[key] = len(self.labels)
            self.labels.append(label)
            self.operands.append(operands)
            self.values.append(values)
            self.sizes.append(size)
            self.dtypes.append(dtype)
        self.origins[self.side].setdefault(atom, self.node)
        return atom

    def number(self, value: Value) -> int:
        """The number of a value."""
        if value.number < 0:
            key = (value.shape, value.dtype, value.runs)
            found = self._numbers.get(key)
            if found is None:
                found = self._numbers[key] = len(self.numbered)
                self.numbered.append(value)
            value.number = found
        return value.number

    def whole(
        self,
        label: Hashable,
        shape: tuple[Size, ...],
        dtype: torch.dtype | None,
        values: tuple[int, ...] = (),
    ) -> Value:
        """A value that is one new atom."""
        size = product(shape)
        return Value(shape, dtype, join([(self.atom(label, size, dtype, values=values), 0, size)]))

    def combined(self, label: Hashable, segment: Segment, dtype: torch.dtype | None) -> Run:
        """A run in which each element is computed from one element of each atom of a segment.

        The atom records only shifts, so it does not depend on where the segment begins. The start of the run is the
        index into the first atom.
        """
        atoms, starts, length = segment
        first = starts[0]
        operands = tuple((atom, settle(start - first)) for atom, start in zip(atoms, starts, strict=True))
        return self.atom(label, self.sizes[atoms[0]], dtype, operands), first, length


# Sizes.


def settle(size: Size) -> Size:
    """A size in canonical form: an int if it is constant."""
    if type(size) is int:
        return size
    expanded: Any = sympy.expand(size)
    return int(expanded) if expanded.is_Integer else expanded


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return settle(result)


def divide(size: Size, by: int) -> Size:
    """An exact quotient."""
    if type(size) is int:
        if size % by:
            raise Undecided
        return size // by
    quotient = settle(size / sympy.Integer(by))
    if type(quotient) is not int and not quotient.is_integer:
        raise Undecided
    return quotient


def order(first: Size, second: Size) -> int:
    """-1, 0 or 1 if `first` is less than, equal to or greater than `second`."""
    if type(first) is int and type(second) is int:
        return (first > second) - (first < second)
    gap: Any = settle(first - second)
    if type(gap) is int:
        return (gap > 0) - (gap < 0)
    if gap.is_positive:
        return 1
    if gap.is_negative:
        return -1
    raise Undecided


# Runs.


def join(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join adjacent runs, and drop empty ones."""
    joined: list[Run] = []
    last, end = -1, None
    for run in runs:
        atom, start, length = run
        if type(length) is int and length == 0:
            continue
        if atom == last and start == end:
            _, first, before = joined[-1]
            joined[-1] = (atom, first, settle(before + length))
        else:
            joined.append(run)
        last, end = atom, settle(start + length)
    if len(joined) > MAX_RUNS:
        raise Undecided
    return tuple(joined)


def cut(runs: Sequence[Run], lengths: Iterable[Size]) -> list[list[Run]]:
    """Cut runs into consecutive pieces of these lengths, which must add up to the whole."""
    pieces: list[list[Run]] = []
    rest = iter(runs)
    atom, start, have = 0, 0, 0
    for need in lengths:
        piece: list[Run] = []
        while not (type(need) is int and need == 0):
            if type(have) is int and have == 0:
                found = next(rest, None)
                if found is None:
                    raise Undecided
                atom, start, have = found
            if order(need, have) >= 0:
                piece.append((atom, start, have))
                need, have = settle(need - have), 0
            else:
                piece.append((atom, start, need))
                start, have, need = settle(start + need), settle(have - need), 0
        pieces.append(piece)
    if not (type(have) is int and have == 0) or next(rest, None) is not None:
        raise Undecided
    return pieces


def align(lists: Sequence[Sequence[Run]]) -> Iterable[Segment]:
    """Cut lists of equal total length into segments in which each list has a single run."""
    if len(lists) == 1:
        for atom, start, length in lists[0]:
            yield (atom,), (start,), length
        return
    if not any(lists):
        return
    if not all(lists):
        raise Undecided
    places = [0] * len(lists)
    heads = [runs[0] for runs in lists]
    while True:
        length = heads[0][2]
        for head in heads:
            if head[2] is not length and order(head[2], length) < 0:
                length = head[2]
        yield tuple(h[0] for h in heads), tuple(h[1] for h in heads), length
        ended = 0
        for k, (atom, start, have) in enumerate(heads):
            if have is not length and order(have, length) > 0:
                heads[k] = (atom, settle(start + length), settle(have - length))
                continue
            places[k] += 1
            if places[k] == len(lists[k]):
                ended += 1
            else:
                heads[k] = lists[k][places[k]]
        if ended:
            if ended < len(lists):
                raise Undecided
            return


def same_elements(first: tuple[Size, ...], second: tuple[Size, ...]) -> bool:
    """Whether two shapes differ only in dims of size one, so that their elements are in the same order."""
    return first == second or [n for n in first if n != 1] == [n for n in second if n != 1]


def is_single(value: Value) -> bool:
    """Whether a value has one element."""
    return all(type(n) is int and n == 1 for n in value.shape)
