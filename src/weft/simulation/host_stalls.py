"""Where the host waits for the device: it cannot issue the work behind such a read, so that work starts late.

Contract: computed from a simulated program with host times. Without them the host is never in the way.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.quantities import duration_text
from weft.simulation.program import Program
from weft.simulation.simulator import run

MAX_TOLD = 3
"""Number of stalls that notes name."""


@dataclass(frozen=True)
class HostStall:
    """One read of device data by the host."""

    name: str
    """The node that reads."""
    stall_ns: int
    """How long the host waits for it."""


def host_stalls(program: Program) -> tuple[HostStall, ...]:
    """The reads at which the host waits, in order; those that follow at once belong to the first."""
    if not program.host_ns:
        return ()
    trace = run(program)
    issued = 0
    found: list[HostStall] = []
    for op in trace.order:
        issued += program.host_ns[op]
        if program.drains[op] and trace.end_ns[op] > issued:
            found.append(HostStall(program.names[op], trace.end_ns[op] - issued))
            issued = trace.end_ns[op]
    return tuple(found)


def notes_on_stalls(program: Program) -> tuple[str, ...]:
    """Sentences about the longest stalls, for a report."""
    stalls = sorted(host_stalls(program), key=lambda stall: -stall.stall_ns)
    if not stalls:
        return ()
    total = duration_text(sum(stall.stall_ns for stall in stalls) / 1000)
    longest = ", ".join(f"{duration_text(stall.stall_ns / 1000)} for {stall.name}" for stall in stalls[:MAX_TOLD])
    return (f"the host waits {total} for device data in {len(stalls)} reads: {longest}",)
