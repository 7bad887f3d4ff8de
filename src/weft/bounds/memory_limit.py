"""What a memory limit forces: storages that do not fit beside each other are held one after the other.

Contract: a storage is held from the start of the operation that makes it to the end of a chain of operations that need
it, collectives that send or receive it included; it is held no shorter, whatever the order. Beside what is given only
`room` bytes are left in any order that keeps to the limit. So, of the storages that are larger than a share
1 / (count + 1) of the room, at most `count` are held at once; and bytes x time of all storages fit into room x step.
Either way all of it happens after the least head and before the least tail of what is counted.

Where collectives may be merged, a bucket holds at least what its members receive, for at least as long as the longest
of them takes: only that is counted then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from weft.bounds.problem import BoundError, MergingAssumption, Tasks
from weft.errors import compose
from weft.simulation.program import OpKind, Program

MAX_COUNT = 64
"""Up to how many storages that fit at once are tried."""


@dataclass(frozen=True)
class StorageLifetime:
    """One storage."""

    num_bytes: int
    time: int
    """How long it is held at least."""
    head: int
    """What must be done before that."""
    tail: int
    """What must be done behind it."""


@dataclass(frozen=True)
class MemoryBound:
    """The best bound that the limit forces."""

    value: int
    count: int | None
    """How many of the storages fit at once; None: all storages by their bytes."""
    num_storages: int


def memory_forced(program: Program, tasks: Tasks, merging: MergingAssumption, limit_bytes: int) -> MemoryBound | None:
    """The best bound of any order that keeps to the limit; None where no storage is held for any time."""
    room = limit_bytes - sum(
        num_bytes for made in program.allocates for storage, num_bytes in made if storage in program.given
    )
    held = list(held_of(program, tasks, merging))
    largest = max((each.num_bytes for each in held), default=0)
    if room < largest:
        what = f"no order keeps to {limit_bytes} bytes: {limit_bytes - room} are given, and one storage has {largest}"
        raise BoundError(compose("bounds", what, do="give a larger memory limit"))
    held = [each for each in held if each.num_bytes and each.time]
    if not held:
        return None
    area = -(-sum(each.num_bytes * each.time for each in held) // room)
    found = [MemoryBound(area + lead(held), None, len(held))]
    for count in range(1, MAX_COUNT + 1):
        large = [each for each in held if each.num_bytes * (count + 1) > room]
        if large:
            value = lead(large) - (-sum(each.time for each in large) // count)
            found.append(MemoryBound(value, count, len(large)))
    return max(found, key=lambda each: each.value)


def lead(held: list[StorageLifetime]) -> int:
    """What must be done before and behind all of them."""
    return min(each.head for each in held) + min(each.tail for each in held)


def held_of(program: Program, tasks: Tasks, merging: MergingAssumption) -> Iterator[StorageLifetime]:
    """The storages that come and go, each with how long it is held at least."""
    num_ops = len(program.kinds)
    takes = [program.duration_ns[op] if kind is OpKind.COMPUTE else 0 for op, kind in enumerate(program.kinds)]
    takes += [program.duration_ns[op] if kind is OpKind.LAUNCH else 0 for op, kind in enumerate(program.kinds)]
    heads, tails = longest(tasks, takes), longest(tasks.reversed(), takes)
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
            time, last = chain(tasks, takes, needing)
            if storage in program.kept and merging is MergingAssumption.EXCLUDED:
                yield StorageLifetime(num_bytes, takes[maker] + tails[maker], heads[maker], 0)
            else:
                yield StorageLifetime(num_bytes, time, heads[maker], tails[last])


def longest(tasks: Tasks, takes: list[int]) -> list[int]:
    """The longest chain before each node, gaps left out."""
    start = [0] * len(takes)
    for node in tasks.order:
        start[node] = max((start[pred] + takes[pred] for pred in tasks.preds[node]), default=0)
    return start


def chain(tasks: Tasks, takes: list[int], nodes: set[int]) -> tuple[int, int]:
    """The longest chain among some nodes, from its first start to its last end, and its last node."""
    num_ops = len(takes) // 2
    ends: dict[int, int] = {}
    for node in sorted(nodes, key=lambda node: (node % num_ops, node)):  # operations are numbered in a legal order
        ends[node] = takes[node] + max((ends[pred] for pred in tasks.preds[node] if pred in ends), default=0)
    last = max(ends, key=lambda node: ends[node])
    return ends[last], last
