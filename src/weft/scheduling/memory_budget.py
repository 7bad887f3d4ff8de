"""MemoryBudget: how much memory a partial schedule holds, and whether more fits under its budget.

Contract: bytes are counted as in `JobMemory`: storages that more than one job needs, and for each job the most that it
adds while it runs. A job that runs ahead of the graph's order must fit together with the peak of all jobs it overtakes.
While the scheduler chooses launches that start before the next job, the bytes of that job are reserved.
"""

from __future__ import annotations

from weft.scheduling.job_tables import JobTables

NO_LIMIT = 1 << 62


class MemoryBudget:
    """The memory of one partial schedule."""

    def __init__(self, tables: JobTables, budget_bytes: int) -> None:
        self.memory, self.peaks, self.last = tables.memory, tables.peaks, tables.size - 1
        self.budget_bytes = budget_bytes
        self.in_use = self.most_in_use = 0
        self.reserved = 0
        """Bytes that the next job needs."""
        self.left = list(tables.memory.holders)
        """Number of unfinished jobs that hold each storage."""

    def fits(self, front: int, until: int, num_bytes: int) -> bool:
        """Whether `num_bytes` more fit from now until job `until`; `front` is the first job that has not run."""
        budget = self.budget_bytes
        if budget == NO_LIMIT:
            return True
        room = budget - num_bytes - self.in_use
        if room < self.reserved:
            return False
        room += self.memory.before[front]
        if self.peaks.most <= room:
            return True
        return self.peaks.of(front, max(front, min(until, self.last))) <= room

    def may_run(self, front: int, job: int) -> bool:
        """Whether a job fits now, and the first unfinished job still fits after it."""
        if job == front:
            return self.in_use + self.passing_bytes(job) <= self.budget_bytes
        return self.fits(front, front, self.passing_bytes(job))

    def passing_bytes(self, job: int) -> int:
        """Peak bytes that a job adds while it runs; less if storages that it frees on the way have no other holder."""
        memory, left = self.memory, self.left
        most, least = memory.passing_bytes[job], memory.least_bytes[job]
        return least if least < most and all(left[storage] == 1 for storage in memory.dying[job]) else most

    def is_freed_by(self, job: int) -> bool:
        """Whether less memory is in use after a job than before it."""
        memory, left = self.memory, self.left
        return sum([memory.size[s] for s in memory.held[job] if left[s] == 1]) > memory.made_bytes[job]

    def take(self, job: int) -> None:
        """A job starts."""
        self.most_in_use = max(self.most_in_use, self.in_use + self.passing_bytes(job))
        self.in_use += self.memory.made_bytes[job]

    def release(self, job: int) -> None:
        """A job ends, or is waited for."""
        memory, left = self.memory, self.left
        for storage in memory.held[job]:
            left[storage] -= 1
            if left[storage] == 0:
                self.in_use -= memory.size[storage]
