"""Sketch: a simulated step as a few lanes of bars, small enough to travel from a worker and to be drawn on a page.

Contract: bars are in thousandths of the step, in order, and do not touch. A bar covers at least one thousandth, so
short kernels do not vanish; gaps shorter than that do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.simulation.program import Program
from weft.simulation.timeline import Timeline

PARTS = 1000
"""Number of parts into which a step is divided."""
COMPUTE_LANE, BLOCKED_LANE = "compute", "blocked"


@dataclass(frozen=True)
class Lane:
    """One row of a sketch: the times at which a resource is busy."""

    name: str
    """`compute`; `blocked`: the compute stream waits for communication; or the name of a group."""
    bars: tuple[tuple[int, int], ...]
    """Start and end, in thousandths of the step."""


def sketch_of(timeline: Timeline, program: Program) -> tuple[Lane, ...]:
    """Compute, the time during which communication blocks it, and the collectives of each group."""
    step = timeline.step_ns
    by_group: dict[str, list[tuple[int, int]]] = {}
    blocked: list[tuple[int, int]] = []
    for span in timeline.collectives:
        by_group.setdefault(program.queues[span.queue].group, []).append((span.start_ns, span.end_ns))
        if span.exposed_ns:
            blocked.append((span.end_ns - span.exposed_ns, span.end_ns))
    return (
        Lane(COMPUTE_LANE, _bars(((span.start_ns, span.end_ns) for span in timeline.compute), step)),
        Lane(BLOCKED_LANE, _bars(blocked, step)),
        *(Lane(group, _bars(spans, step)) for group, spans in by_group.items()),
    )


def _bars(spans: Iterable[tuple[int, int]], step_ns: int) -> tuple[tuple[int, int], ...]:
    """The spans in thousandths of the step, with those that touch joined."""
    bars: list[tuple[int, int]] = []
    for start_ns, end_ns in sorted(spans):
        start = min(start_ns * PARTS // step_ns, PARTS - 1)
        end = max(start + 1, -(-end_ns * PARTS // step_ns))
        if bars and start <= bars[-1][1]:
            bars[-1] = bars[-1][0], max(bars[-1][1], end)
        else:
            bars.append((start, end))
    return tuple(bars)
