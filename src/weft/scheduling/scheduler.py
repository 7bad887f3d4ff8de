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

from dataclasses import dataclass, field
from heapq import heappop, heappush

from weft.scheduling.execution import NEVER, Execution, Knobs, Merging, Unit
from weft.scheduling.jobs import Jobs
from weft.scheduling.shape import Shape

FILLERS_SEEN = 64
"""How many fillers are looked at for one that fits a stall."""


@dataclass(frozen=True)
class Schedule:
    """The outcome of one run."""

    units: tuple[Unit, ...]
    in_use_bytes: int = field(default=0, compare=False)
    """The most that was in use, by the memory of the shape."""

    @property
    def events(self) -> list[int]:
        """`job` is run or launched, `~job` is waited for."""
        return [event for unit in self.units for event in unit]

    @property
    def buckets(self) -> list[Unit]:
        return [unit for unit in self.units if len(unit) > 1]


def schedule(shape: Shape, knobs: Knobs, merging: Merging | None = None) -> Schedule:
    """Run the scheduler once."""
    return _Run(shape, knobs, merging).run()


class _Run(Execution):
    def __init__(self, shape: Shape, knobs: Knobs, merging: Merging | None) -> None:
        super().__init__(shape, knobs, merging)
        self.seen = 0
        """How many of the fillers that arrived are in one of two heaps."""
        self.closed: list[tuple[int, int]] = []
        """Those that need a collective still, by its end."""
        self.open: list[tuple[tuple[int, int], int]] = []

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
            self.wait(launch)
        return Schedule(tuple(self.units), self.room.most_in_use)

    def _drain(self) -> bool:
        """Do one thing of what is left where nothing of importance is; returns whether there was one."""
        if self.fillers:
            self.compute(self._last_filler())
            return True
        self.commit(NEVER)
        if not self.fillers:
            if self.flying and any(self.others):  # there is no room for more until something was waited for
                self.now = max(self.now, self.end[self.flying[0]])
                self.wait(self.flying[0])
                return True
            ready = [*(job for gathers in self.gathers for _, job in gathers), *(j for o in self.others for j in o)]
            if not ready:
                return False
            self.do(min(ready, key=lambda job: (self.when(job), job)))
        return True

    def _is_aside(self, job: int) -> bool:
        return self.shape.is_launch[job] or self.shape.prepares[job] or self.is_filler[job]

    def _is_open(self, job: int) -> bool:
        return self.shape.is_launch[job] and not self.waited[job]

    # Choosing.

    def _advance(self) -> None:
        """Run the next job: the first that is left, or another while that one would stand still."""
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
        """The first filler that was held for too long, or any while memory is short."""
        shape, front = self.shape, self.front
        has_room = self.fits(front, 0)
        for job in self.fillers[:FILLERS_SEEN]:
            if has_room and shape.elapsed[front] - shape.elapsed[job] <= self.hold:
                return None
            is_kept = has_room and self.knobs.keep and shape.tail[job] < self.jobs.duration[job]
            if not is_kept and self.is_sure(job) and (self.may_run(job) if has_room else self.room.is_freed_by(job)):
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
        return job if self.fits(use, self.made_bytes[job]) else None

    def _last_filler(self) -> int:
        """The next one where nothing else is left."""
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
        """Fillers that are left go by this, the least first."""
        tail, duration = self.shape.tail[job], self.jobs.duration[job]
        if self.knobs.finish == "tail":
            return (0, -tail)
        return (0, duration) if tail >= duration else (1, -tail)


def _is_better(jobs: Jobs, job: int, known: int, stall: int) -> bool:
    """Whether a filler fits a stall better: the longest of those that fit, else the shortest."""
    ns, other = jobs.duration[job], jobs.duration[known]
    if ns <= stall:
        return other > stall or ns > other
    return stall < ns < other
