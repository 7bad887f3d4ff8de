"""Idle cuts: compute between two collectives that it cannot hide, or others beside them on their queues.

Contract: take a collective `last` and some compute that it does not depend on. If all of that runs before `last`
starts, the step takes that compute, then `last` and its tail. If any of it ends later, the collectives that depend on
it start later too, so they stand behind `last` on its queue: the step takes the head of `last`, `last`, and the longest
of them with its tail, which is the compute's drag. The smaller of the two is a bound; compute is chosen by its drag.

`first` is the mirror image: compute that does not depend on it starts after it has ended, or has a collective of its
own that ended before. With both, all compute chosen stands between the two, or one of the other cases holds.

    first: |==|                         last: |====|
                compute compute compute
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from weft.bounds.earliest_starts import Heads
from weft.bounds.problem import Integers, Machine, Tasks, column

NO_DRAG = -1
MOST_SIDES = 256
"""Collectives of one direction that are tried alone; the most promising ones."""
MOST_PAIRED = 8
"""Of one direction, the best of those alone, that are tried with those of the other."""


@dataclass(frozen=True)
class CutEnd:
    """One collective as the end of a cut, in the direction of time in which it is the last."""

    node: int
    own: NDArray[np.bool_]
    """The compute that is before it in every order."""
    drag: Integers
    """What other compute has behind it on the queue."""
    reach: int
    """Its head and duration."""
    rest: int
    """Its duration and tail."""


@dataclass(frozen=True)
class IdleCut:
    """Compute between two collectives, or on one side of one."""

    value: int
    first: CutEnd | None
    last: CutEnd | None

    @property
    def first_drag(self) -> int:
        return max(0, self.value - self.first.reach) if self.first else 0

    @property
    def last_drag(self) -> int:
        return max(0, self.value - self.last.reach) if self.last else 0


class IdleCutSearch:
    """The compute of a program, and the collectives around it in both directions."""

    def __init__(self, forwards: tuple[Tasks, Heads], backwards: tuple[Tasks, Heads], compute: Machine) -> None:
        self.work = compute.work
        self.compute = compute
        self.total = int(self.work.sum())
        self.lead = min(forwards[1].start[node] for node in compute.nodes)
        self.trail = min(backwards[1].start[node] for node in compute.nodes)
        self.lasts = self.sides(*forwards, backwards[1], is_last=True)
        self.firsts = self.sides(*backwards, forwards[1], is_last=False)

    def best(self) -> IdleCut | None:
        """The best cut with one end, or with two of those that are best alone."""
        lasts = sorted((self.search(None, side) for side in self.lasts), key=lambda cut: -cut.value)[:MOST_PAIRED]
        firsts = sorted((self.search(side, None) for side in self.firsts), key=lambda cut: -cut.value)[:MOST_PAIRED]
        found = [*lasts[:1], *firsts[:1]]
        for first, last in product(firsts, lasts):
            most = max(cut.value for cut in found)
            cut = self.search(first.first, last.last, above=most)
            if cut.value > most:
                found.append(cut)
        return max(found, key=lambda cut: cut.value, default=None)

    def search(self, first: CutEnd | None, last: CutEnd | None, above: int = 0) -> IdleCut:
        """The largest value that all cases reach, by bisection: a larger one leaves less compute inside."""
        low, high = above, self.ends(first, last) + self.total
        if above and not self.is_reached(above + 1, first, last):
            return IdleCut(above, first, last)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.is_reached(middle, first, last) else (low, middle - 1)
        return IdleCut(low, first, last)

    def ends(self, first: CutEnd | None, last: CutEnd | None) -> int:
        return (first.rest if first else self.lead) + (last.rest if last else self.trail)

    def is_reached(self, value: int, first: CutEnd | None, last: CutEnd | None) -> bool:
        inside = np.ones(len(self.work), np.bool_)
        for side in (first, last):
            if side is not None:
                inside &= side.own | ((side.drag >= value - side.reach) & (side.drag != NO_DRAG))
        return bool(inside.any()) and self.ends(first, last) + int(self.work[inside].sum()) >= value

    def sides(self, tasks: Tasks, heads: Heads, tails: Heads, is_last: bool) -> list[CutEnd]:
        """The most promising collectives, as the ends of cuts in one direction of time."""
        drags = {queue: self.drags(tasks, tails, queue) for queue in sorted(set(tasks.queue)) if queue >= 0}
        most = {queue: int(drag.max(initial=0)) for queue, drag in drags.items()}

        def promise(node: int) -> int:
            alone = self.total + tasks.duration[node] + tails.start[node]
            return min(alone, heads.start[node] + tasks.duration[node] + most[tasks.queue[node]])

        nodes = sorted((node for node in tasks.order if tasks.queue[node] >= 0), key=promise, reverse=True)
        return [
            CutEnd(
                node,
                self.own(heads.compute_before[node], is_last),
                drags[tasks.queue[node]],
                heads.start[node] + tasks.duration[node],
                tasks.duration[node] + tails.start[node],
            )
            for node in nodes[:MOST_SIDES]
        ]

    def own(self, mask: int, is_last: bool) -> NDArray[np.bool_]:
        own = np.zeros(len(self.work), np.bool_)
        own[self.compute.members(mask)] = True
        return own if is_last else own[::-1]

    def drags(self, tasks: Tasks, tails: Heads, queue: int) -> Integers:
        """For all compute the longest of what depends on it on a queue, with its tail."""
        drag = [NO_DRAG] * len(tasks.preds)
        for node in reversed(tasks.order):
            most = drag[node]
            if tasks.queue[node] == queue:
                most = drag[node] = max(most, tasks.duration[node] + tails.start[node])
            if most > NO_DRAG:
                for pred in tasks.preds[node]:
                    if drag[pred] < most:
                        drag[pred] = most
        return column([drag[node] for node in self.compute.nodes])


def best_cut(forwards: tuple[Tasks, Heads], backwards: tuple[Tasks, Heads], compute: Machine) -> IdleCut | None:
    """The best cut found; None where there is no compute or no collective."""
    if not compute.nodes or not any(queue >= 0 for queue in forwards[0].queue):
        return None
    return IdleCutSearch(forwards, backwards, compute).best()
