"""Room: what a schedule in the making holds in memory, and whether more fits under its budget.

Contract: bytes are those of the shape's memory: storages that more than one job needs, and for each job the most that
it adds while it runs. What runs ahead of the order of the graph must fit on top of all that lies between; bytes of the
job that runs next are reserved while launches are chosen that go off before it.
"""

from __future__ import annotations

from weft.scheduling.shape import Shape

NO_LIMIT = 1 << 62


class Room:
    """The memory of one schedule in the making."""

    def __init__(self, shape: Shape, budget_bytes: int) -> None:
        self.memory, self.peaks, self.last = shape.memory, shape.peaks, shape.size - 1
        self.budget_bytes = budget_bytes
        self.in_use = self.most_in_use = 0
        self.reserved = 0
        """Bytes that the job needs that runs next."""
        self.left = list(shape.memory.holders)
        """How many jobs hold each storage still."""

    def fits(self, front: int, until: int, num_bytes: int) -> bool:
        """Whether bytes more may be held from now, where `front` is the first job that is left, until a job."""
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
        """Whether there is room for a job now, and for the first that is left behind it."""
        if job == front:
            return self.in_use + self.passing_bytes(job) <= self.budget_bytes
        return self.fits(front, front, self.passing_bytes(job))

    def passing_bytes(self, job: int) -> int:
        """The most that a job adds at once: less where it is the last to need something before it ends."""
        memory, left = self.memory, self.left
        most, least = memory.passing_bytes[job], memory.least_bytes[job]
        return least if least < most and all(left[storage] == 1 for storage in memory.dying[job]) else most

    def is_freed_by(self, job: int) -> bool:
        """Whether less is in use behind a job than before it."""
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
