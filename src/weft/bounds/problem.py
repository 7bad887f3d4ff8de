"""Tasks: a program without its order, as bounds see it. The same form serves both directions of time.

Contract: a node is a moment or an interval that ends before its successors start, in every legal order. Operation `i`
is node `i`: its place on the compute stream. The collective of launch `i` is node `i + n`, between the launch and its
waits. What works on a resource has one: the compute stream is `COMPUTE`, link `k` is `k + 1`. Queues need no resource
of their own: what they run, their link carries, and a link carries no more than one second of it in a second.

The launch gap belongs to what is issued before it: what is issued next comes no earlier. So all bounds are bounds of
the step and one gap. The gap behind a launch keeps the stream, not its collective: that needs what its launch needs.
Kernels in several parts have at least the gaps between them, whatever the order.

Merging saves latencies, but not of collectives that depend on each other: these are never in one bucket. So for each
queue there is a chain of those, the one with the longest latencies: each member of it is a launch and pays its latency.

Where overlap slows compute, the same holds by two other clocks. `WORK` runs slower while some link is busy, by as much
as compute does: compute takes its own time there, gaps and collectives at least that much less. `BUSY` runs only while
some link is busy: compute takes no time there. The step is the time of the one and a share of the time of the other,
`overlap_cost`; each has bounds of its own.

Where compute slows collectives, the same holds by a clock that runs slower beside compute, by as much as they do:
`WIRE`. Collectives take their own time there, compute at least that much less, and the step is longer by a share of all
compute, `wire_cost`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from weft.errors import WeftError, compose
from weft.simulation.program import MILLION, OpKind, Program

NO_RESOURCE = -1
NO_KERNEL = -1
COMPUTE = 0

Integers = NDArray[np.int64]


class BoundError(WeftError):
    """A program that no bound can be found for, or a certificate that proves nothing."""


class MergingAssumption(StrEnum):
    """Whether collectives of one queue may become one."""

    ALLOWED = "allowed"
    EXCLUDED = "excluded"


class Clock(StrEnum):
    """By which time nodes take what they take."""

    WALL = "wall"
    WORK = "work"
    """Slower while a link is busy, as compute is."""
    BUSY = "busy"
    """Only while a link is busy."""
    WIRE = "wire"
    """Slower beside compute, as collectives are."""


@dataclass(frozen=True)
class Tasks:
    """Nodes with what they take, in one direction of time."""

    order: list[int]
    """All nodes, predecessors first."""
    preds: list[list[int]]
    succs: list[list[int]]
    duration: list[int]
    resource: list[int]
    queue: list[int]
    """Of a collective; else -1."""
    latency: list[int]
    """Of a collective, what merging may save of it; else 0."""
    kernel: list[int]
    """Of compute that is a part of a kernel in several parts; else NO_KERNEL."""
    num_resources: int
    gap: int
    """Between two kernels."""
    chains: list[list[int]]
    """Where merging is allowed, for each queue collectives that depend on each other, in order."""

    def reversed(self) -> Tasks:
        """The same with time running backwards: heads there are tails here."""
        return replace(self, order=self.order[::-1], preds=self.succs, succs=self.preds)

    def on(self, resource: int) -> list[int]:
        """The nodes that take time on a resource, in order."""
        return [node for node in self.order if self.resource[node] == resource and self.duration[node]]


def tasks_of(program: Program, merging: MergingAssumption, clock: Clock = Clock.WALL) -> Tasks:
    check_program(program, merging)
    num_ops = len(program.kinds)
    tasks = Tasks(
        order=[],
        preds=[[] for _ in range(2 * num_ops)],
        succs=[[] for _ in range(2 * num_ops)],
        duration=[],
        resource=[NO_RESOURCE] * (2 * num_ops),
        queue=[-1] * (2 * num_ops),
        latency=[0] * (2 * num_ops),
        kernel=[NO_KERNEL] * (2 * num_ops),
        num_resources=1 + len(program.links),
        gap=0,
        chains=[],
    )
    kernels = Counter(program.kernel)
    for op, kind in enumerate(program.kinds):
        preds = [*dict.fromkeys([*program.preds[op], *(launch + num_ops for launch in program.waits_for[op])])]
        link(tasks, op, preds)
        if kind in (OpKind.COMPUTE, OpKind.LAUNCH):
            kernel = program.kernel[op] if program.kernel else NO_KERNEL
            tasks.kernel[op] = NO_KERNEL if kernels[kernel] == 1 else kernel
            tasks.resource[op] = COMPUTE
        if kind is OpKind.LAUNCH:
            node = op + num_ops
            link(tasks, node, preds)
            tasks.latency[node] = program.latency_ns[op] if merging is MergingAssumption.ALLOWED else 0
            tasks.queue[node] = program.queue[op]
            tasks.resource[node] = 1 + program.queues[program.queue[op]].link
    if merging is MergingAssumption.ALLOWED:
        tasks.chains.extend(chain_of(tasks, queue) for queue in range(len(program.queues)))
    return timed(program, tasks, clock)


def timed(program: Program, tasks: Tasks, clock: Clock) -> Tasks:
    """Tasks with what they take by a clock; given by any."""
    slowdown_ppm = program.slowdown_ppm if clock is Clock.WORK else 0
    wire_ppm = program.collective_slowdown_ppm if clock is Clock.WIRE else 0
    gap = 0 if clock is Clock.BUSY else shrunk(program.launch_gap_ns, slowdown_ppm)
    num_ops = len(program.kinds)
    duration, latency = [0] * (2 * num_ops), [0] * (2 * num_ops)
    gaps = gaps_behind_launches(program, tasks)
    for op, kind in enumerate(program.kinds):
        if kind is OpKind.COMPUTE and program.duration_ns[op] and clock is not Clock.BUSY:
            duration[op] = shrunk(program.duration_ns[op], wire_ppm) + (gap if tasks.kernel[op] == NO_KERNEL else 0)
        elif kind is OpKind.LAUNCH:
            saved = program.latency_ns[op] if tasks.chains else 0
            latency[op + num_ops] = shrunk(saved, slowdown_ppm)
            duration[op + num_ops] = latency[op + num_ops] + shrunk(program.duration_ns[op] - saved, slowdown_ppm)
            duration[op] = gap if op in gaps else 0
    return replace(tasks, duration=duration, latency=latency, gap=gap)


def gaps_behind_launches(program: Program, tasks: Tasks) -> set[int]:
    """The launches that have a gap behind them: those of no kernel; with merging, only of chains in queues of such."""
    launches = [op for op, kind in enumerate(program.kinds) if kind is OpKind.LAUNCH]
    if not tasks.chains:
        return {op for op in launches if tasks.kernel[op] == NO_KERNEL}
    others = {program.queue[op] for op in launches if tasks.kernel[op] != NO_KERNEL}
    chained = [node - len(program.kinds) for chain in tasks.chains for node in chain]
    return {op for op in chained if program.queue[op] not in others}


def chain_of(tasks: Tasks, queue: int) -> list[int]:
    """The collectives of a queue with the longest latencies that depend on each other, the longest chain of equals."""
    # By node the latencies of the chain that has ended when it has, and the last member of that.
    most, last = [0] * len(tasks.preds), [-1] * len(tasks.preds)
    before: dict[int, int] = {}
    best = -1
    for node in tasks.order:
        for pred in tasks.preds[node]:
            if most[pred] > most[node]:
                most[node], last[node] = most[pred], last[pred]
        if tasks.queue[node] == queue:
            before[node] = last[node]
            most[node], last[node] = most[node] + tasks.latency[node] + 1, node
            if best < 0 or most[node] > most[best]:
                best = node
    chain: list[int] = []
    while best >= 0:
        chain.append(best)
        best = before[best]
    return chain[::-1]


def shrunk(time: int, slowdown_ppm: int) -> int:
    """What gets done in a time in which it is slowed."""
    return time * MILLION // (MILLION + slowdown_ppm)


def overlap_cost(program: Program, busy: int) -> int:
    """What a step takes beyond its work, where links are busy for at least so long."""
    return busy * program.slowdown_ppm // (MILLION + program.slowdown_ppm)


def wire_cost(program: Program) -> int:
    """What a step takes beyond the time of its wires: collectives are slowed while all of its compute runs."""
    compute = sum(ns for ns, kind in zip(program.duration_ns, program.kinds, strict=True) if kind is OpKind.COMPUTE)
    return compute * program.collective_slowdown_ppm // (MILLION + program.collective_slowdown_ppm)


def link(tasks: Tasks, node: int, preds: list[int]) -> None:
    tasks.order.append(node)
    tasks.preds[node] = preds
    for pred in preds:
        tasks.succs[pred].append(node)


def check_program(program: Program, merging: MergingAssumption) -> None:
    for op, preds in enumerate(program.preds):
        late = next((pred for pred in (*preds, *program.waits_for[op]) if pred >= op), None)
        if late is not None:
            what = f"operation {op} ({program.names[op]}) needs operation {late}, which is not before it"
            raise BoundError(compose("bounds", what, do="give operations in an order that is legal"))
    if merging is MergingAssumption.EXCLUDED:
        return
    if len(program.latency_ns) != len(program.kinds):
        what = f"{len(program.latency_ns)} latencies for {len(program.kinds)} operations"
        raise BoundError(compose("bounds", what, do="give latency_ns, or leave merging out"))
    pairs = zip(program.latency_ns, program.duration_ns, strict=True)
    wrong = next((op for op, (latency, duration) in enumerate(pairs) if not 0 <= latency <= duration), None)
    if wrong is not None:
        found = f"latency {program.latency_ns[wrong]} of {program.duration_ns[wrong]} ns"
        raise BoundError(compose("bounds", f"operation {wrong} ({program.names[wrong]}) has {found}"))


class Machine:
    """The tasks of one resource as arrays, and how long sets of them keep it busy."""

    def __init__(self, tasks: Tasks, resource: int) -> None:
        self.nodes = tasks.on(resource)
        self.position = {node: position for position, node in enumerate(self.nodes)}
        self.work = column([tasks.duration[node] - tasks.latency[node] for node in self.nodes])
        self.latency = column([tasks.latency[node] for node in self.nodes])
        self.queue = column([tasks.queue[node] for node in self.nodes])
        self.kernel = column([tasks.kernel[node] for node in self.nodes])
        self.gap = tasks.gap
        self.queues = sorted({tasks.queue[node] for node in self.nodes if tasks.latency[node]})
        chained = {node for chain in tasks.chains for node in chain}
        self.chained = column([tasks.latency[node] if node in chained else 0 for node in self.nodes])
        """The latencies that no merging saves."""

    def spans(self, chosen: Integers) -> Integers:
        """How long each prefix of some tasks takes at least: work, latencies, gaps between kernels.

        Each queue has one latency, or those of its chain.
        """
        spans = np.cumsum(self.work[chosen])
        for queue in self.queues:
            is_here = self.queue[chosen] == queue
            longest = np.maximum.accumulate(np.where(is_here, self.latency[chosen], 0))
            spans += np.maximum(longest, np.cumsum(np.where(is_here, self.chained[chosen], 0)))
        return spans + self.gaps(chosen) if self.gap else spans

    def gaps(self, chosen: Integers) -> Integers:
        """For each prefix the gaps between kernels in several parts."""
        parts = np.flatnonzero(self.kernel[chosen] != NO_KERNEL)
        _, firsts = np.unique(self.kernel[chosen[parts]], return_index=True)
        is_first = np.zeros(len(chosen), np.int64)
        is_first[parts[firsts]] = 1
        return self.gap * np.maximum(0, np.cumsum(is_first) - 1)

    def members(self, mask: int) -> Integers:
        """The positions whose bits are set."""
        data = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(data, bitorder="little"))


def column(values: list[int]) -> Integers:
    return np.array(values, np.int64)
