"""Execution: what a schedule has done so far, on the compute stream, on the queues and in memory.

Contract: jobs are run and launched one by one; `now` is when the stream is free. A launch is committed to its queue
only when the queue would run empty otherwise. Gathers go by their first use; reductions that nothing waits for go first
where all gathers still come in time; launches that are ready beside each other may go as one. Times are those of the
model, but that queues on one link do not slow each other here, and that collectives are always as slow as they are
beside compute: the simulator's verdict on the whole order counts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, Protocol

from weft.scheduling.jobs import Jobs
from weft.scheduling.room import NO_LIMIT, Room
from weft.scheduling.shape import Shape
from weft.simulation.program import MILLION

NEVER = 1 << 62
UNSURE = 8
"""Times may be wrong: launches go earlier by one of so many parts of the time since a collective of their queue was
waited for last, and what is not needed is waited for two of them later."""
GATHERS_SEEN = 8
"""How many gathers are looked at to see whether they still come in time."""
GATHERS_JOINED = 32
"""How many gathers are looked at for a bucket."""
FURTHER = 2
"""How many times as far ahead as its first a bucket reaches: else each would go alone as soon as it is time for it."""


@dataclass(frozen=True)
class Knobs:
    """What one run is tuned by. Times are thousandths of all compute."""

    window: int = 40
    """How many jobs ahead of the first that is left one may run."""
    hold: int = 60
    """For how long a filler is held back."""
    lookahead: int = 60
    """How long before its first use a gather may be launched."""
    filler: int = 200
    """A job is a filler if the longest path behind it is less than so many thousandths of all that is left."""
    bucket: int = 0
    """How long a collective of several may take, in latencies: beyond that merging saves next to nothing. 0: none."""
    fill: int = 0
    """Reductions are held back until a bucket of them would take as many latencies, or no more of their sort are to
    come, or something waits for one of them. 0: none is held back."""
    patience: int = 0
    """By how much a gather may come later because it was merged, of all compute or communication, whichever is more."""
    keep: bool = False
    """Whether fillers that take longer than what they bring to the queues are kept for the end while there is room."""
    finish: Literal["tail", "work"] = "tail"
    """In which order the fillers go that are left at the end: the longest path behind first, or what keeps a queue busy
    for longer than the stream, the shortest first, before all others."""
    budget_bytes: int = NO_LIMIT
    """What may be in use, by the memory of the shape."""


class Merging(Protocol):
    """What the scheduler asks about buckets."""

    def key(self, launch: int) -> int:
        """Launches of one key may be one; -1: this one stays alone."""
        ...

    def latency(self, launch: int) -> int:
        """What a launch takes however little it sends."""
        ...

    def duration(self, launches: Sequence[int]) -> int:
        """What launches take as one; NEVER where they may not be one."""
        ...


Unit = tuple[int, ...]
"""What a schedule puts in order: `job` is run or launched, `~job` is waited for; several are launches that are one."""


class Execution:
    """One schedule in the making."""

    def __init__(self, shape: Shape, knobs: Knobs, merging: Merging | None) -> None:
        jobs: Jobs = shape.jobs
        self.shape, self.jobs, self.knobs = shape, jobs, knobs
        self.merging = merging if knobs.bucket else None
        self.units: list[Unit] = []
        self.now = self.front = 0
        self.hold = knobs.hold * shape.total // 1000
        self.patience = knobs.patience * shape.span // 1000
        self.lookahead = knobs.lookahead * shape.span // 1000
        self.done = [False] * shape.size
        self.waited = [False] * shape.size
        self.end = [0] * shape.size
        """Of collectives that were launched."""
        self.is_filler, self.first_use = shape.fillers(knobs.filler)
        self.missing = list(shape.num_needs)
        """How many each job still needs."""
        num_queues = len(jobs.program.queues)
        self.busy = [0] * num_queues
        self.known = [0] * num_queues
        """By queue the end of the last collective that a job waited for: up to there its times are known."""
        self.gathers: list[list[tuple[int, int]]] = [[] for _ in range(num_queues)]
        """By queue the launches that are ready and that a job needs, by first use."""
        self.others: list[list[int]] = [[] for _ in range(num_queues)]
        """By queue the launches that are ready and that nothing needs, as they came."""
        self.filling = _Filling(shape, self.merging, knobs.fill)
        self.flying: list[int] = []
        """Launches to be waited for once they have ended, as they were launched."""
        self.landing: list[list[tuple[int, int]]] = [[] for _ in range(num_queues)]
        """By queue the same as heaps, by when each should be over, and what was waited for since."""
        self.ready: list[int] = []
        self.fillers: list[int] = []
        self.arrived: list[int] = []
        """All fillers that ever became ready, as they came."""
        self.next_prepared = 0
        self.room = Room(shape, knobs.budget_bytes)
        self.made_bytes = shape.memory.made_bytes
        for job in range(shape.size):
            if not self.missing[job] and not shape.prepares[job]:
                self._arrive(job)

    def when(self, job: int) -> int:
        """When the collectives that a job needs have ended."""
        launches, end = self.jobs.comm_preds[job], self.end
        return max([end[launch] for launch in launches]) if launches else 0

    def fits(self, until: int, num_bytes: int) -> bool:
        """Whether bytes more may be held from now until a job."""
        return self.room.fits(self.front, until, num_bytes)

    def may_run(self, job: int) -> bool:
        """Whether there is room for a job."""
        return self.room.may_run(self.front, job)

    # Doing.

    def _arrive(self, job: int) -> None:
        if self.shape.is_launch[job]:
            queue, use = self.jobs.queue[job], self.first_use[job]
            if use < self.shape.size:
                insort(self.gathers[queue], (use, job))
            else:
                self.others[queue].append(job)
                self.filling.add(job)
        elif self.is_filler[job]:
            insort(self.fillers, job)
            self.arrived.append(job)
        else:
            insort(self.ready, job)

    def _issue(self, job: int) -> None:
        self.done[job] = True
        if not self.shape.is_launch[job]:
            self.units.append((job,))
        self.room.take(job)
        missing, succs, shape = self.missing, self.jobs.succs[job], self.shape
        if shape.prepares[job]:  # what it prepares did not wait for it
            succs = [succ for succ in succs if not shape.is_launch[succ] and not shape.prepares[succ]]
        for succ in succs:
            missing[succ] -= 1
            if not missing[succ]:
                self._arrive(succ)

    def do(self, job: int) -> None:
        """Run or launch a job wherever it stands."""
        if not self.shape.is_launch[job]:
            self.compute(job)
            return
        queue = self.jobs.queue[job]
        if self.first_use[job] < self.shape.size:
            self.gathers[queue].remove((self.first_use[job], job))
            self._launch([job])
            return
        bucket = self._joined(job, self.others[queue], lambda _: True) if self.knobs.fill else [job]
        for other in bucket:
            self.others[queue].remove(other)
        self._launch(bucket)

    def unlock(self, job: int) -> None:
        """Do all that a job needs and that was put off."""
        if not self.missing[job]:
            return
        needed: set[int] = set()
        stack = [job]
        while stack:
            top = stack.pop()
            for p in (*self.jobs.preds[top], *self.jobs.comm_preds[top]):
                is_done_with = self.shape.prepares[p] and self.shape.is_launch[top]
                if not self.done[p] and p not in needed and not is_done_with:
                    needed.add(p)
                    stack.append(p)
        for p in sorted(needed):
            if not self.done[p]:
                self.do(p)

    def compute(self, job: int) -> None:
        duration = self.jobs.duration[job]
        if not self.shape.prepares[job]:
            among = self.fillers if self.is_filler[job] else self.ready
            del among[bisect_left(among, job)]
        if (when := self.when(job)) > self.now:
            self.commit(when)
            self.now = when
        self.room.reserved = 0 if job == self.front else self.room.passing_bytes(job)
        self.commit(self.now + duration, is_early=True)
        self.room.reserved = 0
        if self.done[job]:  # a launch that it prepares went off
            return
        for launch in self.jobs.comm_preds[job]:
            self.wait(launch)
        self._make_room(job, NEVER)
        if not self.done[job]:  # what was launched meanwhile may have needed it
            self._run(job, self._after(duration))

    def _make_room(self, job: int, until: int) -> None:
        """Wait for what frees memory, the first first, while a job would not fit; queues stay busy until then.

        Where nothing is on its way, reductions that wait for their queue are sent. Where there are none, what was put
        off and stood before the job goes first: it may free some too.
        """
        while not self.done[job] and not self.may_run(job):
            if not self.flying:
                if (sent := self._backlog()) is not None:
                    self.do(sent)
                    continue
                early = next((other for other in self.fillers if other < job and self.when(other) <= self.now), None)
                if early is None:
                    return
                self.compute(early)
                continue
            self.now = max(self.now, self.end[self.flying[0]])
            self.wait(self.flying[0])
            self.commit(min(until, self.now + 1))

    def _backlog(self) -> int | None:
        """The first reduction that is ready and would free memory."""
        frees = self.shape.memory.frees
        return next((o for others in self.others for o in others if frees[o] and self.when(o) <= self.now), None)

    def _run(self, job: int, end: int) -> None:
        """A job ends; what it needs is free, and what has landed is waited for where that frees memory."""
        self._issue(job)
        self.now = end
        self.room.release(job)
        over: list[int] = []
        for queue, landing in enumerate(self.landing):
            while landing and landing[0][0] + self._unsure(queue) <= end:
                over.append(heappop(landing)[1])
        if over:
            for launch in sorted(over, key=lambda launch: (self.end[launch], launch)):
                self.wait(launch, is_known=False)

    def is_sure(self, job: int) -> bool:
        """Whether what a job needs has ended, even if all takes longer than it should."""
        return all(self.waited[launch] or self._is_over(launch) for launch in self.jobs.comm_preds[job])

    def _is_over(self, launch: int) -> bool:
        """Whether a collective has ended, even if all takes longer than it should."""
        return self._should_end(launch) + self._unsure(self.jobs.queue[launch]) <= self.now

    def _should_end(self, launch: int) -> int:
        return self.end[launch] + self.jobs.duration[launch] // 4

    def _unsure(self, queue: int) -> int:
        return 2 * (self.now - self.known[queue]) // UNSURE

    def _after(self, duration: int) -> int:
        slowdown = self.jobs.program.slowdown_ppm
        beside = max(self.busy, default=0) - self.now if slowdown else 0
        if beside <= 0:
            return self.now + duration
        longer = duration * (MILLION + slowdown) // MILLION
        return self.now + (longer if longer <= beside else duration + beside * slowdown // (MILLION + slowdown))

    def wait(self, launch: int, is_known: bool = True) -> None:
        """Wait for a launch; it is not known when that ends if it is waited for only because it should be over."""
        if not self.waited[launch]:
            self.waited[launch] = True
            queue = self.jobs.queue[launch]
            if is_known:
                self.known[queue] = max(self.known[queue], self.end[launch])
            self.units.append((~launch,))
            self.room.release(launch)
            if self.shape.memory.frees[launch]:
                self.flying.remove(launch)

    # Launching.

    def commit(self, until: int, is_early: bool = False) -> None:
        """Keep every queue busy until then, or a little longer, as far as there is something to launch."""
        for queue, busy in enumerate(self.busy):
            if not self.gathers[queue] and not self.others[queue]:
                continue
            end = until + (self.now - self.known[queue]) // UNSURE if is_early else until
            while busy < end and (chosen := self._choose(queue)):
                self._launch(chosen)
                busy = self.busy[queue]

    def _choose(self, queue: int) -> list[int]:
        """Take the next launch of a queue, or several that are one."""
        gathers, others = self.gathers[queue], self.others[queue]
        if not gathers and (not others or self.filling.holds_all(queue)):
            return []
        first = next((g for g in gathers[:GATHERS_SEEN] if self.when(g[1]) <= self.now), None)
        is_held = self.filling.is_held
        other = next((job for job in others if self.when(job) <= self.now and not is_held(job)), None)
        if other is not None and self.busy[queue] > self.now and not self.fits(self.front, self.made_bytes[other]):
            other = None  # it holds more than it frees until it is waited for, and the queue has something to do
        is_late = first is not None and other is not None and self._is_late([other])
        is_late = is_late and first is not None and self._has_room([first[1]])
        if other is not None and not is_late:
            chosen = self._joined(other, others, lambda bucket: first is None or not self._is_late(bucket))
            for job in chosen:
                others.remove(job)
            return chosen
        if first is not None and not is_late and not self._may_go(*first):
            # where that is for lack of room, a smaller one behind it may go
            first = next((g for g in gathers[:GATHERS_SEEN] if self.when(g[1]) <= self.now and self._may_go(*g)), None)
        if first is None:
            return []
        due = first[0]
        known = (job for use, job in gathers[:GATHERS_JOINED] if self._may_go(use, job, FURTHER))
        chosen = self._joined(first[1], known, lambda bucket: self._may_be_one(bucket, due))
        for job in chosen:
            gathers.remove((self.first_use[job], job))
        return chosen

    def _may_go(self, use: int, job: int, further: int = 1) -> bool:
        """Whether it is time for a gather, and there is room for it."""
        elapsed = self.shape.elapsed
        return elapsed[use] - elapsed[self.front] <= self.lookahead * further and self._has_room([job])

    def _has_room(self, gathers: list[int]) -> bool:
        """Whether gathers fit beside each other until they would all have been launched in the order of the graph."""
        return self.fits(max(gathers) - 1, sum([self.made_bytes[job] for job in gathers]))

    def _joined(self, first: int, others: Iterable[int], may: Callable[[list[int]], bool]) -> list[int]:
        """A launch with those that are ready too and may be one with it."""
        bucket, merging = [first], self.merging
        if merging is None or (key := merging.key(first)) < 0:
            return bucket
        longest = self.knobs.bucket * merging.latency(first)
        for job in others:
            if job != first and merging.key(job) == key and self.when(job) <= self.now:
                more = [*bucket, job]
                if merging.duration(more) > longest or not may(more):
                    break
                bucket = more
        return bucket

    def _duration(self, bucket: list[int]) -> int:
        """On the wire, taking it that compute runs beside it all the time."""
        merging = None if len(bucket) == 1 else self.merging
        alone = self.jobs.duration[bucket[0]] if merging is None else merging.duration(bucket)
        return alone * (MILLION + self.jobs.program.collective_slowdown_ppm) // MILLION

    def _may_be_one(self, bucket: list[int], use: int) -> bool:
        """Whether gathers come in time for a use, and have room, as one."""
        elapsed, queue = self.shape.elapsed, self.jobs.queue[bucket[0]]
        end = max(self.now, self.busy[queue]) + self._duration(bucket)
        in_time = self.now + elapsed[use] - elapsed[self.front] + self.patience
        return end <= in_time and self._has_room(bucket)

    def _is_late(self, bucket: list[int]) -> bool:
        """Whether a gather would come too late if reductions went before it."""
        duration, elapsed, queue = self.jobs.duration, self.shape.elapsed, self.jobs.queue[bucket[0]]
        slowed, here = MILLION + self.jobs.program.collective_slowdown_ppm, elapsed[self.front]
        end = max(self.now, self.busy[queue]) + self._duration(bucket)
        for use, gather in self.gathers[queue][:GATHERS_SEEN]:
            end += duration[gather] * slowed // MILLION
            if end > self.now + elapsed[use] - here:
                return True
        return False

    def _launch(self, bucket: list[int]) -> None:
        bucket.sort()
        for job in bucket:
            if any(not self.done[p] for p in self.jobs.preds[job]):
                self._prepare(job)
            for launch in self.jobs.comm_preds[job]:
                self.wait(launch)
                self.now = max(self.now, self.end[launch])
        queue = self.jobs.queue[bucket[0]]
        self.busy[queue] = end = max(self.now, self.busy[queue]) + self._duration(bucket)
        for job in bucket:
            self.end[job] = end
            self.filling.launch(job)
            self._issue(job)
            if self.shape.memory.frees[job]:
                self.flying.append(job)
                heappush(self.landing[queue], (self._should_end(job), job))
        self.units.append(tuple(bucket))

    def _prepare(self, job: int) -> None:
        """Run what prepares a launch."""
        needed: dict[int, None] = {}
        stack = [job]
        while stack:
            for p in self.jobs.preds[stack.pop()]:
                if not self.done[p] and p not in needed:
                    needed[p] = None
                    stack.append(p)
        for p in sorted(needed):
            self._make_room(p, 0)
            if not self.done[p]:  # what was sent for room may have needed it too
                self._run(p, self.now + self.jobs.duration[p])


class _Filling:
    """Which reductions are held back until enough of their sort are ready to go as one."""

    def __init__(self, shape: Shape, merging: Merging | None, fill: int) -> None:
        self.queue, self.duration = shape.jobs.queue, shape.jobs.duration
        self.merging = merging if fill else None
        self.enough: dict[int, int] = {}
        """By key what those that are ready must take, without their latencies, for a bucket."""
        self.to_come: dict[int, int] = {}
        """By key how many launches are not ready yet."""
        self.work: dict[int, int] = {}
        """By key what those that are ready take without their latencies."""
        self.ready: list[dict[int, int]] = [{} for _ in shape.jobs.program.queues]
        """By queue and key how many reductions are ready; under -1 those that stay alone."""
        self.is_ready = [False] * shape.size
        if self.merging is not None:
            for job, queue in enumerate(self.queue):
                if queue >= 0 and (key := self.merging.key(job)) >= 0:
                    self.to_come[key] = self.to_come.get(key, 0) + 1
                    self.enough[key] = fill * self.merging.latency(job)

    def add(self, job: int) -> None:
        """A reduction is ready."""
        if self.merging is not None:
            self._count(job, self.merging, 1)
            self.is_ready[job] = True

    def launch(self, job: int) -> None:
        """A collective is launched."""
        if self.merging is not None and self.is_ready[job]:
            self._count(job, self.merging, -1)
        elif self.merging is not None and (key := self.merging.key(job)) >= 0:
            self.to_come[key] -= 1

    def _count(self, job: int, merging: Merging, by: int) -> None:
        key, ready = merging.key(job), self.ready[self.queue[job]]
        ready[key] = ready.get(key, 0) + by
        if key >= 0:
            self.work[key] = self.work.get(key, 0) + by * max(self.duration[job] - merging.latency(job), 0)
            self.to_come[key] -= max(by, 0)

    def is_held(self, job: int) -> bool:
        """Whether a reduction that is ready waits for others."""
        return self.merging is not None and self._holds(self.merging.key(job))

    def holds_all(self, queue: int) -> bool:
        """Whether all that is ready in a queue waits for others."""
        return self.merging is not None and all(self._holds(key) for key, count in self.ready[queue].items() if count)

    def _holds(self, key: int) -> bool:
        return key >= 0 and self.to_come[key] > 0 and self.work[key] < self.enough[key]
