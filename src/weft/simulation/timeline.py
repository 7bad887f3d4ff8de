"""Timeline: when everything ran, and what that says.

Contract: integers in nanoseconds inside; `_us` floats at the public edge. A span is half open: [start, end).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

NS_PER_US = 1000


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
    """A proved lower bound of any order; 0 where none was asked for."""

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

    @property
    def lower_bound_us(self) -> float:
        return self.lower_bound_ns / NS_PER_US

    @property
    def gap(self) -> float:
        """How far the step is above the bound, as a share of the bound; infinite without a bound."""
        return self.step_ns / self.lower_bound_ns - 1 if self.lower_bound_ns else float("inf")
