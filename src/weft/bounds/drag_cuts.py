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

Two extensions make cuts tighter:

- Latencies. Dragged collectives are launched in one bucket or in several, and each bucket has a latency. At the
  start of a bucket, the compute that is left feeds only later buckets. If each dragged collective receives at most
  `ratio` times its own duration without latency, this limits how far the last buckets can shrink (`least_end`). A ratio
  above 1 leaves less work without a receiver, but pays only if latencies are long; collectives with short latencies
  keep the ratio 1.
- Two collectives in a row. If `node` needs the collective `through` on another link, late compute is what ends after
  `through` has started. It drags the collectives of the link that depend on it through other collectives of that queue,
  since these follow `through`. The step then has both collectives after the compute.

    compute  |== a ==|== b ==|== c ==|-- d --|
    queue                            |= through =|= of d =|
    link                                         |=== node ===|=== of d ===|
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
MAX_NEAR = 200
"""Nodes visited to find the collectives that one needs directly."""
NONE = -1
EVEN = 1000
"""The ratio of 1, in thousandths."""
RATIOS = (1120, 1200, 1280, 1360, 1500, 1800)
"""Ratios that are tried with long latencies."""
LONG = (0.5, 0.8, 0.95)
"""Latencies count as long if collectives with this share of a link's work have them."""
MAX_STEPS_PER_NODE = 20
"""Search steps per node that a division may take. Work that is left over then counts as gain, which is safe."""


@dataclass(frozen=True)
class DragCut:
    """A collective after compute (before it, with time reversed), and the division of late work."""

    value: int
    node: int
    is_last: bool
    through: int
    """The collective before it, on another link; -1 for none."""
    ratio: int
    """How much late work a collective may receive at most, in thousandths of its duration without latency; 1000 (that
    is, 1) if its latency is shorter than `latency`."""
    latency: int
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
    through: int
    most_possible: int
    """No threshold and no division of work with the ratio 1 gives a larger bound."""
    most_with_latencies: int
    """No ratio does."""
    thresholds: list[int]


class WorkDivision:
    """Divides the work of late compute over the collectives of a link that depend on it."""

    def __init__(self, succs: list[list[int]], room: dict[int, int]) -> None:
        self.succs = succs
        self.room = room
        self.nearest = [-1] * len(succs)
        """By node, a collective that depends on it and had room when last seen."""
        self.arc = [0] * len(succs)
        """By node, its first successor that may lead to room. Full collectives stay full, so this only moves on."""
        self.steps = MAX_STEPS_PER_NODE * len(succs)

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


