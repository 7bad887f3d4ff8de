"""Recipes: the plain orders that frameworks use, as candidates for the search.

Jobs run in the order of the graph. Each launch starts as soon as its inputs are ready, while the bytes in flight of its
queue stay below a limit, and is waited for before its first consumer. Launches may be merged first, as DDP does: a
bucket takes launches of one key in their order, and closes when it is long enough or when one of them is needed.
"""

from __future__ import annotations

from collections import deque

from weft.scheduling.job_tables import JobTables
from weft.scheduling.scheduler import Merging, Schedule, Unit


def recipe(tables: JobTables, merging: Merging | None, latencies: int, in_flight_bytes: int) -> Schedule:
    """Hoisted launches and sunk waits, with at most `in_flight_bytes` of results in flight in each queue.

    Launches are merged into buckets that take at most `latencies` latencies; 0: they are not merged.
    """
    return Schedule(tuple(_Walk(tables, _buckets(tables, merging, latencies), in_flight_bytes).run()))


def _buckets(tables: JobTables, merging: Merging | None, latencies: int) -> list[Unit]:
    """The jobs in order. A bucket is at the position of its last launch, or before the first consumer of a member."""
    jobs, units = tables.jobs, list[Unit]()
    opened: dict[int, list[int]] = {}
    bucket_of: dict[int, int] = {}

    def close(key: int) -> None:
        units.append(tuple(opened.pop(key)))

    for job in range(tables.size):
        needed = {bucket_of[p] for p in (*jobs.preds[job], *jobs.comm_preds[job]) if p in bucket_of}
        for key in sorted(needed.intersection(opened)):
            if not set(opened[key]).isdisjoint((*jobs.preds[job], *jobs.comm_preds[job])):
                close(key)
        key = merging.key(job) if merging is not None and latencies and tables.is_launch[job] else -1
        if key < 0 or merging is None:
            units.append((job,))
            continue
        if key in opened and merging.duration([*opened[key], job]) > latencies * merging.latency(job):
            close(key)
        opened.setdefault(key, []).append(job)
        bucket_of[job] = key
    for key in list(opened):
        close(key)
    return units


class _Walk:
    """Units in order, with launches as early and waits as late as possible."""

    def __init__(self, tables: JobTables, units: list[Unit], in_flight_bytes: int) -> None:
        self.tables, self.jobs, self.sequence, self.limit = tables, tables.jobs, units, in_flight_bytes
        self.units: list[Unit] = []
        self.done = [False] * tables.size
        self.waited = [False] * tables.size
        num_queues = len(tables.jobs.program.queues)
        self.pending: list[deque[Unit]] = [deque() for _ in range(num_queues)]
        self.flying: list[deque[int]] = [deque() for _ in range(num_queues)]
        """Launches in flight, in launch order."""
        self.in_flight = [0] * num_queues
        for unit in units:
            if tables.is_launch[unit[0]]:
                self.pending[self.jobs.queue[unit[0]]].append(unit)

    def run(self) -> list[Unit]:
        for unit in self.sequence:
            job = unit[0]
            if self.done[job]:
                continue
            if self.tables.is_launch[job]:
                while not self.done[job]:
                    self._launch(self.jobs.queue[job])
                continue
            if not self.tables.prepares[job]:  # runs right before its launch, or before another job that needs it
                self._run(job)
                self._hoist()
        for job in range(self.tables.size):
            if not self.done[job]:
                self._run(job)
        for flying in self.flying:
            while flying:
                self._wait(flying[0])
        return self.units

    def _hoist(self) -> None:
        """Launch everything that is ready, in the order of each queue."""
        for queue, pending in enumerate(self.pending):
            while pending and self._is_ready(pending[0]) and self._fits(queue, pending[0]):
                self._launch(queue)

    def _is_ready(self, unit: Unit) -> bool:
        done, waited, prepares, jobs = self.done, self.waited, self.tables.prepares, self.jobs
        return all(
            all(done[p] or prepares[p] for p in jobs.preds[job]) and all(waited[p] for p in jobs.comm_preds[job])
            for job in unit
        )

    def _fits(self, queue: int, unit: Unit) -> bool:
        size = sum(self.tables.memory.made_bytes[job] for job in unit)
        return not self.flying[queue] or self.in_flight[queue] + size <= self.limit

    def _launch(self, queue: int) -> None:
        """Launch the next unit of a queue, after waits for older ones if too much would be in flight."""
        unit = self.pending[queue].popleft()
        for job in unit:
            self._need(job)
        while not self._fits(queue, unit):
            self._wait(self.flying[queue][0])
        self.units.append(unit)
        for job in unit:
            self.done[job] = True
            self.flying[queue].append(job)
            self.in_flight[queue] += self.tables.memory.made_bytes[job]

    def _run(self, job: int) -> None:
        self._need(job)
        if not self.done[job]:
            self.done[job] = True
            self.units.append((job,))

    def _need(self, job: int) -> None:
        """Run, launch and wait for everything that a job needs."""
        for p in (*self.jobs.preds[job], *self.jobs.comm_preds[job]):
            if not self.done[p] and self.tables.is_launch[p]:
                while not self.done[p]:
                    self._launch(self.jobs.queue[p])
            elif not self.done[p]:
                self._run(p)
        for launch in self.jobs.comm_preds[job]:
            if not self.waited[launch]:
                self._wait(launch)

    def _wait(self, launch: int) -> None:
        queue = self.jobs.queue[launch]
        self.waited[launch] = True
        self.flying[queue].remove(launch)
        self.in_flight[queue] -= self.tables.memory.made_bytes[launch]
        self.units.append((~launch,))
