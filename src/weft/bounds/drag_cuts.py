"""Drag cuts: delaying compute to hide a collective also delays the collectives that depend on that compute.

Contract: choose a collective `node` on a link, and consider the moment it starts. Compute that ends after that moment
is late. No ancestor of `node` is late. Every collective of the link that depends on late compute starts after that
moment, so from then on the link carries `node` and all of those. All other compute has ended by then, one kernel after
the other. So the step takes the compute whose heads reach a threshold (the head of `node` counts too, since all compute
may be late), then `node` and the smallest tail. Late compute shortens this by its own work and lengthens it by the
collectives that it drags along.

    compute  |== a ==|== b ==|== c ==|-- d --|
    link                             |=== node ===|=== of d ===|
                                      d is late: this saves its work before `node`, and adds its collective after it

The bound must hold for the best choice of late compute, which is a maximum-closure problem. A division of the work of
each compute task over collectives that depend on it is a flow, so by max-flow min-cut duality every division limits
what any choice can gain: the work beyond the duration of a collective, and the work that no collective receives. A good
division gives a tight bound; a poor one is still valid. Work is divided from the last task to the first, as much to
each collective as it has room for. The same holds with time reversed, for the first collectives of a step.

With merging, a collective counts as the least that it adds to a bucket. A collective in the bucket of `node` starts
together with `node`, so none of its ancestors is late.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from weft.bounds.earliest_starts import Heads
from weft.bounds.problem import COMPUTE, Integers, Machine, Tasks, int_array

Mask = NDArray[np.bool_]

MAX_PROMISING = 64
"""Collectives considered for each link and direction: those with the latest head plus duration."""
MAX_TRIED = 6
"""Collectives for which work is divided, most promising first."""
MAX_STEPS_PER_NODE = 20
"""Search steps per node that a division may take. Work that is left over then counts as gain, which is safe."""


@dataclass(frozen=True)
class DragCut:
    """A collective after compute (before it, with time reversed), and the division of late work."""

    value: int
    node: int
    is_last: bool
    head: int
    """Compute counts if its head reaches this, in the direction of time in which the collective is last."""
    tail: int
    """The smallest tail of the collective and of those that are dragged."""
    shares: list[tuple[int, int, int]]
    """(compute, a collective that depends on it, work that the collective receives)."""


@dataclass(frozen=True)
class PromisingCollective:
    """A collective at which a cut may beat the bounds known so far."""

    node: int
    most_possible: int
    """No threshold and no division of work gives a larger bound."""
    thresholds: list[int]


class WorkDivision:
    """Divides the work of late compute over the collectives of a link that depend on it."""

    def __init__(self, tasks: Tasks, room: dict[int, int]) -> None:
        self.succs = tasks.succs
        self.room = room
        self.nearest = [-1] * len(tasks.succs)
        """By node, a collective that depends on it and had room when last seen."""
        self.arc = [0] * len(tasks.succs)
        """By node, its first successor that may lead to room. Full collectives stay full, so this only moves on."""
        self.steps = MAX_STEPS_PER_NODE * len(tasks.order)

    def find(self, node: int) -> int | None:
        """A collective with room that depends on a node; None if all are full or the steps are used up."""
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
        """Divide work, starting at the last compute; return the work that no collective received, and the shares."""
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
        self.starts = int_array([heads.start[node] for node in self.compute.nodes])
        self.ascending = np.argsort(self.starts, kind="stable")

    def best(self, link: int, above: int) -> DragCut | None:
        """The best cut on a link; None if it does not beat what is known."""
        on_link = self.tasks.on(link)
        room = {node: self.tasks.duration[node] - self.tasks.latency[node] for node in on_link}
        feeds_link = self.feeds_link(on_link)
        ends = sorted(on_link, key=lambda node: self.heads.start[node] + self.tasks.duration[node], reverse=True)
        promising = [self.promising(node, sum(room.values()), feeds_link) for node in ends[:MAX_PROMISING]]
        best: DragCut | None = None
        for candidate in sorted(promising, key=lambda candidate: -candidate.most_possible)[:MAX_TRIED]:
            tail = self.tails.start[candidate.node]
            for threshold, least in product(candidate.thresholds, sorted({0, tail})):
                if candidate.most_possible > above:
                    rooms = {node: ns for node, ns in room.items() if self.tails.start[node] >= least}
                    found = self.divide(candidate.node, threshold, rooms)
                    if found.value > above:
                        best, above = found, found.value
        return best

    def feeds_link(self, on_link: list[int]) -> Mask:
        """Compute that some collective of a link depends on."""
        feeds_link = [False] * len(self.tasks.preds)
        for node in on_link:
            feeds_link[node] = True
        for node in reversed(self.tasks.order):
            if feeds_link[node]:
                for pred in self.tasks.preds[node]:
                    feeds_link[pred] = True
        return np.array([feeds_link[node] for node in self.compute.nodes], np.bool_)

    def promising(self, node: int, room: int, feeds_link: Mask) -> PromisingCollective:
        """An upper limit on the cuts at a collective, and the thresholds worth trying.

        At most all compute that drags something counts; and at most the ancestors, which are never late, plus as much
        late work as all collectives have room for.
        """
        ancestors = self.ancestors(node)
        head = self.heads.start[node]
        with_all, most = self.best_threshold(np.where(ancestors | feeds_link, self.compute.work, 0), head)
        with_own, least = self.best_threshold(np.where(ancestors, self.compute.work, 0), head)
        rest = self.tasks.duration[node] + self.tails.start[node]
        return PromisingCollective(node, min(most, least + room) + rest, sorted({with_all, with_own}))

    def ancestors(self, node: int) -> Mask:
        """Compute that comes before a collective in every order."""
        ancestors = np.zeros(len(self.compute.nodes), np.bool_)
        ancestors[self.compute.members(self.heads.compute_before[node])] = True
        return ancestors

    def best_threshold(self, work: Integers, head: int) -> tuple[int, int]:
        """The threshold, up to a head, that maximises threshold plus work whose heads reach it; and that maximum."""
        starts = np.minimum(self.starts[self.ascending], head)
        ends = starts + np.cumsum(work[self.ascending][::-1])[::-1]
        best = int(ends.argmax())
        return int(self.starts[self.ascending[best]]), int(ends.max())

    def divide(self, node: int, threshold: int, room: dict[int, int]) -> DragCut:
        """The bound of one collective and one threshold."""
        counts = self.starts >= threshold
        lead = min(threshold, self.heads.start[node])
        duration, tail = self.tasks.duration[node], self.tails.start[node]
        late = np.flatnonzero(counts & ~self.ancestors(node)).tolist()
        nodes, work = [self.compute.nodes[each] for each in late], [int(self.compute.work[each]) for each in late]
        gained, shares = WorkDivision(self.tasks, room).divide(nodes, work)
        tail = min([tail, *(self.tails.start[dragged] for _, dragged, _ in shares)])
        value = lead + int(self.compute.work[counts].sum()) - gained + duration + tail
        return DragCut(value, node, self.is_last, threshold, tail, shares)


def best_drag_cut(forwards: tuple[Tasks, Heads], backwards: tuple[Tasks, Heads], above: int) -> DragCut | None:
    """The best cut over both directions and all links; None if none beats what is known."""
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
