"""Drag cuts: compute that is held back to hide a collective drags the collectives that depend on it behind that one.

Contract: take a collective `node` on a link, and the moment it starts. Compute that ends later is late; nothing that
`node` depends on is. Every collective of the link that depends on late compute starts behind that moment, as `node`
does, so the link carries all of them from there on. All other compute has ended by then, one after the other. So the
step takes the compute whose heads reach a threshold (which the head of `node` reaches too: all of it may be late), then
`node` and the least tail; late compute takes its work from that and adds what it drags.

    compute  |== a ==|== b ==|== c ==|-- d --|
    link                             |=== node ===|== of d ==|     d is saved before `node`, and its own added behind

No choice of late compute gains more than this: divide the work of each over collectives that depend on it; what a
collective gets beyond its own time is gained, and what is given to none. Work is divided from the last compute to the
first, as much to each collective as it has room for. Backwards in time the same holds of the first collectives.

With merging a collective counts as the least that it adds to a bucket. One in the bucket of `node` starts with it, so
nothing that it depends on is late.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from weft.bounds.earliest_starts import Heads
from weft.bounds.problem import COMPUTE, Integers, Machine, Tasks, column

Mask = NDArray[np.bool_]

MOST_LOOKED_AT = 64
"""Collectives of one link and direction whose promise is found: those that end last by their heads."""
MOST_TRIED = 6
"""Of those, the most promising, for which work is divided."""
MOST_STEPS = 20
"""Steps for each node that dividing work may take; what is left is given to none."""


@dataclass(frozen=True)
class DragCut:
    """A collective behind compute, or before it where time runs backwards, and how the work of late compute divides."""

    value: int
    node: int
    is_last: bool
    head: int
    """Compute counts whose heads reach this; in the direction of time in which the collective is the last."""
    tail: int
    """The least of the collective and of those that are dragged."""
    shares: list[tuple[int, int, int]]
    """Compute, a collective that depends on it, and the work that it is given."""


@dataclass(frozen=True)
class PromisingCollective:
    """A collective that may be worth it."""

    node: int
    promise: int
    """No threshold and no division of work gives more."""
    thresholds: list[int]


class WorkDivision:
    """How much more work each collective of a link can take, and who can reach which."""

    def __init__(self, tasks: Tasks, room: dict[int, int]) -> None:
        self.succs = tasks.succs
        self.room = room
        self.nearest = [-1] * len(tasks.succs)
        """A collective that depends on the node and had room when last seen."""
        self.arc = [0] * len(tasks.succs)
        """By node the first successor that may lead to room: once full, always full."""
        self.steps = MOST_STEPS * len(tasks.order)

    def find(self, node: int) -> int | None:
        """A collective with room that depends on a node."""
        path = [node]
        room, nearest, arc, succs = self.room, self.nearest, self.arc, self.succs
        while path and self.steps > 0:
            self.steps -= 1
            top = path[-1]
            found = top if room.get(top, 0) > 0 else nearest[top]
            if room.get(found, 0) > 0:
                for each in path:
                    nearest[each] = found
                return found
            if arc[top] < len(succs[top]):
                path.append(succs[top][arc[top]])
            else:
                path.pop()
                if path:
                    arc[path[-1]] += 1
        return None

    def divide(self, compute: list[int], work: list[int]) -> tuple[int, list[tuple[int, int, int]]]:
        """Work over collectives, the last compute first: what is given to none, and the shares."""
        gained = 0
        shares: list[tuple[int, int, int]] = []
        for node, left in zip(reversed(compute), reversed(work), strict=True):
            while left and (found := self.find(node)) is not None:
                share = min(left, self.room[found])
                self.room[found] -= share
                left -= share
                shares.append((node, found, share))
            gained += left
        return gained, shares


class DragCutSearch:
    """The compute of a program and the collectives of its links, in one direction of time."""

    def __init__(self, tasks: Tasks, heads: Heads, tails: Heads, is_last: bool) -> None:
        self.tasks, self.heads, self.tails, self.is_last = tasks, heads, tails, is_last
        self.compute = Machine(tasks, COMPUTE)
        self.starts = column([heads.start[node] for node in self.compute.nodes])
        self.ascending = np.argsort(self.starts, kind="stable")

    def best(self, link: int, above: int) -> DragCut | None:
        """The best on a link, where it is more than what is known."""
        on_link = self.tasks.on(link)
        room = {node: self.tasks.duration[node] - self.tasks.latency[node] for node in on_link}
        is_before = self.is_before(on_link)
        ends = sorted(on_link, key=lambda node: self.heads.start[node] + self.tasks.duration[node], reverse=True)
        sites = [self.site(node, sum(room.values()), is_before) for node in ends[:MOST_LOOKED_AT]]
        best: DragCut | None = None
        for site in sorted(sites, key=lambda site: -site.promise)[:MOST_TRIED]:
            tail = self.tails.start[site.node]
            for threshold, least in product(site.thresholds, sorted({0, tail})):
                if site.promise > above:
                    rooms = {node: ns for node, ns in room.items() if self.tails.start[node] >= least}
                    found = self.divide(site.node, threshold, rooms)
                    if found.value > above:
                        best, above = found, found.value
        return best

    def is_before(self, on_link: list[int]) -> Mask:
        """The compute that some collective of a link depends on."""
        is_before = [False] * len(self.tasks.preds)
        for node in on_link:
            is_before[node] = True
        for node in reversed(self.tasks.order):
            if is_before[node]:
                for pred in self.tasks.preds[node]:
                    is_before[pred] = True
        return np.array([is_before[node] for node in self.compute.nodes], np.bool_)

    def site(self, node: int, room: int, is_before: Mask) -> PromisingCollective:
        """Where the work that can count is the most: all that drags something, or what is never late and all rooms."""
        own = self.own(node)
        head = self.heads.start[node]
        with_all, most = self.lead(np.where(own | is_before, self.compute.work, 0), head)
        with_own, least = self.lead(np.where(own, self.compute.work, 0), head)
        rest = self.tasks.duration[node] + self.tails.start[node]
        return PromisingCollective(node, min(most, least + room) + rest, sorted({with_all, with_own}))

    def own(self, node: int) -> Mask:
        """The compute that is before a collective in every order."""
        own = np.zeros(len(self.compute.nodes), np.bool_)
        own[self.compute.members(self.heads.compute_before[node])] = True
        return own

    def lead(self, work: Integers, head: int) -> tuple[int, int]:
        """The threshold up to a head that gives the most with the work behind it, and what it gives."""
        starts = np.minimum(self.starts[self.ascending], head)
        ends = starts + np.cumsum(work[self.ascending][::-1])[::-1]
        best = int(ends.argmax())
        return int(self.starts[self.ascending[best]]), int(ends.max())

    def divide(self, node: int, threshold: int, room: dict[int, int]) -> DragCut:
        """The bound of one collective and one threshold."""
        counts = self.starts >= threshold
        lead = min(threshold, self.heads.start[node])
        duration, tail = self.tasks.duration[node], self.tails.start[node]
        late = np.flatnonzero(counts & ~self.own(node)).tolist()
        nodes, work = [self.compute.nodes[each] for each in late], [int(self.compute.work[each]) for each in late]
        gained, shares = WorkDivision(self.tasks, room).divide(nodes, work)
        tail = min([tail, *(self.tails.start[dragged] for _, dragged, _ in shares)])
        value = lead + int(self.compute.work[counts].sum()) - gained + duration + tail
        return DragCut(value, node, self.is_last, threshold, tail, shares)


def best_drag(forwards: tuple[Tasks, Heads], backwards: tuple[Tasks, Heads], above: int) -> DragCut | None:
    """The best found, of both directions and all links; None where there is none above what is known."""
    if not forwards[0].on(COMPUTE):
        return None
    best: DragCut | None = None
    for (tasks, heads), (_, tails), is_last in ((forwards, backwards, True), (backwards, forwards, False)):
        drags = DragCutSearch(tasks, heads, tails, is_last)
        for link in range(COMPUTE + 1, tasks.num_resources):
            found = drags.best(link, above)
            if found is not None:
                best, above = found, found.value
    return best
