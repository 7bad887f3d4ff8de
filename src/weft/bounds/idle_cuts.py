"""Idle cuts: a collective that compute cannot hide, because hiding it would delay another one on its queue.

Contract: choose a collective `last` and some compute that does not depend on it. There are two cases.

    1. All of that compute ends before `last` starts. The step takes the compute, then `last`, then its tail.
    2. Some of it ends later. The collectives that depend on it start later as well, so they follow `last` on its queue.
       The step takes the head of `last`, `last`, and the longest of those collectives with its tail (the drag).

The smaller of the two is a bound. Only compute with a large enough drag is chosen, so that case 2 is not the weak one.
`first` is the mirror image: compute that it does not depend on starts after `first` has ended, or a collective that
this compute needs ended before `first`. With both ends, the chosen compute lies between them or another case holds.

    queue    |= first =|                             |= last =|= dragged =|
    compute            |== a ==|== b ==|== c ==|
                       nothing of a, b, c can move out without dragging a collective along
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from weft.bounds.earliest_starts import Heads
from weft.bounds.problem import Integers, Machine, Tasks, int_array

NO_DRAG = -1
MAX_ENDS = 256
"""Collectives tried as a single end in each direction, most promising first. Limits the time."""
MAX_PAIRED = 8
"""Best single ends of each direction that are combined into pairs."""


@dataclass(frozen=True)
class CutEnd:
    """One collective as the end of a cut, seen in the direction of time in which it comes last."""

    node: int
    ancestors: NDArray[np.bool_]
    """Compute that comes before it in every order."""
    drag: Integers
    """For all compute, the longest collective of this queue that depends on it, tail included."""
    reach: int
    """Head plus duration."""
    rest: int
    """Duration plus tail."""


@dataclass(frozen=True)
class IdleCut:
    """Compute between two collectives, or before or after one."""

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
    """The compute of a program, and the collectives that may end a cut."""

    def __init__(self, forwards: tuple[Tasks, Heads], backwards: tuple[Tasks, Heads], compute: Machine) -> None:
        self.work = compute.work
        self.compute = compute
        self.total = int(self.work.sum())
        self.lead = min(forwards[1].start[node] for node in compute.nodes)
        self.trail = min(backwards[1].start[node] for node in compute.nodes)
        self.lasts = self.cut_ends(*forwards, backwards[1], is_last=True)
        self.firsts = self.cut_ends(*backwards, forwards[1], is_last=False)

    def best(self) -> IdleCut | None:
        """The best cut with one end, or with two ends that are good alone."""
        lasts = sorted((self.search(None, end) for end in self.lasts), key=lambda cut: -cut.value)[:MAX_PAIRED]
        firsts = sorted((self.search(end, None) for end in self.firsts), key=lambda cut: -cut.value)[:MAX_PAIRED]
        found = [*lasts[:1], *firsts[:1]]
        for first, last in product(firsts, lasts):
            best_value = max(cut.value for cut in found)
            cut = self.search(first.first, last.last, above=best_value)
            if cut.value > best_value:
                found.append(cut)
        return max(found, key=lambda cut: cut.value, default=None)

    def search(self, first: CutEnd | None, last: CutEnd | None, above: int = 0) -> IdleCut:
        """The largest value that every case reaches.

        Bisection works because a larger value asks for a larger drag, which leaves less compute inside the cut.
        """
        low, high = above, self.ends(first, last) + self.total
        if above and not self.is_reached(above + 1, first, last):
            return IdleCut(above, first, last)
        single = first if last is None else last if first is None else None
        inside = _SortedDrags(single, self.work) if single is not None else None
        while low < high:
            middle = (low + high + 1) // 2
            if inside is not None:
                chosen = inside.work_for(middle)
                is_reached = chosen is not None and self.ends(first, last) + chosen >= middle
            else:
                is_reached = self.is_reached(middle, first, last)
            low, high = (middle, high) if is_reached else (low, middle - 1)
        return IdleCut(low, first, last)

    def ends(self, first: CutEnd | None, last: CutEnd | None) -> int:
        return (first.rest if first else self.lead) + (last.rest if last else self.trail)

    def is_reached(self, value: int, first: CutEnd | None, last: CutEnd | None) -> bool:
        inside = np.ones(len(self.work), np.bool_)
        for end in (first, last):
            if end is not None:
                inside &= end.ancestors | ((end.drag >= value - end.reach) & (end.drag != NO_DRAG))
        return bool(inside.any()) and self.ends(first, last) + int(self.work[inside].sum()) >= value

    def cut_ends(self, tasks: Tasks, heads: Heads, tails: Heads, is_last: bool) -> list[CutEnd]:
        """The most promising collectives as ends of cuts, in one direction of time."""
        drags = {queue: self.drags(tasks, tails, queue) for queue in sorted(set(tasks.queue)) if queue >= 0}
        largest_drag = {queue: int(drag.max(initial=0)) for queue, drag in drags.items()}

        def most_possible(node: int) -> int:
            alone = self.total + tasks.duration[node] + tails.start[node]
            return min(alone, heads.start[node] + tasks.duration[node] + largest_drag[tasks.queue[node]])

        nodes = sorted((node for node in tasks.order if tasks.queue[node] >= 0), key=most_possible, reverse=True)
        return [
            CutEnd(
                node,
                self.ancestors(heads.compute_before[node], is_last),
                drags[tasks.queue[node]],
                heads.start[node] + tasks.duration[node],
                tasks.duration[node] + tails.start[node],
            )
            for node in nodes[:MAX_ENDS]
        ]

    def ancestors(self, mask: int, is_last: bool) -> NDArray[np.bool_]:
        """A bit mask as an array. Backwards in time the tasks are numbered from the end."""
        ancestors = np.zeros(len(self.work), np.bool_)
        ancestors[self.compute.members(mask)] = True
        return ancestors if is_last else ancestors[::-1]

    def drags(self, tasks: Tasks, tails: Heads, queue: int) -> Integers:
        """For all compute, the longest collective of a queue that depends on it, tail included."""
        drag = [NO_DRAG] * len(tasks.preds)
        for node in reversed(tasks.order):
            longest = drag[node]
            if tasks.queue[node] == queue:
                longest = drag[node] = max(longest, tasks.duration[node] + tails.start[node])
            if longest > NO_DRAG:
                for pred in tasks.preds[node]:
                    if drag[pred] < longest:
                        drag[pred] = longest
        return int_array([drag[node] for node in self.compute.nodes])


class _SortedDrags:
    """The compute of a cut with one end, sorted by drag, so that the work for any value is found by bisection."""

    def __init__(self, end: CutEnd, work: Integers) -> None:
        self.reach = end.reach
        self.own = int(work[end.ancestors].sum()) if end.ancestors.any() else None
        """Work of the ancestors, which every value chooses; None without ancestors."""
        rest = np.flatnonzero(~end.ancestors & (end.drag != NO_DRAG))
        rest = rest[np.argsort(end.drag[rest], kind="stable")]
        self.drags: list[int] = end.drag[rest].tolist()
        self.work: list[int] = [*np.cumsum(work[rest][::-1])[::-1].tolist(), 0]
        """The work from each place on."""

    def work_for(self, value: int) -> int | None:
        """The work that a value chooses; None if it chooses no compute."""
        place = bisect_left(self.drags, value - self.reach)
        if self.own is None:
            return self.work[place] if place < len(self.drags) else None
        return self.own + self.work[place]


def best_idle_cut(forwards: tuple[Tasks, Heads], backwards: tuple[Tasks, Heads], compute: Machine) -> IdleCut | None:
    """The best cut found; None without compute or without collectives."""
    if not compute.nodes or not any(queue >= 0 for queue in forwards[0].queue):
        return None
    return IdleCutSearch(forwards, backwards, compute).best()
