"""Stalls of the compute stream, and the collectives that it waited for.

Contract: whole nanoseconds. An interval is half open: [start, end).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

Interval = tuple[int, int]


def attribute_stalls(stalls: Sequence[Interval], spans: Sequence[Interval]) -> list[int]:
    """How long the compute stream waited for each collective, by when it stalls and when each collective runs.

    The part of a stall during which collectives run is divided among those that end in it, in order of their ends. No
    time counts twice, and the part after the last end belongs to no collective. Stalls are in order and do not overlap.
    """
    running = Union(spans)
    order = sorted(range(len(spans)), key=lambda i: (spans[i][1], i))
    ends = [spans[i][1] for i in order]
    found = [0] * len(spans)
    for start, end in stalls:
        k = bisect_right(ends, start)
        while k < len(order) and ends[k] <= end:
            found[order[k]] += running.length_to(ends[k]) - running.length_to(start)
            start, k = ends[k], k + 1
    return found


class Union:
    """The union of intervals."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self.parts: list[Interval] = []
        for start, end in sorted(intervals):
            if self.parts and start <= self.parts[-1][1]:
                self.parts[-1] = self.parts[-1][0], max(self.parts[-1][1], end)
            else:
                self.parts.append((start, end))
        self._starts = [start for start, _ in self.parts]
        self._lengths = [0, *accumulate(end - start for start, end in self.parts)]

    def length_to(self, time: int) -> int:
        """The length of the part before a time."""
        k = bisect_right(self._starts, time)
        return self._lengths[k] - max(self.parts[k - 1][1] - time, 0) if k else 0

    @property
    def length(self) -> int:
        return self._lengths[-1]
