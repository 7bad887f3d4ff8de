"""Tasks: a program without its order, as bounds see it. The same form serves both directions of time.

Contract: a node is a moment or an interval that ends before its successors start, in every legal order. Operation `i`
is node `i`: its place on the compute stream. The collective of launch `i` is node `i + n`, between the launch and its
waits. What works on a resource has one: the compute stream is `COMPUTE`, link `k` is `k + 1`. Queues need no resource
of their own: what they run, their link carries, and a link carries no more than one second of it in a second.

The launch gap belongs to the compute before it: what is issued next comes no earlier. So all bounds are bounds of the
step and one gap. Gaps behind launches are left out: their collectives do not wait for them. Kernels in several parts
have at least the gaps between them, whatever the order.

Where overlap slows compute, there is a second form, `is_slowed`, in which time passes slower while some link is busy:
by as much as compute is slowed. Compute takes its own time there, and collectives take that much less. What the step
takes more than there is `overlap_cost`: the share of the time of the link that is lost. The gap behind a whole kernel
takes its own time too, so it is not counted as time of the link.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from weft.errors import WeftError, compose
from weft.simulation.program import Program, Sort

NO_RESOURCE = -1
NO_KERNEL = -1
COMPUTE = 0

Integers = NDArray[np.int64]


class BoundError(WeftError):
    """A program that no bound can be found for, or a certificate that proves nothing."""


class Merging(StrEnum):
    """Whether collectives of one queue may become one."""

    ALLOWED = "allowed"
    EXCLUDED = "excluded"


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

    def reversed(self) -> Tasks:
        """The same with time running backwards: heads there are tails here."""
        return Tasks(
            self.order[::-1],
            self.succs,
            self.preds,
            self.duration,
            self.resource,
            self.queue,
            self.latency,
            self.kernel,
            self.num_resources,
            self.gap,
        )

    def on(self, resource: int) -> list[int]:
        """The nodes that take time on a resource, in order."""
        return [node for node in self.order if self.resource[node] == resource and self.duration[node]]


MILLION = 1_000_000


def tasks_of(program: Program, merging: Merging, is_slowed: bool = False) -> Tasks:
    check_program(program, merging)
    slowdown_ppm = program.slowdown_ppm if is_slowed else 0
    num_ops = len(program.sorts)
    tasks = Tasks(
        order=[],
        preds=[[] for _ in range(2 * num_ops)],
        succs=[[] for _ in range(2 * num_ops)],
        duration=[0] * (2 * num_ops),
        resource=[NO_RESOURCE] * (2 * num_ops),
        queue=[-1] * (2 * num_ops),
        latency=[0] * (2 * num_ops),
        kernel=[NO_KERNEL] * (2 * num_ops),
        num_resources=1 + len(program.links),
        gap=shrunk(program.launch_gap_ns, slowdown_ppm),
    )
    kernels = Counter(program.kernel)
    for op, sort in enumerate(program.sorts):
        ends = [launch + num_ops for launch in program.waits_for[op]]
        link(tasks, op, [*dict.fromkeys([*program.preds[op], *ends])])
        if sort is Sort.COMPUTE:
            kernel = program.kernel[op] if program.kernel else NO_KERNEL
            is_whole = kernel == NO_KERNEL or kernels[kernel] == 1
            tasks.kernel[op] = NO_KERNEL if is_whole else kernel
            tasks.duration[op] = program.duration_ns[op]
            if program.duration_ns[op] and is_whole:
                tasks.duration[op] += program.launch_gap_ns
            tasks.resource[op] = COMPUTE
        elif sort is Sort.LAUNCH:
            node = op + num_ops
            link(tasks, node, [op])
            latency = program.latency_ns[op] if merging is Merging.ALLOWED else 0
            tasks.latency[node] = shrunk(latency, slowdown_ppm)
            tasks.duration[node] = tasks.latency[node] + shrunk(program.duration_ns[op] - latency, slowdown_ppm)
            tasks.queue[node] = program.queue[op]
            tasks.resource[node] = 1 + program.queues[program.queue[op]].link
    return tasks


def shrunk(time: int, slowdown_ppm: int) -> int:
    """What compute gets done in a time in which it is slowed."""
    return time * MILLION // (MILLION + slowdown_ppm)


def overlap_cost(program: Program, tasks: Tasks) -> int:
    """What a step takes at least beyond the bounds of the slowed form; tasks are those of the other form."""
    links = [Machine(tasks, resource) for resource in range(COMPUTE + 1, tasks.num_resources)]
    busiest = max((int(link.spans(np.arange(len(link.nodes)))[-1]) for link in links if link.nodes), default=0)
    num_whole = sum(tasks.kernel[node] == NO_KERNEL for node in tasks.on(COMPUTE))
    beside = max(0, busiest - num_whole * program.launch_gap_ns)
    return beside * program.slowdown_ppm // (MILLION + program.slowdown_ppm)


def link(tasks: Tasks, node: int, preds: list[int]) -> None:
    tasks.order.append(node)
    tasks.preds[node] = preds
    for pred in preds:
        tasks.succs[pred].append(node)


def check_program(program: Program, merging: Merging) -> None:
    for op, preds in enumerate(program.preds):
        late = next((pred for pred in (*preds, *program.waits_for[op]) if pred >= op), None)
        if late is not None:
            what = f"operation {op} ({program.names[op]}) needs operation {late}, which is not before it"
            raise BoundError(compose("bounds", what, do="give operations in an order that is legal"))
    if merging is Merging.EXCLUDED:
        return
    if len(program.latency_ns) != len(program.sorts):
        what = f"{len(program.latency_ns)} latencies for {len(program.sorts)} operations"
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

    def spans(self, chosen: Integers) -> Integers:
        """How long each prefix of some tasks takes at least: work, one latency per queue, gaps between kernels."""
        spans = np.cumsum(self.work[chosen])
        for queue in self.queues:
            latency = np.where(self.queue[chosen] == queue, self.latency[chosen], 0)
            spans += np.maximum.accumulate(latency)
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
