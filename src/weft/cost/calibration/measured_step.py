"""MeasuredStep: a training step of one rank, as its trace shows it.

Contract: whole nanoseconds from the start of the step. A time or a fact that the trace does not show is None or empty.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.cost.calibration.compute_trace import TracedProduct
from weft.graph.ops import Kind


@dataclass(frozen=True)
class TracedGroup:
    """A process group of a trace."""

    name: str
    """The run-time name; empty if the trace does not name the groups of its collectives."""
    num_ranks: int = 0
    """0 if unknown."""
    ranks: tuple[int, ...] = ()
    axis: str = ""


@dataclass(frozen=True)
class MeasuredCollective:
    """One collective of a step. Times count from the start of the step."""

    kind: Kind
    group: str
    """The run-time name; empty if the trace does not say."""
    num_bytes: int | None
    """Size of the full tensor; None if the trace does not say."""
    launched_ns: int | None
    """When the host launched it; None if the trace does not say. May be before the step's first kernel."""
    start_ns: int
    end_ns: int | None
    """None if the trace does not say."""
    exposed_ns: int = 0
    """How long the compute stream waited for it."""


@dataclass(frozen=True)
class MeasuredStep:
    """One step of one rank."""

    path: str
    rank: int | None
    number: int | None
    """Of its mark `ProfilerStep#`; None if the trace has no marks."""
    step_ns: int
    """From the start of its first kernel to the end of its last one."""
    compute_ns: int
    """How long the compute stream was busy."""
    host_late_ns: int
    """How long the compute stream was idle because the host had not issued the next kernel."""
    collectives: tuple[MeasuredCollective, ...]
    """In launch order if it is known, otherwise by start."""
    groups: tuple[TracedGroup, ...]
    notes: tuple[str, ...] = ()
    products: tuple[tuple[TracedProduct, int], ...] = ()
    """Matrix products by shape, with their number; empty if the trace has no shapes."""

    @property
    def exposed_ns(self) -> int:
        """How long the compute stream was idle and waited for collectives."""
        return sum(each.exposed_ns for each in self.collectives)

    @property
    def has_launch_order(self) -> bool:
        """Whether the trace shows the launch order over all groups. One launch of a CUDA graph starts many kernels."""
        times = {each.launched_ns for each in self.collectives}
        return None not in times and len(times) == len(self.collectives)
