"""Shape: what every run of the scheduler needs to know of the jobs, found once.

Memory here is by job: a storage that one job makes and uses is left out, since a fused kernel does not write it. It
guides the scheduler; what counts is the memory of the whole order, which is measured on the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add, or_

import numpy as np
from numpy.typing import NDArray

from weft.scheduling.jobs import NO_JOB, Jobs

SHORT = 4
"""What prepares a launch takes at most one of so many parts of it."""


class Shape:
    """Tables of the jobs of one program."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.size = size = len(jobs)
        self.is_launch = [queue >= 0 for queue in jobs.queue]
        self.elapsed = [0] * (size + 1)
        """Compute before each job in the order of the jobs."""
        for job, ns in enumerate(jobs.duration):
            self.elapsed[job + 1] = self.elapsed[job] + (0 if self.is_launch[job] else ns)
        self.total = self.elapsed[size]
        self.span = max(self.total, sum(jobs.duration) - self.total)
        """All compute or all communication, whichever is more."""
        self.rest = [0] * size
        """The longest path of compute behind each job."""
        self.tail = [0] * size
        """The longest path behind each job, collectives included."""
        self._find_paths()
        self._fillers: dict[int, tuple[list[bool], list[int]]] = {}
        self.prepares = self._preparing()
        """Jobs that need nothing, that launches need and others only behind their uses, and that are short beside
        these: casts of shards, even where an optimizer writes to the shards later."""
        self.order_of_use = self._ordered_preparing()
        self.num_needs = self._num_needs()
        """How many jobs each needs; launches, but for what prepares them: that is done with them."""
        self.memory = _memory(jobs)
        self.peaks = _Maxima(self.memory.curve)

    def _find_paths(self) -> None:
        jobs, rest, tail = self.jobs, self.rest, self.tail
        for job in range(self.size - 1, -1, -1):
            for succ in jobs.succs[job]:
                ns = jobs.duration[succ]
                rest[job] = max(rest[job], rest[succ] + (0 if self.is_launch[succ] else ns))
                tail[job] = max(tail[job], tail[succ] + ns)

    def fillers(self, share: int) -> tuple[list[bool], list[int]]:
        """Which jobs are fillers, since the longest path behind them is less than so many thousandths of what is left;
        and for each launch the first job that is none and needs it, the number of jobs where there is none."""
        if share not in self._fillers:
            size, left = self.size, zip(self.rest, self.elapsed, strict=False)
            found = [rest * 1000 < share * (self.total - elapsed) for rest, elapsed in left]
            fillers = [is_filler and not is_launch for is_filler, is_launch in zip(found, self.is_launch, strict=True)]
            first_use = [size] * size
            for job in range(size - 1, -1, -1):
                if not fillers[job]:
                    for launch in self.jobs.comm_preds[job]:
                        first_use[launch] = first_use[job] if self.is_launch[job] else job
            self._fillers[share] = fillers, first_use
        return self._fillers[share]

    def _preparing(self) -> list[bool]:
        jobs, (_, first_use) = self.jobs, self.fillers(0)
        found = [not is_launch for is_launch in self.is_launch]
        used = list(first_use)
        last = 0
        while sum(found) != last:  # until all that these need, and all that needs these, is of the sort
            last = sum(found)
            for job in range(self.size):
                found[job] = found[job] and not jobs.comm_preds[job] and all(found[p] for p in jobs.preds[job])
            for job in range(self.size - 1, -1, -1):
                if not found[job]:
                    continue
                succs, ns = jobs.succs[job], jobs.duration[job]
                prepared = [s for s in succs if self.is_launch[s] or found[s]]
                is_short = all(ns * SHORT <= jobs.duration[s] for s in prepared if self.is_launch[s])
                used[job] = max([used[s] for s in prepared], default=self.size)
                is_first = all(self.is_launch[s] or found[s] or s > used[job] for s in succs)
                found[job] = bool(prepared) and is_short and is_first
        return found

    def _num_needs(self) -> list[int]:
        needs = (set(found) for found in map(add, self.jobs.preds, self.jobs.comm_preds))
        is_late = map(or_, self.is_launch, self.prepares)
        return [sum(not (late and self.prepares[p]) for p in n) for n, late in zip(needs, is_late, strict=True)]

    def _ordered_preparing(self) -> list[int]:
        """The jobs that prepare launches, by the first use of what is launched."""
        jobs, use, (_, first_use) = self.jobs, dict[int, int](), self.fillers(0)
        for job in range(self.size - 1, -1, -1):
            if self.prepares[job]:
                use[job] = min(first_use[s] if self.is_launch[s] else use.get(s, self.size) for s in jobs.succs[job])
        return sorted(use, key=lambda job: (use[job], job))


