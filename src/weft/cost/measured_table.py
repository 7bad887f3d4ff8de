"""Measured tables: how long a kind of collective took for some sizes, and what that says of others.

Between two measured sizes the time is a latency and a bandwidth that fit both: a straight line. (On logarithmic axes a
straight line takes small messages for twice as slow as they are, where sizes lie far apart.) Below the smallest size
the answer is the smallest measured time, above the largest it grows with the bytes at the bandwidth of the last point;
both are said to be extrapolated. A table is for one kind and one number of ranks, and for one level where it names one.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from weft.graph.ops import Kind


@dataclass(frozen=True)
class Estimate:
    """The time of one collective, and what it rests on."""

    us: float
    source: str
    """`links`, `nccl` or `table`."""
    extrapolated: bool = False


@dataclass(frozen=True)
class Table:
    """Times of one kind of collective among so many ranks."""

    kind: Kind
    num_ranks: int
    points: tuple[tuple[int, float], ...]
    """(bytes of the full tensor, microseconds), sizes ascending and positive."""
    level: str = ""
    """The level it was measured at; empty where it holds for any."""

    @classmethod
    def measured(cls, kind: Kind, num_ranks: int, samples: Iterable[tuple[int, float]], level: str = "") -> Table:
        """A table of samples in any order: the median of those of one size."""
        by_size: dict[int, list[float]] = {}
        for num_bytes, us in samples:
            by_size.setdefault(num_bytes, []).append(us)
        points = tuple((size, statistics.median(by_size[size])) for size in sorted(by_size))
        return cls(kind, num_ranks, points, level)

    def at(self, num_bytes: int) -> Estimate:
        """The time of a collective of so many bytes of the full tensor."""
        sizes = [size for size, _ in self.points]
        i = bisect_left(sizes, num_bytes)
        if i < len(sizes) and sizes[i] == num_bytes:
            return Estimate(self.points[i][1], "table")
        if i == 0:
            return Estimate(min(us for _, us in self.points), "table", extrapolated=True)
        if i == len(sizes):
            size, us = self.points[-1]
            return Estimate(us * num_bytes / size, "table", extrapolated=True)
        (low, fast), (high, slow) = self.points[i - 1], self.points[i]
        return Estimate(fast + (slow - fast) * (num_bytes - low) / (high - low), "table")

    @property
    def least_us_per_byte(self) -> float:
        """The slope of the flattest part: no byte takes less in any collective."""
        slopes = [(slow - fast) / (high - low) for (low, fast), (high, slow) in pairwise(self.points)]
        size, us = self.points[-1]
        return max(min([*slopes, us / size]), 0.0)


def find_table(tables: Sequence[Table], kind: Kind, num_ranks: int, level: str) -> Table | None:
    """The table for a collective: that of its level, else one for any level; None where there are two."""
    fitting = [table for table in tables if table.kind is kind and table.num_ranks == num_ranks]
    candidates = [table for table in fitting if table.level == level] or [t for t in fitting if not t.level]
    return candidates[0] if len(candidates) == 1 else None
