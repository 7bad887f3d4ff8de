"""Timeline: when everything ran, and the totals that follow.

Contract: integers in nanoseconds inside; `_us` floats at the public edge. A span is half open: [start, end).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from weft.simulation.program import Program

NS_PER_US = 1000
NUM_HIDING = 3
"""Number of operations named as hiding a collective."""


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on the compute stream, or one collective on its queue."""

    op: int
    """Index of the operation in the program."""
    name: str
    start_ns: int
    end_ns: int
    alone_ns: int
    """Its time without slowdown and without other collectives on its link."""


@dataclass(frozen=True, slots=True)
class CollectiveSpan(Span):
    """A collective, or a copy to or from host memory, on its queue."""

    queue: int
    launched_ns: int
    """When the compute stream reached its launch."""
    waited_ns: int | None
    """When the stream reached the first wait for it; None without a wait."""
    hidden_ns: int
    """How long compute ran at the same time."""
    exposed_ns: int
    """How long the compute stream was blocked by it."""
    hidden_by: tuple[str, ...] = ()
    """Compute that ran at the same time, longest first."""


@dataclass(frozen=True)
class Timeline:
    """The simulation of one order of a program."""

    compute: tuple[Span, ...]
    collectives: tuple[CollectiveSpan, ...]
    step_ns: int
    critical_path: tuple[int, ...]
    """Operations of a longest chain of spans, each caused by the one before."""
    peak_bytes: int = 0
    memory: tuple[tuple[int, int], ...] = ()
    """(time, bytes in use from then on), in order."""
    lower_bound_ns: int = 0
    """A proved lower bound for every order; 0 until it is known. `lower_bound_us` and `gap` compute it on demand."""
    program: Program | None = field(default=None, repr=False, compare=False)
    """The program that was simulated."""
    find_bound_ns: Callable[[Program], int] | None = field(default=None, repr=False, compare=False)
    """Computes the bound on first use; that takes longer than the simulation."""
    copies: tuple[CollectiveSpan, ...] = ()
    """Copies to and from host memory."""

    @property
    def step_us(self) -> float:
        return self.step_ns / NS_PER_US

    @cached_property
    def compute_us(self) -> float:
        """Time during which the compute stream was busy."""
        return sum(span.end_ns - span.start_ns for span in self.compute) / NS_PER_US

    @cached_property
    def exposed_us(self) -> float:
        """Time during which the compute stream was blocked by a collective."""
        return sum(span.exposed_ns for span in self.collectives) / NS_PER_US

    @cached_property
    def copies_exposed_us(self) -> float:
        """Time during which the compute stream was blocked by a copy to or from host memory."""
        return sum(span.exposed_ns for span in self.copies) / NS_PER_US

    @cached_property
    def communication_us(self) -> float:
        """Sum of the times of all collectives, overlapping or not."""
        return sum(span.end_ns - span.start_ns for span in self.collectives) / NS_PER_US

    @cached_property
    def hidden_us(self) -> float:
        """Part of the collectives' time during which the compute stream was busy."""
        return sum(span.hidden_ns for span in self.collectives) / NS_PER_US

    @cached_property
    def idle_us(self) -> float:
        """Launch gaps: time during which the compute stream was neither busy nor blocked by a collective or a copy."""
        busy = sum(span.end_ns - span.start_ns for span in self.compute)
        return (self.step_ns - busy - sum(span.exposed_ns for span in (*self.collectives, *self.copies))) / NS_PER_US

    @property
    def host_us(self) -> float:
        """Time that the host takes to issue the step; 0 if the host is never in the way."""
        return sum(self.program.host_ns) / NS_PER_US if self.program is not None else 0.0

    @property
    def lower_bound_us(self) -> float:
        return self._bound_ns / NS_PER_US

    @property
    def gap(self) -> float:
        """How far the step is above the bound, as a share of the bound; infinite without a bound."""
        return self.step_ns / self._bound_ns - 1 if self._bound_ns else float("inf")

    @cached_property
    def _bound_ns(self) -> int:
        if self.lower_bound_ns or self.program is None or self.find_bound_ns is None:
            return self.lower_bound_ns
        return self.find_bound_ns(self.program)


class Coverage:
    """Answers which compute runs during a span of time."""

    def __init__(self, compute: Sequence[Span]) -> None:
        self._compute = compute
        self._starts = [span.start_ns for span in compute]
        self._ends = [span.end_ns for span in compute]
        self._busy = [0, *accumulate(span.end_ns - span.start_ns for span in compute)]

    def of(self, start_ns: int, end_ns: int) -> tuple[int, tuple[str, ...]]:
        """How long compute runs in that time, and the names of the longest-running operations."""
        first, last = bisect_right(self._ends, start_ns), bisect_left(self._starts, end_ns)
        if first >= last or start_ns >= end_ns:
            return 0, ()
        starts, ends = self._starts, self._ends
        before = max(start_ns - starts[first], 0)
        after = max(ends[last - 1] - end_ns, 0)
        longest = heapq.nlargest(
            NUM_HIDING, range(first, last), key=lambda i: (min(ends[i], end_ns) - max(starts[i], start_ns), -i)
        )
        total = self._busy[last] - self._busy[first] - before - after
        return total, tuple(self._compute[i].name for i in longest)
