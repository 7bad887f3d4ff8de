"""Choices: a program in which some operations may run more often, to hold fewer values.

Contract: every operation runs at least once. One that may run again reads what any run of the operations before it
made, and each of its users reads what any of its runs made. So a run is needed only if a later operation reads its
result and the results of all earlier runs are gone. This covers every mixture of keeping, gathering again and
recomputing values, for every cap on memory. A duration is the least that an operation takes in any mixture.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.simulation.program import Program

ONCE = -1


@dataclass(frozen=True)
class Choices:
    """A program and what it costs to run its operations again."""

    program: Program
    """Each operation once, with its least duration."""
    again_ns: tuple[int, ...]
    """For each operation the least time of another run on its resource; ONCE for operations that run once."""
    away: tuple[int, int] | None = None
    """Bytes that may wait in host memory, and bytes that can be copied there in a microsecond; None: none leave."""