@dataclass(frozen=True)
class Memory:
    """What jobs allocate and hold."""

    size: list[int]
    """Bytes of each storage that is neither given nor inside one job; 0 for the others."""
    made_bytes: list[int]
    """What comes to life with each job."""
    passing_bytes: list[int]
    """The most that each job makes beside each other, what is gone again with it included."""
    least_bytes: list[int]
    """The same, if what it is the last to need in the order of the jobs is free as soon as it needs it no more."""
    dying: list[tuple[int, ...]]
    """The storages that each job is the last to need in the order of the jobs."""
    held: list[tuple[int, ...]]
    """The storages that each job needs or makes."""
    holders: list[int]
    """How many jobs hold each storage; one more for what is kept to the end."""
    curve: NDArray[np.int64]
    """Bytes in use while each job runs, if they run in order and are waited for at once; and behind the last."""
    before: list[int]
    """Bytes in use before each job runs, likewise, and behind the last."""
    frees: list[bool]
    """Launches that hold no less than they bring: waiting for them frees memory."""


def _memory(jobs: Jobs) -> Memory:
    program, count = jobs.program, len(jobs)
    made: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    holders: dict[int, set[int]] = {}
    for op, allocated in enumerate(program.allocates):
        job = jobs.job_of[op]
        for storage, num_bytes in allocated:
            if storage not in program.given and job != NO_JOB:
                made[job].append((storage, num_bytes))
                holders.setdefault(storage, set()).add(job)
    for op, used in enumerate(program.uses):
        job = jobs.job_of[op]
        for storage in used:
            if storage in holders and job != NO_JOB:
                holders[storage].add(job)
    num = max(holders, default=-1) + 1
    size, held = [0] * num, [list[int]() for _ in range(count)]
    for storages in made:
        for storage, num_bytes in storages:
            if len(holders[storage]) > 1 or storage in program.kept:
                size[storage] += num_bytes
    for storage, users in holders.items():
        if size[storage]:
            for job in sorted(users):
                held[job].append(storage)
    brings = [tuple(dict.fromkeys(storage for storage, _ in storages if size[storage])) for storages in made]
    made_bytes = [sum(size[storage] for storage in storages) for storages in brings]
    dies = {storage: max(users) for storage, users in holders.items() if storage not in program.kept}
    inside = {storage: job for storage, job in dies.items() if not size[storage]}
    passing_bytes = [_passing_bytes(jobs, job, size, inside) if made[job] else 0 for job in range(count)]
    least_bytes = [_passing_bytes(jobs, job, size, dies) if made[job] else 0 for job in range(count)]
    dying = [tuple(s for s in held[job] if dies.get(s) == job) for job in range(count)]
    num_holders = [len(holders.get(storage, ())) + (storage in program.kept) for storage in range(num)]
    curve, left, now = np.zeros(count + 1, np.int64), list(num_holders), 0
    before = [0] * (count + 1)
    for job in range(count):
        before[job] = now
        curve[job] = now + least_bytes[job]
        now += made_bytes[job]
        for storage in held[job]:
            left[storage] -= 1
            if left[storage] == 0:
                now -= size[storage]
    sent = [sum(size[s] for s in held[job]) - made_bytes[job] for job in range(count)]
    frees = [queue >= 0 and sent[job] >= made_bytes[job] for job, queue in enumerate(jobs.queue)]
    before[count] = curve[count] = now
    return Memory(
        size=size,
        made_bytes=made_bytes,
        passing_bytes=passing_bytes,
        least_bytes=least_bytes,
        dying=dying,
        held=[tuple(h) for h in held],
        holders=num_holders,
        curve=curve,
        before=before,
        frees=frees,
    )


def _passing_bytes(jobs: Jobs, job: int, size: list[int], dies: Mapping[int, int]) -> int:
    """The most that a job adds at once, if what dies with it is free behind the last of its operations to need it."""
    program, ops = jobs.program, jobs.ops[job]
    last: dict[int, int] = {}
    for op in ops:
        last.update((storage, op) for storage in (*program.uses[op], *(s for s, _ in program.allocates[op])))
    freed: dict[int, list[int]] = {}
    for storage, op in last.items():
        if dies.get(storage) == job:
            freed.setdefault(op, []).append(storage)
    made: dict[int, int] = {}
    now = most = 0
    for op in ops:
        for storage, num_bytes in program.allocates[op]:
            if storage not in program.given:
                now += num_bytes
                made[storage] = made.get(storage, 0) + num_bytes
        most = max(most, now)
        now -= sum([made.get(storage, size[storage]) for storage in freed.get(op, ())])
    return most


class _Maxima:
    """The maximum of any stretch of a row of numbers."""

    def __init__(self, row: NDArray[np.int64]) -> None:
        self.most = int(row.max(initial=0))
        levels = [row]
        width = 1
        while 2 * width <= len(row):
            last = levels[-1]
            levels.append(np.maximum(last[:-width], last[width:]))
            width *= 2
        self.levels = [level.data for level in levels]  # one number of these is read faster than one of an array

    def of(self, first: int, last: int) -> int:
        """Of the numbers from first to last."""
        level = (last - first + 1).bit_length() - 1
        row = self.levels[level]
        return max(row[first], row[last - (1 << level) + 1])
