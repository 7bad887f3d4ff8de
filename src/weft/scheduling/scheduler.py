"""List scheduling over explicit resources: the compute stream, one queue per group, and memory.

The choice rule. The stream follows the order of the graph. If the next job would wait for a collective, the scheduler
runs something else in the meantime: a ready job a little later in the order, or a *filler*, a job such as a weight
gradient with little work after it. Fillers are held back for such stalls, but no longer than `hold`: they keep
activations alive.

In this module a *gather* is any launch whose result a job needs, and a *reduction* is one whose result nothing needs
before the end of the step. The names come from FSDP; an all-reduce of tensor parallelism counts as a gather. So does a
copy from host memory, while a copy to host memory counts as a reduction.

A launch is committed to its queue only when the queue would run empty otherwise. Committing late keeps the choice open
until everything that competes for the queue is known. Gathers go in the order of their first use, at most `lookahead`
before it, because they hold memory. A reduction that nothing waits for goes first if all gathers still arrive in time.
Launches that are ready at the same time may be merged. A job that prepares a gather, such as the cast of a shard, runs
right before it.

A wait is placed before the first job that needs it. If waiting frees memory, it is placed earlier, as soon as the
collective should be over, with a safety margin.

Memory: a job that runs ahead of the graph's order must fit into the budget together with the peak of all jobs that it
overtakes.

Times are estimates. Queues that share a link do not slow each other here, and collectives always run as slowly as they
do next to compute. The simulator judges the whole order afterwards.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, Protocol

from weft.scheduling.job_tables import JobTables
from weft.scheduling.jobs import Jobs
from weft.scheduling.memory_budget import NO_LIMIT, MemoryBudget
from weft.simulation.program import MILLION

NEVER = 1 << 62
MARGIN = 8
"""Safety margin: launch early by 1/8 of the time since the stream last synchronised with the queue, since estimates
drift. A wait that only frees memory comes late by twice that."""
GATHERS_SEEN = 8
"""Number of upcoming gathers that must still arrive in time if a reduction goes first."""
GATHERS_JOINED = 32
"""Number of upcoming gathers that are considered for one bucket."""
FURTHER = 2
"""A bucket may reach this many times as far ahead as its first gather. Otherwise each gather would be launched alone,
as soon as its time has come."""
FILLERS_SEEN = 64
"""Number of fillers that are compared to find one that fits a stall."""


@dataclass(frozen=True)
class Knobs:
    """The settings of one run. Times are thousandths of the total compute time."""

    window: int = 40
    """How many jobs ahead of the first unfinished job another one may run."""
    hold: int = 60
    """How long a filler is held back."""
    lookahead: int = 60
    """How long before its first use a gather may be launched."""
    filler: int = 200
    """A job is a filler if the longest path after it is shorter than this many thousandths of all compute left."""
    bucket: int = 0
    """Longest merged collective, in latencies; beyond that, merging saves next to nothing. 0: nothing is merged."""
    fill: int = 0
    """Reductions are held back until a bucket of them would take this many latencies, no other launch can still join
    it, or something waits for one of them. 0: none is held back."""
    patience: int = 0
    """How much later a gather may arrive because it was merged, in thousandths of total compute or communication."""
    keep: bool = False
    """Keep fillers for the end, while memory allows, if they take longer than the communication that they enable."""
    finish: Literal["tail", "work"] = "tail"
    """The order of the fillers that are left at the end. `tail`: the longest path after them first. `work`: first those
    that keep a queue busy for longer than the stream, shortest first."""
    at_once: bool = False
    """Treat late launches, whose results only the end of the step needs, as reductions: launch them as soon as their
    queue is free, not shortly before their use."""
    together: bool = False
    """Merge the late launches that one job needs. Otherwise each is launched alone."""
    budget_bytes: int = NO_LIMIT
    """Memory budget, by `JobMemory`."""
    sends: bool = False
    """When memory is short, launch any collective that frees memory, even if its result is needed only much later."""


class Merging(Protocol):
    """The questions that the scheduler asks about buckets."""

    def key(self, launch: int) -> int:
        """Launches with the same key may merge; -1: this launch stays alone."""
        ...

    def latency(self, launch: int) -> int:
        """The latency of a launch: its time without any bytes."""
        ...

    def duration(self, launches: Sequence[int]) -> int:
        """The time of these launches as one; NEVER if they may not merge."""
        ...


Unit = tuple[int, ...]
"""One entry of a schedule: `job` runs or is launched, `~job` is waited for; several jobs are one merged launch."""


@dataclass(frozen=True)
class Schedule:
    """The result of one run."""

    units: tuple[Unit, ...]
    in_use_bytes: int = field(default=0, compare=False)
    """Peak memory, by `JobMemory`."""

    @property
    def events(self) -> list[int]:
        """`job` runs or is launched, `~job` is waited for."""
        return [event for unit in self.units for event in unit]

    @property
    def buckets(self) -> list[Unit]:
        return [unit for unit in self.units if len(unit) > 1]


def schedule(tables: JobTables, knobs: Knobs, merging: Merging | None = None) -> Schedule:
    """Run the scheduler once."""
    return _Scheduling(tables, knobs, merging).run()


class _Scheduling:
    """One run of the scheduler: a partial schedule, and the rule that extends it."""

    def __init__(self, tables: JobTables, knobs: Knobs, merging: Merging | None) -> None:
        jobs: Jobs = tables.jobs
        self.tables, self.jobs, self.knobs = tables, jobs, knobs
        self.merging = merging if knobs.bucket else None
        self.units: list[Unit] = []
        self.now = self.front = 0
        self.hold = knobs.hold * tables.total // 1000
        self.patience = knobs.patience * tables.span // 1000
        self.lookahead = knobs.lookahead * tables.span // 1000
        self.done = [False] * tables.size
        self.waited = [False] * tables.size
        self.end = [0] * tables.size
        """Estimated end of each launched collective."""
        self.is_filler, self.first_use = tables.fillers(knobs.filler)
        if knobs.at_once:
            uses = zip(self.first_use, tables.is_late, strict=True)
            self.first_use = [tables.size if is_late else use for use, is_late in uses]
        self.missing = list(tables.num_needs)
        """Number of unfinished jobs that each job still needs."""
        num_queues = len(jobs.program.queues)
        self.is_copies = [queue.is_copies for queue in jobs.program.queues]
        self.busy = [0] * num_queues
        self.shares = jobs.program.sm_share_ppm
        self.share = [0] * num_queues
        """By queue: the share of the multiprocessors that its last copy takes, in millionths."""
        self.known = [0] * num_queues
        """By queue: the end of the last collective that a job waited for. Estimates are exact up to there."""
        self.gathers: list[list[tuple[int, int]]] = [[] for _ in range(num_queues)]
        """By queue: ready launches with a consumer, ordered by first use."""
        self.others: list[list[int]] = [[] for _ in range(num_queues)]
        """By queue: ready launches without a consumer, in the order in which they became ready."""
        self.held_back = _HeldReductions(tables, self.merging, knobs.fill)
        self.flying: list[int] = []
        """Launches in flight whose wait frees memory, in launch order."""
        self.landing: list[list[tuple[int, int]]] = [[] for _ in range(num_queues)]
        """By queue: the same as a heap by expected end; launches that were waited for since are skipped."""
        self.ready: list[int] = []
        self.fillers: list[int] = []
        self.arrived: list[int] = []
        """All fillers that ever became ready, in that order."""
        self.next_prepared = 0
        self.budget = MemoryBudget(tables, knobs.budget_bytes)
        self.made_bytes = tables.memory.made_bytes
        self.seen = 0
        """Number of entries of `arrived` that are already in one of the two heaps below."""
        self.closed: list[tuple[int, int]] = []
        """Fillers that still wait for a collective, by its end."""
        self.open: list[tuple[tuple[int, int], int]] = []
        """Fillers that can run, by rank."""
        for job in range(tables.size):
            if not self.missing[job] and not tables.prepares[job]:
                self._arrive(job)

    def run(self) -> Schedule:
        size, skipped = self.tables.size, list(map(self._is_aside, range(self.tables.size)))
        while True:
            while self.front < size and (skipped[self.front] or self.done[self.front]):
                self.front += 1
            if self.front == size:
                break
            self._advance()
        while self._drain():
            pass
        for launch in sorted((job for job in range(size) if self._is_open(job)), key=lambda job: (self.end[job], job)):
            self.wait(launch)
        return Schedule(tuple(self.units), self.budget.most_in_use)

    def _drain(self) -> bool:
        """Run or launch one of the remaining jobs once all ordinary jobs are done; returns whether there was one."""
        if self.fillers:
            self.compute(self._last_filler())
            return True
        self.commit(NEVER)
        if not self.fillers:
            if self.flying and any(self.others):  # memory is full until something has been waited for
                self.now = max(self.now, self.end[self.flying[0]])
                self.wait(self.flying[0])
                return True
            ready = [*(job for gathers in self.gathers for _, job in gathers), *(j for o in self.others for j in o)]
            if not ready:
                return False
            self.do(min(ready, key=lambda job: (self.when(job), job)))
        return True

    def _is_aside(self, job: int) -> bool:
        return self.tables.is_launch[job] or self.tables.prepares[job] or self.is_filler[job]

    def _is_open(self, job: int) -> bool:
        return self.tables.is_launch[job] and not self.waited[job]

    # Choosing.

    def _advance(self) -> None:
        """Run the first unfinished job, or another one while that job would wait."""
        if (old := self._overdue()) is not None:
            self.compute(old)
            return
        job = self.front
        self.unlock(job)
        if self.done[job]:
            return
        stall = self.when(job) - self.now
        if stall > 0:
            self.commit(self.now + 1)
            other = self._meanwhile(stall)
            if other is not None:
                self.compute(other)
                return
        self.compute(job)

    def _overdue(self) -> int | None:
        """The first filler that was held for too long, or any filler while memory is short."""
        tables, front = self.tables, self.front
        has_room = self.fits(front, 0)
        for job in self.fillers[:FILLERS_SEEN]:
            if has_room and tables.elapsed[front] - tables.elapsed[job] <= self.hold:
                return None
            is_kept = has_room and self.knobs.keep and tables.tail[job] < self.jobs.duration[job]
            if not is_kept and self.is_sure(job) and (self.may_run(job) if has_room else self.budget.is_freed_by(job)):
                return job
        return None

    def _meanwhile(self, stall: int) -> int | None:
        """A job to run during a stall: one that fits into it, or else the one that overruns least."""
        jobs = self.jobs
        best: int | None = None
        limit = self.front + self.knobs.window
        for job in self.ready:
            if job > limit:
                break
            if job != self.front and self.when(job) <= self.now and self.fits(job, self.made_bytes[job]):
                if jobs.duration[job] <= stall:
                    return job
                best = job if best is None else best
        fitting: int | None = None
        for job in self.fillers[:FILLERS_SEEN]:
            if not self.is_sure(job) or not self.may_run(job):
                continue
            if fitting is None or _is_better(jobs, job, fitting, stall):
                fitting = job
        if fitting is not None and (best is None or jobs.duration[fitting] <= max(stall, jobs.duration[best])):
            return fitting
        if best is None and (prepared := self._prepared()) is not None and jobs.duration[prepared] <= stall:
            return prepared
        return best

    def _prepared(self) -> int | None:
        """The next job that prepares a launch, if its result fits into memory."""
        order = self.tables.order_of_use
        while self.next_prepared < len(order) and self.done[order[self.next_prepared]]:
            self.next_prepared += 1
        if self.next_prepared == len(order):
            return None
        job = order[self.next_prepared]
        use = min(self.first_use[s] for s in self.jobs.succs[job])
        return job if self.fits(use, self.made_bytes[job]) else None

    def _last_filler(self) -> int:
        """The next filler once nothing else is left."""
        while self.seen < len(self.arrived):
            job = self.arrived[self.seen]
            self.seen += 1
            heappush(self.closed, (self.when(job), job))
        while self.closed and self.closed[0][0] <= self.now:
            job = heappop(self.closed)[1]
            heappush(self.open, (self._rank(job), job))
        while self.open and self.done[self.open[0][1]]:
            heappop(self.open)
        while not self.open and self.done[self.closed[0][1]]:
            heappop(self.closed)
        return (self.open or self.closed)[0][1]

    def _rank(self, job: int) -> tuple[int, int]:
        """Sort key of the remaining fillers."""
        tail, duration = self.tables.tail[job], self.jobs.duration[job]
        if self.knobs.finish == "tail":
            return (0, -tail)
        return (0, duration) if tail >= duration else (1, -tail)

    # Resources.

    def when(self, job: int) -> int:
        """When all collectives that a job needs have ended."""
        launches, end = self.jobs.comm_preds[job], self.end
        return max([end[launch] for launch in launches]) if launches else 0

    def fits(self, until: int, num_bytes: int) -> bool:
        """Whether `num_bytes` more fit from now until job `until`."""
        return self.budget.fits(self.front, until, num_bytes)

    def may_run(self, job: int) -> bool:
        """Whether a job fits into memory now."""
        return self.budget.may_run(self.front, job)

    # Running.

    def _arrive(self, job: int) -> None:
        if self.tables.is_launch[job]:
            queue, use = self.jobs.queue[job], self.first_use[job]
            if use < self.tables.size:
                insort(self.gathers[queue], (use, job))
            else:
                self.others[queue].append(job)
                self.held_back.add(job)
        elif self.is_filler[job]:
            insort(self.fillers, job)
            self.arrived.append(job)
        else:
            insort(self.ready, job)

    def _issue(self, job: int) -> None:
        self.done[job] = True
        if not self.tables.is_launch[job]:
            self.units.append((job,))
        self.budget.take(job)
        missing, tables = self.missing, self.tables
        succs: Sequence[int] = self.jobs.succs[job]
        if tables.prepares[job]:  # the launch that it prepares was never waiting for it
            succs = [succ for succ in succs if not tables.is_launch[succ] and not tables.prepares[succ]]
        for succ in succs:
            missing[succ] -= 1
            if not missing[succ]:
                self._arrive(succ)

    def do(self, job: int) -> None:
        """Run or launch a ready job, whichever list it is in."""
        if not self.tables.is_launch[job]:
            self.compute(job)
            return
        queue, size = self.jobs.queue[job], self.tables.size
        bucket, is_late = [job], self.tables.is_late
        if self.knobs.together and is_late[job]:
            self.now = max(self.now, self.when(job))
            late = [gather for _, gather in self.gathers[queue] if is_late[gather]]
            bucket = self._joined(job, [*self.others[queue], *late], lambda _: True)
        elif self.knobs.fill and self.first_use[job] == size:
            bucket = self._joined(job, self.others[queue], lambda _: True)
        for other in bucket:
            if self.first_use[other] < size:
                self.gathers[queue].remove((self.first_use[other], other))
            else:
                self.others[queue].remove(other)
        self._launch(bucket)

    def unlock(self, job: int) -> None:
        """Run everything that a job needs and that was put off."""
        if not self.missing[job]:
            return
        needed: set[int] = set()
        stack = [job]
        while stack:
            top = stack.pop()
            for p in (*self.jobs.preds[top], *self.jobs.comm_preds[top]):
                is_done_with = self.tables.prepares[p] and self.tables.is_launch[top]
                if not self.done[p] and p not in needed and not is_done_with:
                    needed.add(p)
                    stack.append(p)
        left = sorted(needed)
        while left and self.knobs.together:
            left = self._put_off_launches(left)
        for p in left:
            if not self.done[p]:
                self.do(p)

    def _put_off_launches(self, needed: list[int]) -> list[int]:
        """Run the jobs that need no late launch, then launch what is ready; returns the jobs that need it."""
        launches: list[int] = []
        left: list[int] = []
        for p in needed:
            if self.done[p]:
                continue
            if self.missing[p]:
                left.append(p)
            elif self.tables.is_late[p]:
                launches.append(p)
            else:
                self.do(p)
        for p in launches:
            if not self.done[p]:
                self.do(p)
        return left

    def compute(self, job: int) -> None:
        duration = self.jobs.duration[job]
        if not self.tables.prepares[job]:
            among = self.fillers if self.is_filler[job] else self.ready
            del among[bisect_left(among, job)]
        if (when := self.when(job)) > self.now:
            self.commit(when)
            self.now = when
        self.budget.reserved = 0 if job == self.front else self.budget.passing_bytes(job)
        self.commit(self.now + duration, is_early=True)
        self.budget.reserved = 0
        if self.done[job]:  # the commit launched the collective that this job prepares, and ran the job for it
            return
        for launch in self.jobs.comm_preds[job]:
            self.wait(launch)
        self._make_room(job, NEVER)
        if not self.done[job]:  # a launch in the meantime may have needed it and run it
            self._run(job, self._after(duration))

    def _make_room(self, job: int, until: int) -> None:
        """Wait for collectives that free memory, oldest first, until a job fits; keep the queues busy meanwhile.

        If nothing is in flight, send reductions that wait for their queue. Otherwise run earlier fillers:
        they may free memory too.
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
        """The first ready reduction that would free memory."""
        frees = self.tables.memory.frees
        found = next((o for others in self.others for o in others if frees[o] and self.when(o) <= self.now), None)
        if found is not None or not self.knobs.sends:
            return found
        return next((g for gathers in self.gathers for _, g in gathers if frees[g] and self.when(g) <= self.now), None)

    def _run(self, job: int, end: int) -> None:
        """Finish a job: release what it held, and wait for collectives that are over if that frees memory."""
        self._issue(job)
        self.now = end
        self.budget.release(job)
        over: list[int] = []
        for queue, landing in enumerate(self.landing):
            while landing and landing[0][0] + self._unsure(queue) <= end:
                over.append(heappop(landing)[1])
        if over:
            for launch in sorted(over, key=lambda launch: (self.end[launch], launch)):
                self.wait(launch, is_known=False)

    def is_sure(self, job: int) -> bool:
        """Whether everything that a job needs has ended, even if the estimates are too short."""
        return all(self.waited[launch] or self._is_over(launch) for launch in self.jobs.comm_preds[job])

    def _is_over(self, launch: int) -> bool:
        """Whether a collective has ended, even if the estimates are too short."""
        return self._should_end(launch) + self._unsure(self.jobs.queue[launch]) <= self.now

    def _should_end(self, launch: int) -> int:
        return self.end[launch] + self.jobs.duration[launch] // 4

    def _unsure(self, queue: int) -> int:
        return 2 * (self.now - self.known[queue]) // MARGIN

    def _after(self, duration: int) -> int:
        slowdown = self.jobs.program.slowdown_ppm
        beside = max([0 if c else b for b, c in zip(self.busy, self.is_copies, strict=True)], default=0) - self.now
        beside = beside if slowdown else 0
        if beside <= 0:
            return self.now + (self._beside_copies(duration) if self.shares else duration)
        longer = duration * (MILLION + slowdown) // MILLION
        return self.now + (longer if longer <= beside else duration + beside * slowdown // (MILLION + slowdown))

    def _beside_copies(self, duration: int) -> int:
        """How long compute takes beside the copies that slow it most."""
        longest = duration
        for busy, share in zip(self.busy, self.share, strict=True):
            beside, longer = busy - self.now, duration * MILLION // (MILLION - share)
            if beside > 0:
                longest = max(longest, longer if longer <= beside else duration + beside * share // MILLION)
        return longest

    def wait(self, launch: int, is_known: bool = True) -> None:
        """Wait for a launch. `is_known=False`: because it should be over by now, so its end stays an estimate."""
        if not self.waited[launch]:
            self.waited[launch] = True
            queue = self.jobs.queue[launch]
            if is_known:
                self.known[queue] = max(self.known[queue], self.end[launch])
            self.units.append((~launch,))
            self.budget.release(launch)
            if self.tables.memory.frees[launch]:
                self.flying.remove(launch)

    # Launching.

    def commit(self, until: int, is_early: bool = False) -> None:
        """Keep every queue busy until a time, plus the safety margin if `is_early`, while launches are ready."""
        for queue, busy in enumerate(self.busy):
            if not self.gathers[queue] and not self.others[queue]:
                continue
            end = until + (self.now - self.known[queue]) // MARGIN if is_early else until
            while busy < end and (chosen := self._choose(queue)):
                self._launch(chosen)
                busy = self.busy[queue]

    def _choose(self, queue: int) -> list[int]:
        """Take the next launch of a queue, or several that merge."""
        gathers, others = self.gathers[queue], self.others[queue]
        if not gathers and (not others or self.held_back.holds_all(queue)):
            return []
        first = next((g for g in gathers[:GATHERS_SEEN] if self.when(g[1]) <= self.now), None)
        is_held = self.held_back.is_held
        other = next((job for job in others if self.when(job) <= self.now and not is_held(job)), None)
        if other is not None and self.busy[queue] > self.now and not self.fits(self.front, self.made_bytes[other]):
            other = None  # until its wait it holds more than it frees, and the queue is busy anyway
        is_late = first is not None and other is not None and self._is_late([other])
        is_late = is_late and first is not None and self._has_room_for(first[1])
        if other is not None and not is_late:
            chosen = self._joined(other, others, lambda bucket: first is None or not self._is_late(bucket))
            for job in chosen:
                others.remove(job)
            return chosen
        if first is not None and not is_late and self._is_early(first[0]):
            return []  # so are all gathers after it
        if first is not None and not is_late and not self._has_room_for(first[1]):
            # a smaller gather after it may go
            first = next((g for g in gathers[:GATHERS_SEEN] if self.when(g[1]) <= self.now and self._may_go(*g)), None)
        if first is None:
            return []
        due = first[0]
        if self.merging is None:
            gathers.remove(first)
            return [first[1]]
        known = (job for use, job in gathers[:GATHERS_JOINED] if self._may_go(use, job, FURTHER))
        chosen = self._joined(first[1], known, lambda bucket: self._may_be_one(bucket, due))
        for job in chosen:
            gathers.remove((self.first_use[job], job))
        return chosen

    def _may_go(self, use: int, job: int, further: int = 1) -> bool:
        """Whether the time for a gather has come, and it fits into memory."""
        return not self._is_early(use, further) and self._has_room_for(job)

    def _is_early(self, use: int, further: int = 1) -> bool:
        """Whether the time for a gather has not come yet."""
        elapsed = self.tables.elapsed
        return elapsed[use] - elapsed[self.front] > self.lookahead * further

    def _has_room_for(self, gather: int) -> bool:
        """Whether a gather fits until the graph's order would have launched it."""
        return self.budget.fits(self.front, gather - 1, self.made_bytes[gather])

    def _has_room(self, gathers: list[int]) -> bool:
        """Whether gathers fit together until the graph's order would have launched them all."""
        return self.fits(max(gathers) - 1, sum([self.made_bytes[job] for job in gathers]))

    def _joined(self, first: int, others: Iterable[int], may: Callable[[list[int]], bool]) -> list[int]:
        """A launch together with the ready launches that may merge with it."""
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
        """Time on the wire, assuming that compute runs next to it all the time."""
        merging = None if len(bucket) == 1 else self.merging
        alone = self.jobs.duration[bucket[0]] if merging is None else merging.duration(bucket)
        if self.is_copies[self.jobs.queue[bucket[0]]]:
            return alone
        return alone * (MILLION + self.jobs.program.collective_slowdown_ppm) // MILLION

    def _may_be_one(self, bucket: list[int], use: int) -> bool:
        """Whether merged gathers arrive in time for a use, and fit into memory."""
        elapsed, queue = self.tables.elapsed, self.jobs.queue[bucket[0]]
        end = max(self.now, self.busy[queue]) + self._duration(bucket)
        in_time = self.now + elapsed[use] - elapsed[self.front] + self.patience
        return end <= in_time and self._has_room(bucket)

    def _is_late(self, bucket: list[int]) -> bool:
        """Whether a gather would arrive too late if these reductions went first."""
        elapsed, queue = self.tables.elapsed, self.jobs.queue[bucket[0]]
        here = elapsed[self.front]
        end = max(self.now, self.busy[queue]) + self._duration(bucket)
        for use, gather in self.gathers[queue][:GATHERS_SEEN]:
            end += self._duration([gather])
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
        if self.shares:
            self.share[queue] = self.shares[self.jobs.ops[bucket[0]][0]]
        for job in bucket:
            self.end[job] = end
            self.held_back.launch(job)
            self._issue(job)
            if self.tables.memory.frees[job]:
                self.flying.append(job)
                heappush(self.landing[queue], (self._should_end(job), job))
        self.units.append(tuple(bucket))

    def _prepare(self, job: int) -> None:
        """Run the jobs that prepare a launch."""
        needed: dict[int, None] = {}
        stack = [job]
        while stack:
            for p in self.jobs.preds[stack.pop()]:
                if not self.done[p] and p not in needed:
                    needed[p] = None
                    stack.append(p)
        for p in sorted(needed):
            self._make_room(p, 0)
            if not self.done[p]:  # a reduction that was sent to make room may have needed it too
                self._run(p, self.now + self.jobs.duration[p])


class _HeldReductions:
    """Reductions that are held back until enough of them are ready to be merged."""

    def __init__(self, tables: JobTables, merging: Merging | None, fill: int) -> None:
        self.queue, self.duration = tables.jobs.queue, tables.jobs.duration
        self.merging = merging if fill else None
        self.enough: dict[int, int] = {}
        """By key: how long the ready ones must take, without latencies, to fill a bucket."""
        self.to_come: dict[int, int] = {}
        """By key: number of launches that are not ready yet."""
        self.work: dict[int, int] = {}
        """By key: how long the ready ones take, without latencies."""
        self.ready: list[dict[int, int]] = [{} for _ in tables.jobs.program.queues]
        """By queue and key: number of ready reductions; under -1 those that never merge."""
        self.is_ready = [False] * tables.size
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
        """Whether a ready reduction waits for others to merge with."""
        return self.merging is not None and self._holds(self.merging.key(job))

    def holds_all(self, queue: int) -> bool:
        """Whether every ready reduction of a queue waits for others."""
        return self.merging is not None and all(self._holds(key) for key, count in self.ready[queue].items() if count)

    def _holds(self, key: int) -> bool:
        return key >= 0 and self.to_come[key] > 0 and self.work[key] < self.enough[key]


def _is_better(jobs: Jobs, job: int, known: int, stall: int) -> bool:
    """Whether a filler fits a stall better than a known one: the longest that fits, else the shortest."""
    ns, other = jobs.duration[job], jobs.duration[known]
    if ns <= stall:
        return other > stall or ns > other
    return stall < ns < other
