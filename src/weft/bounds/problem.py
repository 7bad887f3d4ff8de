"""The scheduling problem that the bounds argue about: a program without its order.

Contract: a node is a moment or an interval, and it ends before its successors start in every legal order. Operation `i`
is node `i`: its place on the compute stream. The collective of launch `i` is node `i + n`; it runs between the launch
and its waits. A node that takes time on a resource names it: `COMPUTE` is the compute stream, `k + 1` is link `k`.
Queues are not resources: a link carries everything that its queues run, and does at most one second of work per second,
so it is enough to count links. The same data structure serves both directions of time (`Tasks.reversed`).

Launch gaps: a kernel includes the gap after it, because the next kernel is issued no earlier. So every bound here is a
bound on the step plus one gap. The gap after a launch occupies the stream only: its collective needs what the launch
needs, and may start during the gap. Kernels in several parts have at least the gaps between them in every order.

Merging saves latencies, but never those of collectives that depend on each other, since these cannot share a bucket. So
each queue has a chain: the dependent collectives with the longest latencies. Each of them pays its own latency.

Slowdowns: the arguments need fixed durations, but overlap changes durations. Each slowdown is handled by a clock that
makes durations fixed again. `WORK` runs slower while a link is busy, by exactly the factor that slows compute. By this
clock, compute takes at least its undisturbed time, and gaps and collectives at least their time divided by that factor.
`BUSY` runs only while a link is busy, and compute takes no time by it. The step is the time by `WORK` plus a share of
the time by `BUSY` (`overlap_cost`), and each term has its own bound. `WIRE` runs slower while compute runs, by the
factor that slows collectives: the step is the time by `WIRE` plus a share of all compute (`wire_cost`).

Copies to and from host memory, and copies through symmetric memory, are collectives here. Compute never slows them. By
`WIRE` they take at least their time divided by the factor of that clock, because compute may run next to them all the
time. `WORK` and `BUSY` ignore them: `WORK` does not run slower for them and `BUSY` does not run for them, so they take
no time by `BUSY`. Where copies do take multiprocessors from compute, compute takes more than its undisturbed time by
`WORK`, and the bounds hold all the more.
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
    """The program cannot be bounded, for example because no order fits the memory limit."""


class MergingAssumption(StrEnum):
    """Whether a bound must also hold for programs in which collectives of one queue were merged."""

    ALLOWED = "allowed"
    EXCLUDED = "excluded"


class Clock(StrEnum):
    """The clock that measures durations."""

    WALL = "wall"
    WORK = "work"
    """Slower while a link is busy, by the factor that slows compute."""
    BUSY = "busy"
    """Runs only while a link is busy."""
    WIRE = "wire"
    """Slower while compute runs, by the factor that slows collectives."""


@dataclass(frozen=True)
class Tasks:
    """Nodes with their durations and resources, in one direction of time."""

    order: list[int]
    """All nodes, predecessors first."""
    preds: list[list[int]]
    succs: list[list[int]]
    duration: list[int]
    resource: list[int]
    queue: list[int]
    """The queue of a collective; -1 for every other node."""
    latency: list[int]
    """The part of a collective that merging may save; 0 for every other node."""
    kernel: list[int]
    """The kernel of a node that is one of its several parts; else NO_KERNEL."""
    num_resources: int
    gap: int
    """Launch gap between two kernels."""
    chains: list[list[int]]
    """Where merging is allowed, one chain of dependent collectives for each queue, in order."""

    def reversed(self) -> Tasks:
        """The same problem with time running backwards: its heads are the tails of this one."""
        return replace(self, order=self.order[::-1], preds=self.succs, succs=self.preds)

    def on(self, resource: int) -> list[int]:
        """Nodes that take time on a resource, in order."""
        return [node for node in self.order if self.resource[node] == resource and self.duration[node]]


def tasks_of(program: Program, merging: MergingAssumption, clock: Clock = Clock.WALL) -> Tasks:
    """The scheduling problem of a program, with durations by one clock."""
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
        add_node(tasks, op, preds)
        if kind in (OpKind.COMPUTE, OpKind.LAUNCH):
            kernel = program.kernel[op] if program.kernel else NO_KERNEL
            tasks.kernel[op] = NO_KERNEL if kernels[kernel] == 1 else kernel
            tasks.resource[op] = COMPUTE
        if kind is OpKind.LAUNCH:
            node = op + num_ops
            add_node(tasks, node, preds)
            tasks.latency[node] = program.latency_ns[op] if merging is MergingAssumption.ALLOWED else 0
            tasks.queue[node] = program.queue[op]
            tasks.resource[node] = 1 + program.queues[program.queue[op]].link
    if merging is MergingAssumption.ALLOWED:
        tasks.chains.extend(longest_latency_chain(tasks, queue) for queue in range(len(program.queues)))
    return with_durations(program, tasks, clock)


def with_durations(program: Program, tasks: Tasks, clock: Clock) -> Tasks:
    """The same tasks with durations by another clock."""
    slowdown_ppm = program.slowdown_ppm if clock is Clock.WORK else 0
    wire_ppm = program.collective_slowdown_ppm if clock is Clock.WIRE else 0
    gap = 0 if clock is Clock.BUSY else progress_in(program.launch_gap_ns, slowdown_ppm)
    num_ops = len(program.kinds)
    duration, latency = [0] * (2 * num_ops), [0] * (2 * num_ops)
    gaps = launches_with_gap(program, tasks)
    for op, kind in enumerate(program.kinds):
        if kind is OpKind.COMPUTE and program.duration_ns[op] and clock is not Clock.BUSY:
            duration[op] = progress_in(program.duration_ns[op], wire_ppm) + (
                gap if tasks.kernel[op] == NO_KERNEL else 0
            )
        elif kind is OpKind.LAUNCH:
            saved = program.latency_ns[op] if tasks.chains else 0
            rest = program.duration_ns[op] - saved
            if program.queues[program.queue[op]].is_copies:
                saved, rest = 0, 0 if clock is Clock.BUSY else progress_in(program.duration_ns[op], wire_ppm)
            latency[op + num_ops] = progress_in(saved, slowdown_ppm)
            duration[op + num_ops] = latency[op + num_ops] + progress_in(rest, slowdown_ppm)
            duration[op] = gap if op in gaps else 0
    return replace(tasks, duration=duration, latency=latency, gap=gap)


def launches_with_gap(program: Program, tasks: Tasks) -> set[int]:
    """Launches that are followed by a launch gap in every order.

    A launch that is part of a kernel has none. With merging, only the members of a chain are sure to stay launches of
    their own; a queue with launches inside kernels is left out, because merging may move a member into the kernel.
    """
    launches = [op for op, kind in enumerate(program.kinds) if kind is OpKind.LAUNCH]
    if not tasks.chains:
        return {op for op in launches if tasks.kernel[op] == NO_KERNEL}
    others = {program.queue[op] for op in launches if tasks.kernel[op] != NO_KERNEL}
    chained = [node - len(program.kinds) for chain in tasks.chains for node in chain]
    return {op for op in chained if program.queue[op] not in others}


def longest_latency_chain(tasks: Tasks, queue: int) -> list[int]:
    """The chain of dependent collectives of a queue with the largest sum of latencies; of equals, the longest."""
    # For each node: the best chain among its ancestors and itself, as its sum of latencies and its last member. Each
    # member adds one nanosecond to the sum, which breaks ties in favour of longer chains.
    latency_sum, last = [0] * len(tasks.preds), [-1] * len(tasks.preds)
    before: dict[int, int] = {}
    best = -1
    for node in tasks.order:
        for pred in tasks.preds[node]:
            if latency_sum[pred] > latency_sum[node]:
                latency_sum[node], last[node] = latency_sum[pred], last[pred]
        if tasks.queue[node] == queue:
            before[node] = last[node]
            latency_sum[node], last[node] = latency_sum[node] + tasks.latency[node] + 1, node
            if best < 0 or latency_sum[node] > latency_sum[best]:
                best = node
    chain: list[int] = []
    while best >= 0:
        chain.append(best)
        best = before[best]
    return chain[::-1]


def progress_in(time: int, slowdown_ppm: int) -> int:
    """Progress in a time during which everything is slowed: the least that a clock with this slowdown shows."""
    return time * MILLION // (MILLION + slowdown_ppm)


def overlap_cost(program: Program, busy: int) -> int:
    """How much longer than its `WORK` time a step takes if links are busy for at least `busy`."""
    return busy * program.slowdown_ppm // (MILLION + program.slowdown_ppm)


def wire_cost(program: Program) -> int:
    """How much longer than its `WIRE` time a step takes: that clock loses this share of all compute."""
    compute = sum(ns for ns, kind in zip(program.duration_ns, program.kinds, strict=True) if kind is OpKind.COMPUTE)
    return compute * program.collective_slowdown_ppm // (MILLION + program.collective_slowdown_ppm)


def add_node(tasks: Tasks, node: int, preds: list[int]) -> None:
    tasks.order.append(node)
    tasks.preds[node] = preds
    for pred in preds:
        tasks.succs[pred].append(node)


def check_program(program: Program, merging: MergingAssumption) -> None:
    for op, preds in enumerate(program.preds):
        late = next((pred for pred in (*preds, *program.waits_for[op]) if pred >= op), None)
        if late is not None:
            what = f"operation {op} ({program.names[op]}) needs operation {late}, which comes later"
            raise BoundError(compose("bounds", what, do="give the operations in a legal order"))
    if merging is MergingAssumption.EXCLUDED:
        return
    if len(program.latency_ns) != len(program.kinds):
        what = f"{len(program.latency_ns)} latencies for {len(program.kinds)} operations"
        raise BoundError(compose("bounds", what, do="give one latency for each operation, or exclude merging"))
    pairs = zip(program.latency_ns, program.duration_ns, strict=True)
    wrong = next((op for op, (latency, duration) in enumerate(pairs) if not 0 <= latency <= duration), None)
    if wrong is not None:
        found = f"latency {program.latency_ns[wrong]} of {program.duration_ns[wrong]} ns"
        raise BoundError(compose("bounds", f"operation {wrong} ({program.names[wrong]}) has {found}"))


class Machine:
    """The tasks of one resource as arrays, and how long sets of them keep the resource busy."""

    def __init__(self, tasks: Tasks, resource: int) -> None:
        self.nodes = tasks.on(resource)
        self.position = {node: position for position, node in enumerate(self.nodes)}
        self.work = int_array([tasks.duration[node] - tasks.latency[node] for node in self.nodes])
        self.latency = int_array([tasks.latency[node] for node in self.nodes])
        self.queue = int_array([tasks.queue[node] for node in self.nodes])
        self.kernel = int_array([tasks.kernel[node] for node in self.nodes])
        self.gap = tasks.gap
        self.queues = sorted({tasks.queue[node] for node in self.nodes if tasks.latency[node]})
        chained = {node for chain in tasks.chains for node in chain}
        self.chained = int_array([tasks.latency[node] if node in chained else 0 for node in self.nodes])
        """Latencies that no merging saves: those of chain members."""

    def busy_times(self, chosen: Integers) -> Integers:
        """How long each prefix of the chosen tasks occupies the resource at least: work, latencies, kernel gaps.

        With merging, the best case for a queue is one bucket with the longest latency of its members. The members of
        its chain cannot share a bucket, so their latencies add up; the larger of the two counts.
        """
        spans = np.cumsum(self.work[chosen])
        for queue in self.queues:
            is_here = self.queue[chosen] == queue
            longest = np.maximum.accumulate(np.where(is_here, self.latency[chosen], 0))
            spans += np.maximum(longest, np.cumsum(np.where(is_here, self.chained[chosen], 0)))
        return spans + self.gaps_between_kernels(chosen) if self.gap else spans

    def gaps_between_kernels(self, chosen: Integers) -> Integers:
        """For each prefix, the gaps between the kernels in several parts that it touches.

        Their durations include no gap, because no gap separates two parts of one kernel. `k` such kernels have at
        least `k - 1` gaps between them.
        """
        parts = np.flatnonzero(self.kernel[chosen] != NO_KERNEL)
        _, firsts = np.unique(self.kernel[chosen[parts]], return_index=True)
        is_first = np.zeros(len(chosen), np.int64)
        is_first[parts[firsts]] = 1
        return self.gap * np.maximum(0, np.cumsum(is_first) - 1)

    def members(self, mask: int) -> Integers:
        """The positions whose bits are set."""
        data = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(data, bitorder="little"))


def int_array(values: list[int]) -> Integers:
    return np.array(values, np.int64)
