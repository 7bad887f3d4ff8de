"""Memory of a program in one order: how much is in use at each moment, by storage.

An operation's allocations exist from the moment the stream reaches it; given storages from the beginning. A storage is
freed after the last operation that needs it, unless it is kept. A launch needs its inputs and outputs until its first
wait, or to the end without a wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from weft.simulation.program import OpKind, Program

Curve = tuple[tuple[int, int], ...]
Numbers = NDArray[np.int64]


class Footprint:
    """Allocations and uses as tables, prepared once to evaluate many orders."""

    def __init__(self, program: Program) -> None:
        given, waited = program.given, {launch for launches in program.waits_for for launch in launches}
        self.is_empty = not program.allocates
        new_bytes = [0] * len(program.allocates)
        self.given_bytes = 0
        size: dict[int, int] = {}
        users: dict[int, list[int]] = {}
        forever = set(program.kept)
        for op, made in enumerate(program.allocates):
            is_lasting = program.kinds[op] is OpKind.LAUNCH and op not in waited
            for storage, num_bytes in made:
                users.setdefault(storage, []).append(op)
                if storage in given:
                    self.given_bytes += num_bytes
                else:
                    size[storage] = size.get(storage, 0) + num_bytes
                    new_bytes[op] += num_bytes
            for storage in program.uses[op]:
                users.setdefault(storage, []).append(op)
            if is_lasting:
                forever.update(program.uses[op], (storage for storage, _ in made))
        self.made = np.array(new_bytes, np.int64)
        """Bytes that each operation allocates, without given storages."""
        freed = [storage for storage, num_bytes in size.items() if num_bytes and storage not in forever]
        self.size = np.array([size[storage] for storage in freed], np.int64)
        """Size of each storage that is freed at some time."""
        self.users = _Rows(users[storage] for storage in freed)
        waits: dict[int, list[int]] = {}
        for op, launches in enumerate(program.waits_for):
            for launch in launches:
                waits.setdefault(launch, []).append(op)
        self.launches = np.array(list(waits), np.int64)
        self.waits = _Rows(waits.values())

    def peak(self, order: Sequence[int]) -> int:
        """Peak memory of an order."""
        if self.is_empty:
            return 0
        made, freed = self.changes(order)
        in_use = np.cumsum(made - np.concatenate((np.zeros(1, np.int64), freed[:-1])))
        return self.given_bytes + max(0, int(in_use.max(initial=0)))

    def changes(self, order: Sequence[int]) -> tuple[Numbers, Numbers]:
        """For each place in an order, the bytes allocated there and the bytes freed after it."""
        ops = np.asarray(order, np.int64)
        place = np.empty(len(ops), np.int64)
        place[ops] = np.arange(len(ops))
        until = place.copy()
        until[self.launches] = np.minimum.reduceat(place[self.waits.flat], self.waits.starts)
        freed = np.zeros(len(ops), np.int64)
        np.add.at(freed, np.maximum.reduceat(until[self.users.flat], self.users.starts), self.size)
        return self.made[ops], freed


class _Rows:
    """Non-empty rows of numbers, concatenated for numpy's `reduceat`."""

    def __init__(self, rows: Iterable[Sequence[int]]) -> None:
        found = list(rows)
        self.flat = np.array([number for row in found for number in row], np.int64)
        self.starts = np.cumsum([0, *map(len, found[:-1])]) if found else np.zeros(0, np.int64)


def memory_of(
    program: Program, order: Sequence[int], reached_ns: Sequence[int], end_ns: Sequence[int]
) -> tuple[int, Curve]:
    """The peak, and the curve as (time, bytes in use from then on). A peak may last for zero time."""
    footprint = Footprint(program)
    if footprint.is_empty:
        return 0, ()
    now = peak = footprint.given_bytes
    curve = [(0, now)]
    kinds = program.kinds
    for op, made, freed in zip(order, *map(np.ndarray.tolist, footprint.changes(order)), strict=True):
        if made:
            now += made
            peak = max(peak, now)
            curve.append((reached_ns[op], now))
        if freed:
            now -= freed
            curve.append((reached_ns[op] if kinds[op] is OpKind.LAUNCH else end_ns[op], now))
    return peak, tuple(curve)
