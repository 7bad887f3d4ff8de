"""Measured tables: how long a kind of collective took for some sizes, and the estimate for other sizes.

Between two measured sizes the time is a straight line: the latency and bandwidth that fit both. (Interpolation on
logarithmic axes would make small messages look twice as slow if sizes lie far apart.) Below the smallest size the
estimate is the smallest measured time. Above the largest, it grows with the bytes at the bandwidth of the last point.
Both are marked as extrapolated. A table holds for one kind, one number of ranks and, if it names one, one level.
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
    """The time of one collective, and its source."""

    us: float
    source: str
    """`links`, `nccl`, `table` or `symmetric`."""
    extrapolated: bool = False
    sm_share: float = 0.0
    """Share of the multiprocessors that copies through symmetric memory take from compute, on average."""


@dataclass(frozen=True)
class Table:
    """Times of one kind of collective for one number of ranks."""

    kind: Kind
    num_ranks: int
    points: tuple[tuple[int, float], ...]
    """(bytes of the full tensor, microseconds), sizes ascending and positive."""
    level: str = ""
    """The level it was measured at; empty if it holds for any."""

    @classmethod
    def measured(cls, kind: Kind, num_ranks: int, samples: Iterable[tuple[int, float]], level: str = "") -> Table:
        """A table of samples in any order: the median of each size."""
        by_size: dict[int, list[float]] = {}
        for num_bytes, us in samples:
            by_size.setdefault(num_bytes, []).append(us)
        points = tuple((size, statistics.median(by_size[size])) for size in sorted(by_size))
        return cls(kind, num_ranks, points, level)

    def at(self, num_bytes: int) -> Estimate:
        """The time of a collective; `num_bytes` is the size of the full tensor."""
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
        """The slope of the flattest part: no byte takes less time in any collective."""
        slopes = [(slow - fast) / (high - low) for (low, fast), (high, slow) in pairwise(self.points)]
        size, us = self.points[-1]
        return max(min([*slopes, us / size]), 0.0)


def find_table(tables: Sequence[Table], kind: Kind, num_ranks: int, level: str) -> Table | None:
    """The table for a collective: one for its level, else one for any level; None if several fit equally."""
    fitting = [table for table in tables if table.kind is kind and table.num_ranks == num_ranks]
    candidates = [table for table in fitting if table.level == level] or [t for t in fitting if not t.level]
    return candidates[0] if len(candidates) == 1 else None
