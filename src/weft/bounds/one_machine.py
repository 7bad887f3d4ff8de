"""One machine: what a resource alone forces, given when its tasks can start and what must come behind them.

Contract: Jackson's preemptive bound. For any set of tasks the least head, the time of all and the least tail add up;
the largest of these over all sets is what a preemptive schedule takes that always runs the one with the longest tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from weft.bounds.earliest_starts import Heads
from weft.bounds.problem import Integers, Machine, Tasks, column


@dataclass(frozen=True)
class OneMachine:
    """The best set found on one resource."""

    value: int
    resource: int
    head: int
    tail: int
    nodes: tuple[int, ...]


def one_machine(machine: Machine, resource: int, heads: Heads, tails: Heads) -> OneMachine:
    """The best of: all tasks of the resource; Jackson's set."""
    starts = column([heads.start[node] for node in machine.nodes])
    afters = column([tails.start[node] for node in machine.nodes])
    choices = [(0, 0), critical(machine, starts, afters)]
    found = [value_of(machine, resource, starts, afters, choice) for choice in choices]
    return max(found, key=lambda one: one.value)


def value_of(
    machine: Machine, resource: int, starts: Integers, afters: Integers, choice: tuple[int, int]
) -> OneMachine:
    head, tail = choice
    chosen = np.flatnonzero((starts >= head) & (afters >= tail))
    lead, trail = int(starts[chosen].min()), int(afters[chosen].min())
    value = lead + int(machine.spans(chosen)[-1]) + trail
    return OneMachine(value, resource, lead, trail, tuple(machine.nodes[position] for position in chosen.tolist()))


def critical(machine: Machine, starts: Integers, afters: Integers) -> tuple[int, int]:
    """The head and tail that bound Jackson's critical set."""
    tail = last_tail(starts.tolist(), afters.tolist(), machine.work.tolist())
    chosen = np.flatnonzero(afters >= tail)
    chosen = chosen[np.argsort(-starts[chosen], kind="stable")]
    ends = starts[chosen] + machine.spans(chosen)
    return int(starts[chosen[ends.argmax()]]), tail


def last_tail(starts: list[int], afters: list[int], work: list[int]) -> int:
    """The tail of the task that ends Jackson's preemptive schedule last."""
    arrivals = sorted(range(len(starts)), key=starts.__getitem__)
    left = list(work)
    ready: list[tuple[int, int]] = []
    now = latest = tail = arrived = 0
    while arrived < len(arrivals) or ready:
        if not ready:
            now = max(now, starts[arrivals[arrived]])
        while arrived < len(arrivals) and starts[arrivals[arrived]] <= now:
            heappush(ready, (-afters[arrivals[arrived]], arrivals[arrived]))
            arrived += 1
        task = ready[0][1]
        until = starts[arrivals[arrived]] if arrived < len(arrivals) else now + left[task]
        runs = min(left[task], until - now)
        now += runs
        left[task] -= runs
        if not left[task]:
            heappop(ready)
            if now + afters[task] > latest:
                latest, tail = now + afters[task], afters[task]
    return tail


def machines_of(tasks: Tasks) -> list[Machine]:
    return [Machine(tasks, resource) for resource in range(tasks.num_resources)]
