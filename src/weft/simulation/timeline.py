"""Timeline: when everything ran, and what that says.

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
"""How many of the operations that hide a collective are named."""


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on the compute stream, or one collective on its queue."""

    op: int
    """Number of the operation in the program."""
    name: str
    start_ns: int
    end_ns: int
    alone_ns: int
    """What it would take without slowdown and without others on its link."""


@dataclass(frozen=True, slots=True)
class CollectiveSpan(Span):
    """A collective from the moment it could start to its end."""

    queue: int
    launched_ns: int
    """When its launch was reached on the compute stream."""
    waited_ns: int | None
    """When the first wait for it was reached; None where nothing waits for it."""
    hidden_ns: int
    """How long compute ran meanwhile."""
    exposed_ns: int
    """How long the compute stream stood still for it."""
    hidden_by: tuple[str, ...] = ()
    """Compute that ran meanwhile, the longest first."""


@dataclass(frozen=True)
class Timeline:
    """What one order of a program does."""

    compute: tuple[Span, ...]
    collectives: tuple[CollectiveSpan, ...]
    step_ns: int
    critical_path: tuple[int, ...]
    """Operations on a longest chain of spans, each waiting for the one before, in order."""
    peak_bytes: int = 0
    memory: tuple[tuple[int, int], ...] = ()
    """(time, bytes in use from then on), in order."""
    lower_bound_ns: int = 0
    """A proved lower bound on every order; 0 until it is known. `lower_bound_us` and `gap` compute it on demand."""
    program: Program | None = field(default=None, repr=False, compare=False)
    """The program that was simulated."""
    find_bound_ns: Callable[[Program], int] | None = field(default=None, repr=False, compare=False)
    """Computes the bound when it is first asked for, which takes longer than the simulation."""

    @property
    def step_us(self) -> float:
        return self.step_ns / NS_PER_US

    @cached_property
    def compute_us(self) -> float:
        """Time in which the compute stream ran something."""
        return sum(span.end_ns - span.start_ns for span in self.compute) / NS_PER_US

    @cached_property
    def exposed_us(self) -> float:
        """Time in which the compute stream stood still for a collective."""
        return sum(span.exposed_ns for span in self.collectives) / NS_PER_US

    @cached_property
    def communication_us(self) -> float:
        """Time of all collectives, whether at once or one after the other."""
        return sum(span.end_ns - span.start_ns for span in self.collectives) / NS_PER_US

    @cached_property
    def hidden_us(self) -> float:
        """Time of collectives in which the compute stream ran something."""
        return sum(span.hidden_ns for span in self.collectives) / NS_PER_US

    @cached_property
    def idle_us(self) -> float:
        """Time in which the compute stream neither ran anything nor stood still for a collective: launch gaps."""
        busy = sum(span.end_ns - span.start_ns for span in self.compute)
        return (self.step_ns - busy - sum(span.exposed_ns for span in self.collectives)) / NS_PER_US

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
    """What of the compute stream runs in a span of time."""

    def __init__(self, compute: Sequence[Span]) -> None:
        self._compute = compute
        self._starts = [span.start_ns for span in compute]
        self._ends = [span.end_ns for span in compute]
        self._busy = [0, *accumulate(span.end_ns - span.start_ns for span in compute)]

    def of(self, start_ns: int, end_ns: int) -> tuple[int, tuple[str, ...]]:
        """How long compute runs in that time, and the names of those that run longest in it."""
        first, last = bisect_right(self._ends, start_ns), bisect_left(self._starts, end_ns)
        if first >= last or start_ns >= end_ns:
            return 0, ()
        starts, ends = self._starts, self._ends
        before = max(start_ns - starts[first], 0)
        behind = max(ends[last - 1] - end_ns, 0)
        longest = heapq.nlargest(
            NUM_HIDING, range(first, last), key=lambda i: (min(ends[i], end_ns) - max(starts[i], start_ns), -i)
        )
        total = self._busy[last] - self._busy[first] - before - behind
        return total, tuple(self._compute[i].name for i in longest)
