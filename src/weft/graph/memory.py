"""Reads and writes of memory, by storage and by node.

Contract: the tables list every access to a storage that some node writes. Storages that nothing writes are left out,
since accesses to them can never conflict. Lists of positions ascend in the order of the graph.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

from weft.graph.operator_effects import Profile


class MemoryAccesses:
    """The accesses of one sequence of nodes. Each table is built when it is first used."""

    def __init__(self, accesses: Sequence[tuple[int, int, bool]], special: Sequence[tuple[int, Profile]]) -> None:
        """Takes `accesses` and `special` from `Effects`."""
        self._accesses, self._special = accesses, special

    @functools.cached_property
    def by_node(self) -> dict[int, list[tuple[int, bool]]]:
        """The accesses (storage, is_write) of each node, to pseudo-storages as well."""
        found: dict[int, list[tuple[int, bool]]] = {}
        for i, storage, is_write in self._accesses:
            found.setdefault(i, []).append((storage, is_write))
        return found

    @functools.cached_property
    def by_storage(self) -> dict[int, list[tuple[int, bool]]]:
        """The accesses (position, is_write) to the storages of tensors."""
        found: dict[int, list[tuple[int, bool]]] = {}
        for i, storage, is_write in self._accesses:
            if storage >= 0:
                found.setdefault(storage, []).append((i, is_write))
        return found

    @functools.cached_property
    def writes(self) -> dict[int, list[int]]:
        """The positions of the writes to each storage, to pseudo-storages as well."""
        found: dict[int, list[int]] = {}
        for i, storage, is_write in self._accesses:
            if is_write:
                found.setdefault(storage, []).append(i)
        return found

    @functools.cached_property
    def direct_writes(self) -> dict[int, list[int]]:
        """The positions of the writes to the storages of tensors, without those that deliver a collective's result.

        A functional launch writes a result that nobody has seen yet, and its wait completes that write. Neither
        changes a value that anyone could have read before.
        """
        delivering = {i for i, p in self._special if p.wait or p.host_copy or (p.launch and not p.writes)}
        found: dict[int, list[int]] = {}
        for i, storage, is_write in self._accesses:
            if is_write and storage >= 0 and i not in delivering:
                found.setdefault(storage, []).append(i)
        return found

    @functools.cached_property
    def written(self) -> frozenset[int]:
        """The storages that some node other than a launch or a wait writes."""
        return frozenset(self.direct_writes)

    def num_writes_before(self, storage: int, position: int) -> int:
        """How many writes to a storage come before a position."""
        return bisect_left(self.writes.get(storage, ()), position)

    def first_write(self, storage: int, begin: int, end: int | None = None) -> int | None:
        """The position of the first write to a storage strictly between two positions."""
        return _first_between(self.writes.get(storage, ()), begin, end)

    def first_direct_write(self, storage: int, begin: int, end: int | None = None) -> int | None:
        """The position of the first direct write to a storage strictly between two positions."""
        return _first_between(self.direct_writes.get(storage, ()), begin, end)

    def accesses_after(self, storage: int, begin: int, last: int) -> Iterator[int]:
        """The positions of the accesses to a tensor's storage after `begin`, up to and including `last`."""
        found = self.by_storage.get(storage, [])
        start = bisect_right(found, (begin, True))
        return (i for i, _ in takewhile(lambda access: access[0] <= last, islice(found, start, None)))


def _first_between(positions: Sequence[int], begin: int, end: int | None) -> int | None:
    k = bisect_right(positions, begin)
    return positions[k] if k < len(positions) and (end is None or positions[k] < end) else None
