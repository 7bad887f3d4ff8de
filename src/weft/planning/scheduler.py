"""List scheduling over explicit resources: the compute stream, one queue per group, and memory.

The stream follows the order of the graph. Where the next job would stand still for a collective, others run in between:
jobs a little behind it that are ready, and *fillers*, jobs such as weight gradients that no long path leads on from.
Fillers are held back for that, but no longer than `hold`, since they keep activations alive.

A launch is committed to its queue only when the queue would run empty otherwise: until then the choice stays open.
Gathers go by the time of their first use, no earlier than `lookahead` before it; a reduction that nothing waits for
goes first if all gathers still come in time. What prepares a gather, such as the cast of a shard, runs right before it.

A wait stands before the first job that needs it; where waiting frees memory, behind the first job that ends after the
collective does, with some slack.

Memory: what runs ahead of the order of the graph must fit under the budget on top of all that lies between.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from weft.planning.jobs import Jobs
from weft.planning.shape import Shape

MILLION = 1_000_000
NEVER = 1 << 62
GATHERS_SEEN = 8
"""How many gathers are looked at to see whether they still come in time."""
FILLERS_SEEN = 64
"""How many fillers are looked at for one that fits a stall."""


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
    """How long a collective of several may take; 0: none is merged. Of all compute or all communication, whichever is
    more."""
    patience: int = 0
    """By how much a gather may come later because it was merged, likewise."""
    keep: bool = False
    """Whether fillers that take longer than what they bring to the queues are kept for the end while there is room."""
    finish: Literal["tail", "work"] = "tail"
    """In which order the fillers go that are left at the end: the longest path behind first, or what keeps a queue busy
    for longer than the stream, the shortest first, before all others."""
    budget_bytes: int = NEVER
    """What may be in use, by the memory of the shape."""


class Merging(Protocol):
    """What the scheduler asks about buckets."""

    def key(self, launch: int) -> int:
        """Launches of one key may be one; -1: this one stays alone."""
        ...

    def duration(self, launches: Sequence[int]) -> int:
        """What launches take as one."""
        ...


@dataclass(frozen=True)
class Schedule:
    """The outcome of one run."""

    events: list[int]
    """`job` is run or launched, `~job` is waited for."""
    buckets: list[tuple[int, ...]]
    """Launches that stand side by side and are one."""


def schedule(shape: Shape, knobs: Knobs, merging: Merging | None = None) -> Schedule:
    """Run the scheduler once."""
    return _Run(shape, knobs, merging).run()


class _Run:
    def __init__(self, shape: Shape, knobs: Knobs, merging: Merging | None) -> None:
        jobs: Jobs = shape.jobs
        self.shape, self.jobs, self.knobs = shape, jobs, knobs
        self.merging = merging if knobs.bucket else None
        self.events: list[int] = []
        self.buckets: list[tuple[int, ...]] = []
        self.now = self.front = 0
        self.hold = knobs.hold * shape.total // 1000
        self.longest = knobs.bucket * shape.span // 1000
        self.patience = knobs.patience * shape.span // 1000
        self.lookahead = knobs.lookahead * shape.total // 1000
        self.done = [False] * shape.size
        self.waited = [False] * shape.size
        self.end = [0] * shape.size
        """Of collectives that were launched."""
        prepares = shape.prepares
        self.is_filler, self.first_use = shape.fillers(knobs.filler)
        needs = zip(jobs.preds, jobs.comm_preds, strict=True)
        self.missing = [sum(not prepares[p] for p in {*preds, *comm}) for preds, comm in needs]
        """How many each job still needs, but for what prepares launches: that is done with them."""
        num_queues = len(jobs.program.queues)
        self.busy = [0] * num_queues
        self.gathers: list[list[tuple[int, int]]] = [[] for _ in range(num_queues)]
        """By queue the launches that are ready and that a job needs, by first use."""
        self.others: list[list[int]] = [[] for _ in range(num_queues)]
        """By queue the launches that are ready and that nothing needs, as they came."""
        self.flying: list[int] = []
        """Launches to be waited for once they have ended."""
        self.ready: list[int] = []
        self.fillers: list[int] = []
        self.next_prepared = 0
        self.in_use = 0
        self.left = list(shape.memory.holders)
        for job in range(shape.size):
            if not self.missing[job] and not prepares[job]:
                self._arrive(job)

    def run(self) -> Schedule:
        size, skipped = self.shape.size, list(map(self._is_aside, range(self.shape.size)))
        while True:
            while self.front < size and (skipped[self.front] or self.done[self.front]):
                self.front += 1
            if self.front == size:
                break
            self._advance()
        while self._drain():
            pass
        for launch in sorted((job for job in range(size) if self._is_open(job)), key=lambda job: (self.end[job], job)):
            self._wait(launch)
        return Schedule(self.events, self.buckets)

    def _drain(self) -> bool:
        """Do one thing of what is left where nothing of importance is; returns whether there was one."""
        if self.fillers:
            self._compute(self._last_filler())
            return True
        self._commit(NEVER)
        if not self.fillers:
            ready = [*(job for gathers in self.gathers for _, job in gathers), *(j for o in self.others for j in o)]
            if not ready:
                return False
            self._do(min(ready, key=lambda job: (self._when(job), job)))
        return True

    def _is_aside(self, job: int) -> bool:
        return self.shape.is_launch[job] or self.shape.prepares[job] or self.is_filler[job]

    def _is_open(self, job: int) -> bool:
        return self.shape.is_launch[job] and not self.waited[job]

    # Choosing.

    def _advance(self) -> None:
        """Run the next job: the first that is left, or another while that one would stand still."""
        if (old := self._overdue()) is not None:
            self._compute(old)
            return
        job = self.front
        self._unlock(job)
        if self.done[job]:
            return
        stall = self._when(job) - self.now
        if stall > 0:
            self._commit(self.now + 1)
            other = self._meanwhile(stall)
            if other is not None:
                self._compute(other)
                return
        self._compute(job)

    def _overdue(self) -> int | None:
        """The first filler that was held for too long, or any while memory is short."""
        shape, front = self.shape, self.front
        has_room = self._fits(front, 0)
        for job in self.fillers[:FILLERS_SEEN]:
            if has_room and shape.elapsed[front] - shape.elapsed[job] <= self.hold:
                return None
            is_kept = has_room and self.knobs.keep and shape.tail[job] < self.jobs.duration[job]
            if not is_kept and self._when(job) <= self.now:
                return job
        return None

    def _meanwhile(self, stall: int) -> int | None:
        """What runs while the next job would stand still: what fits, or else the least that does not."""
        jobs = self.jobs
        best: int | None = None
        limit = self.front + self.knobs.window
        for job in self.ready:
            if job > limit:
                break
            if job != self.front and self._when(job) <= self.now and self._fits(job, self._bytes(job)):
                if jobs.duration[job] <= stall:
                    return job
                best = job if best is None else best
        fitting: int | None = None
        for job in self.fillers[:FILLERS_SEEN]:
            if self._when(job) <= self.now and (fitting is None or _is_better(jobs, job, fitting, stall)):
                fitting = job
        if fitting is not None and (best is None or jobs.duration[fitting] <= max(stall, jobs.duration[best])):
            return fitting
        if best is None and (job := self._prepared()) is not None and jobs.duration[job] <= stall:
            return job
        return best

    def _prepared(self) -> int | None:
        """The next job that prepares a launch, if its result fits."""
        order = self.shape.order_of_use
        while self.next_prepared < len(order) and self.done[order[self.next_prepared]]:
            self.next_prepared += 1
        if self.next_prepared == len(order):
            return None
        job = order[self.next_prepared]
        use = min(self.first_use[s] for s in self.jobs.succs[job])
        return job if self._fits(use, self._bytes(job)) else None

    def _last_filler(self) -> int:
        """The next one where nothing else is left."""
        open_ = [job for job in self.fillers if self._when(job) <= self.now]
        if not open_:
            return min(self.fillers, key=lambda job: (self._when(job), job))
        tail, duration = self.shape.tail, self.jobs.duration
        if self.knobs.finish == "tail":
            return max(open_, key=lambda job: (tail[job], -job))
        return min(
            open_,
            key=lambda job: (0, duration[job], job) if tail[job] >= duration[job] else (1, -tail[job], job),
        )

    def _when(self, job: int) -> int:
        """When the collectives that a job needs have ended."""
        end = self.end
        return max([end[launch] for launch in self.jobs.comm_preds[job]], default=0)

    # Memory.

    def _bytes(self, job: int) -> int:
        memory = self.shape.memory
        return sum([memory.size[storage] for storage in memory.made[job]])

    def _fits(self, until: int, num_bytes: int) -> bool:
        """Whether bytes more may be held from now until a job."""
        shape, budget = self.shape, self.knobs.budget_bytes
        if budget == NEVER:
            return True
        ahead = self.in_use - int(shape.memory.curve[self.front])
        last = max(self.front, min(until, shape.size - 1))
        return shape.peaks.of(self.front, last) + ahead + num_bytes <= budget

    def _release(self, job: int) -> None:
        memory, left = self.shape.memory, self.left
        for storage in memory.held[job]:
            left[storage] -= 1
            if left[storage] == 0:
                self.in_use -= memory.size[storage]

    # Doing.

    def _arrive(self, job: int) -> None:
        if self.shape.is_launch[job]:
            queue, use = self.jobs.queue[job], self.first_use[job]
            if use < self.shape.size:
                insort(self.gathers[queue], (use, job))
            else:
                self.others[queue].append(job)
        else:
            insort(self.fillers if self.is_filler[job] else self.ready, job)

    def _issue(self, job: int) -> None:
        self.done[job] = True
        self.events.append(job)
        self.in_use += self._bytes(job)
        if self.shape.prepares[job]:
            return
        missing = self.missing
        for succ in self.jobs.succs[job]:
            missing[succ] -= 1
            if not missing[succ]:
                self._arrive(succ)

    def _do(self, job: int) -> None:
        """Run or launch a job wherever it stands."""
        if not self.shape.is_launch[job]:
            self._compute(job)
            return
        queue = self.jobs.queue[job]
        if self.first_use[job] < self.shape.size:
            self.gathers[queue].remove((self.first_use[job], job))
        else:
            self.others[queue].remove(job)
        self._launch([job])

    def _unlock(self, job: int) -> None:
        """Do all that a job needs and that was put off."""
        if not self.missing[job]:
            return
        needed: set[int] = set()
        stack = [job]
        while stack:
            top = stack.pop()
            for p in (*self.jobs.preds[top], *self.jobs.comm_preds[top]):
                if not self.done[p] and p not in needed and not self.shape.prepares[p]:
                    needed.add(p)
                    stack.append(p)
        for p in sorted(needed):
            if not self.done[p]:
                self._do(p)

    def _compute(self, job: int) -> None:
        duration = self.jobs.duration[job]
        if not self.shape.prepares[job]:
            (self.fillers if self.is_filler[job] else self.ready).remove(job)
        if (when := self._when(job)) > self.now:
            self._commit(when)
            self.now = when
        self._commit(self.now + duration)
        for launch in self.jobs.comm_preds[job]:
            self._wait(launch)
        self._issue(job)
        self.now = self._after(duration)
        self._release(job)
        if self.flying:
            for launch in [launch for launch in self.flying if self._is_over(launch)]:
                self._wait(launch)

    def _is_over(self, launch: int) -> bool:
        return self.end[launch] + self.jobs.duration[launch] // 4 <= self.now

    def _after(self, duration: int) -> int:
        slowdown = self.jobs.program.slowdown_ppm
        beside = max(self.busy, default=0) - self.now if slowdown else 0
        if beside <= 0:
            return self.now + duration
        longer = duration * (MILLION + slowdown) // MILLION
        return self.now + (longer if longer <= beside else duration + beside * slowdown // (MILLION + slowdown))

    def _wait(self, launch: int) -> None:
        if not self.waited[launch]:
            self.waited[launch] = True
            self.events.append(~launch)
            self._release(launch)
            if self.shape.memory.frees[launch]:
                self.flying.remove(launch)

    # Launching.

    def _commit(self, until: int) -> None:
        """Keep every queue busy until then, as far as there is something to launch."""
        for queue, busy in enumerate(self.busy):
            while busy < until and (chosen := self._choose(queue)):
                self._launch(chosen)
                busy = self.busy[queue]

    def _choose(self, queue: int) -> list[int]:
        """Take the next launch of a queue, or several that are one."""
        gathers, others = self.gathers[queue], self.others[queue]
        first = next((g for g in gathers[:GATHERS_SEEN] if self._when(g[1]) <= self.now), None)
        if first is not None and not self._may_go(*first):
            first = None
        other = next((job for job in others if self._when(job) <= self.now), None)
        if other is not None and (first is None or not self._is_late([other])):
            chosen = self._joined(other, others, lambda bucket: first is None or not self._is_late(bucket))
            for job in chosen:
                others.remove(job)
            return chosen
        if first is None:
            return []
        use = first[0]
        known = [job for _, job in gathers[:GATHERS_SEEN] if self._may_go(self.first_use[job], job)]
        chosen = self._joined(first[1], known, lambda bucket: self._comes_in_time(bucket, use))
        for job in chosen:
            gathers.remove((self.first_use[job], job))
        return chosen

    def _may_go(self, use: int, job: int) -> bool:
        """Whether it is time for a gather, and there is room for it."""
        elapsed, front = self.shape.elapsed, self.front
        if elapsed[use] - elapsed[front] > self.lookahead:
            return False
        return use <= front or self._fits(use, self._bytes(job))

    def _joined(self, first: int, others: list[int], may: Callable[[list[int]], bool]) -> list[int]:
        """A launch with those that are ready too and may be one with it."""
        bucket, merging = [first], self.merging
        if merging is None or (key := merging.key(first)) < 0:
            return bucket
        for job in others:
            if job != first and merging.key(job) == key and self._when(job) <= self.now:
                more = [*bucket, job]
                if merging.duration(more) > self.longest or not may(more):
                    break
                bucket = more
        return bucket

    def _duration(self, bucket: list[int]) -> int:
        if len(bucket) == 1 or self.merging is None:
            return self.jobs.duration[bucket[0]]
        return self.merging.duration(bucket)

    def _comes_in_time(self, bucket: list[int], use: int) -> bool:
        elapsed, queue = self.shape.elapsed, self.jobs.queue[bucket[0]]
        end = max(self.now, self.busy[queue]) + self._duration(bucket)
        return end <= self.now + elapsed[use] - elapsed[self.front] + self.patience

    def _is_late(self, bucket: list[int]) -> bool:
        """Whether a gather would come too late if reductions went before it."""
        duration, elapsed, queue = self.jobs.duration, self.shape.elapsed, self.jobs.queue[bucket[0]]
        here = elapsed[self.front]
        end = max(self.now, self.busy[queue]) + self._duration(bucket)
        for use, gather in self.gathers[queue][:GATHERS_SEEN]:
            end += duration[gather]
            if end > self.now + elapsed[use] - here:
                return True
        return False

    def _launch(self, bucket: list[int]) -> None:
        for job in bucket:
            if any(not self.done[p] for p in self.jobs.preds[job]):
                self._prepare(job)
            for launch in self.jobs.comm_preds[job]:
                self._wait(launch)
                self.now = max(self.now, self.end[launch])
        queue = self.jobs.queue[bucket[0]]
        self.busy[queue] = end = max(self.now, self.busy[queue]) + self._duration(bucket)
        for job in bucket:
            self.end[job] = end
            self._issue(job)
            if self.shape.memory.frees[job]:
                self.flying.append(job)
        if len(bucket) > 1:
            self.buckets.append(tuple(bucket))

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
            self._issue(p)
            self.now += self.jobs.duration[p]
            self._release(p)


def _is_better(jobs: Jobs, job: int, known: int, stall: int) -> bool:
    """Whether a filler fits a stall better: the longest of those that fit, else the shortest."""
    ns, other = jobs.duration[job], jobs.duration[known]
    if ns <= stall:
        return other > stall or ns > other
    return stall < ns < other
