"""Memory limit: storages that do not fit next to each other must live one after the other.

Contract: a storage lives from the start of the operation that makes it to the end of a chain of operations that need
it, including the collectives that send or receive it. No order shortens that. In an order within the limit, `room`
bytes are left next to the given storages. Two arguments follow, both forms of energetic reasoning:

    count    of the storages larger than room / (count + 1), at most `count` live at once
    area     bytes x lifetime, summed over all storages, fits into room x step

Either way, this happens after the smallest head and before the smallest tail of the counted storages.

    room   |== s1 ==|== s2 ==|== s3 ==|        three gathered weights; one fits at a time

With merging, a bucket holds at least the bytes that its members receive, for at least the time of its longest member.
Only that is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from weft.bounds.problem import BoundError, MergingAssumption, Tasks
from weft.errors import compose
from weft.quantities import size_text
from weft.simulation.program import OpKind, Program

MAX_COUNT = 64
"""Largest `count` that is tried."""


@dataclass(frozen=True)
class StorageLifetime:
    """The shortest possible life of one storage."""

    num_bytes: int
    time: int
    """How long it lives at least."""
    head: int
    """Time that must pass before that."""
    tail: int
    """Time that must pass after it."""


@dataclass(frozen=True)
class MemoryBound:
    """The best bound that follows from the limit."""

    value: int
    count: int | None
    """How many of the counted storages fit at once; None: the area argument over all storages."""
    num_storages: int


def memory_bound(program: Program, tasks: Tasks, merging: MergingAssumption, limit_bytes: int) -> MemoryBound | None:
    """The best bound for orders within the limit; None if no storage lives for any time."""
    room = limit_bytes - sum(
        num_bytes for made in program.allocates for storage, num_bytes in made if storage in program.given
    )
    held = list(lifetimes(program, tasks, merging))
    largest = max((each.num_bytes for each in held), default=0)
    if room < largest:
        given = f"inputs and constants take {size_text(limit_bytes - room)} and one storage {size_text(largest)}"
        what = f"no order fits into {size_text(limit_bytes)}: {given}"
        raise BoundError(compose("bounds", what, do="give a larger memory limit"))
    held = [each for each in held if each.num_bytes and each.time]
    if not held:
        return None
    area = -(-sum(each.num_bytes * each.time for each in held) // room)
    found = [MemoryBound(area + outside(held), None, len(held))]
    for count in range(1, MAX_COUNT + 1):
        large = [each for each in held if each.num_bytes * (count + 1) > room]
        if large:
            value = outside(large) - (-sum(each.time for each in large) // count)
            found.append(MemoryBound(value, count, len(large)))
    return max(found, key=lambda each: each.value)


def outside(held: list[StorageLifetime]) -> int:
    """Time that must pass before and after all of them."""
    return min(each.head for each in held) + min(each.tail for each in held)


def lifetimes(program: Program, tasks: Tasks, merging: MergingAssumption) -> Iterator[StorageLifetime]:
    """The shortest life of each storage that the program makes.

    A storage that several operations allocate (one that is resized) is left out: its life has no single start.
    """
    num_ops = len(program.kinds)
    takes = [program.duration_ns[op] if kind is OpKind.COMPUTE else 0 for op, kind in enumerate(program.kinds)]
    takes += [program.duration_ns[op] if kind is OpKind.LAUNCH else 0 for op, kind in enumerate(program.kinds)]
    heads, tails = longest_paths(tasks, takes), longest_paths(tasks.reversed(), takes)
    makers = Counter(storage for made in program.allocates for storage, _ in made)
    users: dict[int, list[int]] = {}
    for op, storages in enumerate(program.uses):
        for storage in storages:
            users.setdefault(storage, []).append(op)
    for maker, made in enumerate(program.allocates):
        for storage, num_bytes in made:
            if storage in program.given or makers[storage] > 1:
                continue
            if merging is MergingAssumption.ALLOWED:
                needing = {maker + num_ops} if program.kinds[maker] is OpKind.LAUNCH else set[int]()
            else:
                needing = {maker, *users.get(storage, ())}
                needing |= {op + num_ops for op in needing if program.kinds[op] is OpKind.LAUNCH}
            if not needing:
                continue
            time, last = longest_chain(tasks, takes, needing)
            if storage in program.kept and merging is MergingAssumption.EXCLUDED:
                yield StorageLifetime(num_bytes, takes[maker] + tails[maker], heads[maker], 0)
            else:
                yield StorageLifetime(num_bytes, time, heads[maker], tails[last])


def longest_paths(tasks: Tasks, takes: list[int]) -> list[int]:
    """The longest path before each node, without launch gaps."""
    start = [0] * len(takes)
    for node in tasks.order:
        start[node] = max((start[pred] + takes[pred] for pred in tasks.preds[node]), default=0)
    return start


def longest_chain(tasks: Tasks, takes: list[int], nodes: set[int]) -> tuple[int, int]:
    """The longest chain among some nodes, from its first start to its last end, and its last node."""
    num_ops = len(takes) // 2
    ends: dict[int, int] = {}
    for node in sorted(nodes, key=lambda node: (node % num_ops, node)):  # operations are numbered in a legal order
        ends[node] = takes[node] + max((ends[pred] for pred in tasks.preds[node] if pred in ends), default=0)
    last = max(ends, key=lambda node: ends[node])
    return ends[last], last
