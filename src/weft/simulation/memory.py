"""Memory of a program in one order: how much is in use at each moment, by storage.

What an operation allocates is there from the moment that the stream reaches it, what is given from the beginning. A
storage is free once the last operation that needs it has ended, unless it is kept. A launch needs what it reads and
writes until the first wait for it, and to the end where nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.simulation.program import Program, Sort

Curve = tuple[tuple[int, int], ...]


def memory_of(
    program: Program, order: Sequence[int], reached_ns: Sequence[int], end_ns: Sequence[int]
) -> tuple[int, Curve]:
    """The peak, and the curve as (time, bytes in use from then on). A peak may last for no time."""
    if not program.allocates:
        return 0, ()
    freed = last_uses(program, order)
    allocates, given, sorts = program.allocates, program.given, program.sorts
    size: dict[int, int] = {}
    for made in allocates:
        for storage, num_bytes in made:
            if storage in given:
                size[storage] = size.get(storage, 0) + num_bytes
    now = peak = sum(size.values())
    curve = [(0, now)]
    for op in order:
        added = 0
        for storage, num_bytes in allocates[op]:
            if storage not in given:
                size[storage] = size.get(storage, 0) + num_bytes
                added += num_bytes
        if added:
            now += added
            peak = max(peak, now)
            curve.append((reached_ns[op], now))
        dead = freed.get(op)
        if dead is None:
            continue
        removed = sum(size.pop(storage, 0) for storage in dead)
        if removed:
            now -= removed
            curve.append((reached_ns[op] if sorts[op] is Sort.LAUNCH else end_ns[op], now))
    return peak, tuple(curve)


def last_uses(program: Program, order: Sequence[int]) -> dict[int, list[int]]:
    """The storages that each operation is the last to need; those that are never free are left out."""
    allocates, uses, waits_for, sorts = program.allocates, program.uses, program.waits_for, program.sorts
    last: dict[int, int] = {}
    landed: set[int] = set()
    for op in order:
        for storage, _ in allocates[op]:
            last[storage] = op
        for storage in uses[op]:
            last[storage] = op
        for launch in waits_for[op]:
            if launch not in landed:
                landed.add(launch)
                last.update((storage, op) for storage in _buffers(program, launch))
    forever = set(program.kept)
    for op in order:
        if sorts[op] is Sort.LAUNCH and op not in landed:
            forever.update(_buffers(program, op))
    freed: dict[int, list[int]] = {}
    for storage, op in last.items():
        if storage not in forever:
            freed.setdefault(op, []).append(storage)
    return freed


def _buffers(program: Program, launch: int) -> list[int]:
    """What a launch reads and writes."""
    return [*program.uses[launch], *(storage for storage, _ in program.allocates[launch])]