def least_end(first: int, ratio: int, latency: int, is_joined: bool, rooms: list[int]) -> int:
    """The least time from the start of a cut's collectives to the end of the link's work, less the work that is late.

    `first` is the time of the cut's collectives. `rooms` are the durations, without latencies, of the others that may
    be dragged. They run in buckets, each with at least this latency; if `is_joined`, one bucket may be that of the
    cut's last collective. Each receives at most `ratio` times its duration of late work. Collectives with the ratio 1
    do not count: they take at least as long as the work that they receive.
    """
    if ratio <= EVEN:
        return first
    total = sum(rooms)

    def is_possible(end: int) -> bool:
        # Buckets from the last to the first. `carried`: the most that a bucket and all after it can carry. When the
        # bucket starts, the work left is at most `ratio` times what the later ones carry.
        carried = 0
        for num in range(1, len(rooms) + 1):
            most = min(total, end - num * latency - (-carried * ratio // EVEN))
            if most < carried:
                return False
            carried = most
            if EVEN * (end - first - (num - is_joined) * latency) + (ratio - EVEN) * carried >= 0:
                return True
        return False

    low, high = 0, first
    while low < high:  # the largest time that is not possible; a shorter one is not possible either
        middle = (low + high + 1) // 2
        low, high = (low, middle - 1) if is_possible(middle) else (middle, high)
    return low


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
        promising = [
            self.promising(node, through, sum(room.values()), feeds_link)
            for node in ends[:MAX_PROMISING]
            for through in (NONE, *self.throughs(node, link))
        ]
        promising.sort(key=lambda candidate: -candidate.most_possible)
        best: DragCut | None = None
        for candidate in promising[:MAX_TRIED]:
            tail = self.tails.start[candidate.node]
            for threshold, least in product(candidate.thresholds, sorted({0, tail})):
                if candidate.most_possible > above:
                    rooms = {node: ns for node, ns in room.items() if self.tails.start[node] >= least}
                    found = self.divide(candidate.node, threshold, rooms, candidate.through)
                    if found.value > above:
                        best, above = found, found.value
        latencies = self.long_latencies(room)
        latest = max(promising, key=lambda candidate: candidate.most_with_latencies, default=None)
        if latest is not None:
            for threshold, latency, ratio in product(latest.thresholds, latencies, RATIOS):
                if latest.most_with_latencies > above:
                    found = self.divide(latest.node, threshold, room, latest.through, ratio, latency)
                    if found.value > above:
                        best, above = found, found.value
        return best

    def long_latencies(self, room: dict[int, int]) -> list[int]:
        """Latencies that collectives with most of a link's work have, longest first; none if merging saves none."""
        ranked = sorted(room, key=lambda node: -self.tasks.latency[node])
        carried, total, found = 0, sum(room.values()), list[int]()
        for node in ranked:
            if len(found) < len(LONG) and carried + room[node] >= total * LONG[len(found)]:
                found.append(self.tasks.latency[node])
            carried += room[node]
        return [latency for latency in dict.fromkeys(found) if latency]

    def throughs(self, node: int, link: int) -> list[int]:
        """The collectives of other links that a collective needs directly."""
        found, stack, seen = list[int](), [node], {node}
        while stack and len(seen) < MAX_NEAR:
            for pred in self.tasks.preds[stack.pop()]:
                if pred not in seen:
                    seen.add(pred)
                    if self.tasks.queue[pred] < 0:
                        stack.append(pred)
                    elif self.tasks.resource[pred] != link and self.tasks.duration[pred]:
                        found.append(pred)
        return sorted(found)

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

    def promising(self, node: int, through: int, room: int, feeds_link: Mask) -> PromisingCollective:
        """An upper limit on the cuts at a collective, and the thresholds worth trying.

        At most all compute that drags something counts; and at most the ancestors, which are never late, plus as much
        late work as all collectives have room for.
        """
        start = node if through == NONE else through
        ancestors = self.ancestors(start)
        head = self.heads.start[start]
        with_all, most = self.best_threshold(np.where(ancestors | feeds_link, self.compute.work, 0), head)
        with_own, least = self.best_threshold(np.where(ancestors, self.compute.work, 0), head)
        rest = self.first(node, through) + self.tails.start[node]
        possible = min(most, least + room) + rest
        return PromisingCollective(node, through, possible, most + rest, sorted({with_all, with_own}))

    def first(self, node: int, through: int) -> int:
        """The time of a collective, and of the one before it."""
        return self.tasks.duration[node] + (self.tasks.duration[through] if through != NONE else 0)

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

    def divide(
        self,
        node: int,
        threshold: int,
        room: dict[int, int],
        through: int = NONE,
        ratio: int = EVEN,
        latency: int = 0,
    ) -> DragCut:
        """The bound of one collective (after another one), one threshold and one ratio for long latencies."""
        start = node if through == NONE else through
        counts = self.starts >= threshold
        lead, tail = min(threshold, self.heads.start[start]), self.tails.start[node]
        late = np.flatnonzero(counts & ~self.ancestors(start)).tolist()
        nodes, work = [self.compute.nodes[each] for each in late], [int(self.compute.work[each]) for each in late]
        size, latencies = len(self.tasks.succs), self.tasks.latency
        rooms = {n: ns * ratio // EVEN if latencies[n] >= latency else ns for n, ns in room.items() if n != node}
        succs = self.tasks.succs
        if through != NONE:
            succs, rooms = self.passing(through), {each + size: ns for each, ns in rooms.items()}
        gained, shares = WorkDivision(succs, rooms).divide(nodes, work)
        shares = [(each, dragged % size, share) for each, dragged, share in shares]
        given = dict.fromkeys(dragged for _, dragged, _ in shares)
        long = [dragged for dragged in given if latencies[dragged] >= latency]
        least = min((latencies[dragged] for dragged in long), default=0)
        first = self.first(node, through)
        end = least_end(first, ratio, least, through != NONE, [room[dragged] for dragged in long])
        tail = min([tail, *(self.tails.start[dragged] for dragged in given)])
        value = lead + int(self.compute.work[counts].sum()) - gained + end + tail
        return DragCut(value, node, self.is_last, through, ratio, latency, threshold, tail, shares)

    def passing(self, through: int) -> list[list[int]]:
        """The successors of nodes, twice: those after a collective of a queue, other than `through`, come second."""
        size, queue = len(self.tasks.succs), self.tasks.queue
        passes = [queue[node] == queue[through] and node != through for node in range(size)]
        after = [[succ + size for succ in succs] for succs in self.tasks.succs]
        return [*(after[node] if passes[node] else self.tasks.succs[node] for node in range(size)), *after]


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
