"""One machine: the bound that a single resource gives once heads and tails of its tasks are known.

Contract: Carlier's one-machine bound. For any set of tasks, the smallest head, the total time and the smallest tail add
up. The maximum over all sets equals the length of Jackson's preemptive schedule, which always runs the available task
with the longest tail. So the schedule finds the best set without trying them all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from weft.bounds.earliest_starts import Heads
from weft.bounds.problem import Integers, Machine, Tasks, int_array


@dataclass(frozen=True)
class OneMachine:
    """The best set found on one resource."""

    value: int
    resource: int
    head: int
    """No task of the set has a smaller head."""
    tail: int
    nodes: tuple[int, ...]


def one_machine(machine: Machine, resource: int, heads: Heads, tails: Heads) -> OneMachine:
    """The better of two sets: all tasks of the resource, and Jackson's critical set."""
    starts = int_array([heads.start[node] for node in machine.nodes])
    afters = int_array([tails.start[node] for node in machine.nodes])
    choices = [(0, 0), critical(machine, starts, afters)]
    found = [value_of(machine, resource, starts, afters, choice) for choice in choices]
    return max(found, key=lambda one: one.value)


def value_of(
    machine: Machine, resource: int, starts: Integers, afters: Integers, choice: tuple[int, int]
) -> OneMachine:
    """The bound of the tasks whose heads and tails reach the chosen ones."""
    head, tail = choice
    chosen = np.flatnonzero((starts >= head) & (afters >= tail))
    lead, trail = int(starts[chosen].min()), int(afters[chosen].min())
    value = lead + int(machine.busy_times(chosen)[-1]) + trail
    return OneMachine(value, resource, lead, trail, tuple(machine.nodes[position] for position in chosen.tolist()))


def around(machine: Machine, resource: int, heads: Heads, tails: Heads, most: tuple[int, int]) -> OneMachine:
    """A good set, next to which other work of the resource has at most so much before and after it.

    The best head is chosen first, then the best tail.
    """
    starts = int_array([heads.start[node] for node in machine.nodes])
    afters = int_array([tails.start[node] for node in machine.nodes])
    chosen, found = np.arange(len(starts)), list[int]()
    for values, limit in zip((starts, afters), most, strict=True):
        chosen = chosen[np.argsort(-values[chosen], kind="stable")]
        ends = np.where(values[chosen] <= limit, values[chosen] + machine.busy_times(chosen), -1)
        found.append(int(values[chosen[ends.argmax()]]) if ends.max() >= 0 else 0)
        chosen = chosen[values[chosen] >= found[-1]]
    one = value_of(machine, resource, starts, afters, (found[0], found[1]))
    head, tail = min(one.head, most[0]), min(one.tail, most[1])
    return replace(one, value=one.value - (one.head - head) - (one.tail - tail), head=head, tail=tail)


def critical(machine: Machine, starts: Integers, afters: Integers) -> tuple[int, int]:
    """The smallest head and tail of Jackson's critical set.

    The schedule gives the tail. It ignores latencies and gaps, so the head is chosen afterwards, with `busy_times`.
    """
    tail = last_tail(starts.tolist(), afters.tolist(), machine.work.tolist())
    chosen = np.flatnonzero(afters >= tail)
    chosen = chosen[np.argsort(-starts[chosen], kind="stable")]
    ends = starts[chosen] + machine.busy_times(chosen)
    return int(starts[chosen[ends.argmax()]]), tail


def last_tail(starts: list[int], afters: list[int], work: list[int]) -> int:
    """The tail of the task that determines the length of Jackson's preemptive schedule."""
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
    """All resources; the first is the compute stream."""
    return [Machine(tasks, resource) for resource in range(tasks.num_resources)]
