"""JobTables: facts about the jobs that every run of the scheduler needs, computed once.

Memory is counted by job. A storage that only one job makes and uses does not count: a fused kernel never writes it to
memory.
This memory only guides the scheduler; the final check measures the memory of the whole order on the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add, or_

import numpy as np
from numpy.typing import NDArray

from weft.scheduling.jobs import NO_JOB, Jobs

NEGLIGIBLE = 2
"""A launch that takes at most twice its latency carries almost nothing, such as the norm of all gradients."""
SHORT = 4
"""A job that prepares a launch takes at most 1/4 of the launch's time; a longer one is ordinary compute."""


class JobTables:
    """Tables of the jobs of one program."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.size = size = len(jobs)
        self.is_launch = [queue >= 0 for queue in jobs.queue]
        self.leaves = [queue >= 0 and jobs.program.queues[queue].is_to_host for queue in jobs.queue]
        """Which jobs launch copies to host memory."""
        self.elapsed = [0] * (size + 1)
        """Compute time before each job, in the order of the jobs, in nanoseconds."""
        for job, ns in enumerate(jobs.duration):
            self.elapsed[job + 1] = self.elapsed[job] + (0 if self.is_launch[job] else ns)
        self.total = self.elapsed[size]
        self.span = max(self.total, sum(jobs.duration) - self.total)
        """Total compute or total communication, whichever is longer."""
        self.rest = [0] * size
        """The longest path of compute after each job."""
        self.tail = [0] * size
        """The longest path after each job, collectives included (its tail)."""
        self._find_paths()
        self._fillers: dict[int, tuple[list[bool], list[int]]] = {}
        self.prepares = self._preparing()
        """Cheap source jobs whose only early consumers are launches, such as casts of shards. An optimizer may still
        write to the shards later."""
        self.order_of_use = self._ordered_preparing()
        self.is_late = self._late()
        """Launches of computed values that nothing needs before the last such launch is fed: reductions of gradients
        that only the optimizer needs."""
        self.num_needs = self._num_needs()
        """Number of jobs that each job needs. A launch does not count the jobs that prepare it: they run with it."""
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
        """Which jobs are fillers, and the first use of each launch by a job that is not one.

        A filler is a job with little work after it: the longest compute path after it is less than `share` thousandths
        of all compute that is left. A launch without such a use has the number of jobs as its first use; so has a copy
        to host memory, which is better made early, long before its result is fetched.
        """
        if share not in self._fillers:
            size, left = self.size, zip(self.rest, self.elapsed, strict=False)
            found = [rest * 1000 < share * (self.total - elapsed) for rest, elapsed in left]
            fillers = [is_filler and not is_launch for is_filler, is_launch in zip(found, self.is_launch, strict=True)]
            first_use = [size] * size
            for job in range(size - 1, -1, -1):
                if not fillers[job]:
                    for launch in self.jobs.comm_preds[job]:
                        if not self.leaves[launch]:
                            first_use[launch] = first_use[job] if self.is_launch[job] else job
            self._fillers[share] = fillers, first_use
        return self._fillers[share]

    def _preparing(self) -> list[bool]:
        jobs, (_, first_use) = self.jobs, self.fillers(0)
        found = [not is_launch for is_launch in self.is_launch]
        used = list(first_use)
        last = 0
        while sum(found) != last:  # both conditions depend on other jobs: repeat until nothing changes
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

    def _late(self) -> list[bool]:
        jobs, (_, first_use) = self.jobs, self.fillers(0)
        queues, least = jobs.program.queues, jobs.program.latency_ns
        is_late, last = [False] * self.size, self.size
        for job in range(self.size):
            fed = [p for p in jobs.preds[job] if not self.prepares[p]]
            if not self.is_launch[job] or queues[jobs.queue[job]].is_copies or first_use[job] == self.size:
                continue
            is_late[job] = bool(fed or jobs.comm_preds[job])
            if fed and not (least and jobs.duration[job] <= NEGLIGIBLE * least[jobs.ops[job][0]]):
                last = max(fed) if last == self.size else max(last, *fed)
        is_late = [late and first_use[job] > last for job, late in enumerate(is_late)]
        return is_late if sum(is_late) > 1 else [False] * self.size  # one alone has nothing to merge with

    def _num_needs(self) -> list[int]:
        needs = (set(found) for found in map(add, self.jobs.preds, self.jobs.comm_preds))
        is_late = map(or_, self.is_launch, self.prepares)
        return [sum(not (late and self.prepares[p]) for p in n) for n, late in zip(needs, is_late, strict=True)]

    def _ordered_preparing(self) -> list[int]:
        """The jobs that prepare launches, ordered by the first use of what they launch."""
        jobs, use, (_, first_use) = self.jobs, dict[int, int](), self.fillers(0)
        for job in range(self.size - 1, -1, -1):
            if self.prepares[job]:
                use[job] = min(first_use[s] if self.is_launch[s] else use.get(s, self.size) for s in jobs.succs[job])
        return sorted(use, key=lambda job: (use[job], job))


@dataclass(frozen=True)
class JobMemory:
    """Memory that jobs allocate and hold."""

    size: list[int]
    """Bytes of each storage that is not an input and that several jobs use; 0 for the others."""
    made_bytes: list[int]
    """Bytes that each job allocates for others."""
    passing_bytes: list[int]
    """Peak bytes that each job adds while it runs, temporaries included."""
    least_bytes: list[int]
    """The same, if every storage whose last use is in this job is freed right after that use."""
    dying: list[tuple[int, ...]]
    """The storages whose last use, in the order of the jobs, is in each job."""
    held: list[tuple[int, ...]]
    """The storages that each job uses or allocates."""
    holders: list[int]
    """Number of jobs that hold each storage; one more if it lives to the end of the step."""
    curve: NDArray[np.int64]
    """Bytes in use while each job runs, and after the last, if jobs run in order with immediate waits."""
    before: list[int]
    """Bytes in use before each job runs, and after the last, in the same order."""
    frees: list[bool]
    """Launches that hold at least as many bytes as they produce: waiting for them frees memory."""


def _memory(jobs: Jobs) -> JobMemory:
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
    passing_bytes, least_bytes = [0] * count, [0] * count
    for job in range(count):
        if len(jobs.ops[job]) == 1:  # it frees nothing before its peak
            passing_bytes[job] = least_bytes[job] = sum([num_bytes for _, num_bytes in made[job]])
        elif made[job]:
            last = _last_uses(jobs, job)
            passing_bytes[job] = _passing_bytes(jobs, job, size, inside, last)
            least_bytes[job] = _passing_bytes(jobs, job, size, dies, last)
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
    return JobMemory(
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


def _last_uses(jobs: Jobs, job: int) -> dict[int, int]:
    """The last operation of a job that uses or allocates each storage."""
    last: dict[int, int] = {}
    for op in jobs.ops[job]:
        for storage in jobs.program.uses[op]:
            last[storage] = op
        for storage, _ in jobs.program.allocates[op]:
            last[storage] = op
    return last


def _passing_bytes(jobs: Jobs, job: int, size: list[int], dies: Mapping[int, int], last: Mapping[int, int]) -> int:
    """Peak bytes that a job adds, if each storage that dies in it is freed after its last operation that uses it."""
    program, ops = jobs.program, jobs.ops[job]
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
    """Range maxima of a row of numbers, by a sparse table: any range is the union of two ranges of a power of two."""

    def __init__(self, row: NDArray[np.int64]) -> None:
        self.most = int(row.max(initial=0))
        levels = [row]
        width = 1
        while 2 * width <= len(row):
            last = levels[-1]
            levels.append(np.maximum(last[:-width], last[width:]))
            width *= 2
        self.levels = [level.data for level in levels]  # reading one element of a memoryview is faster than of an array

    def of(self, first: int, last: int) -> int:
        """The maximum of the numbers from `first` to `last`, both included."""
        level = (last - first + 1).bit_length() - 1
        row = self.levels[level]
        return max(row[first], row[last - (1 << level) + 1])
