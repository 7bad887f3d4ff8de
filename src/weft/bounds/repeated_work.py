"""Repeated work: what must run again, in any mixture of choices, so that a step fits into a memory limit.

Contract: choose an operation `at`, and consider the moment when it first starts. Its ancestors have run; operations
that run once and depend on it have not. Each of those reads values. A value is held at this moment, or the operation
that makes it runs later, and then the same holds for what that operation reads. If it is an ancestor of `at`, it has
run before, so its later run is repeated work. Held values must fit next to those that `at` itself needs, those that are
never freed, and those that run-once operations made before and read after.

    before          at          after
    a -> b -> c     loss        d reads b: b is held, or runs again and reads a: a is held, or runs again

The least repeated work is the optimum of a program with a variable for each value (held) and each operation (runs
again). With a price for each byte in place of the limit, its dual is a flow: demand enters at the values that are read
after `at`, at most the price of its bytes passes through a value, and an operation absorbs at most the time of its
repetition and passes the rest to its inputs. By weak duality, the flow minus the price of the room is a bound for every
mixture, whatever the price. Rounding plays no part: all numbers are integers, in nanoseconds divided by 2^20.

Repeated work on a resource comes on top of all first runs there, and lies between the heads and tails of the tasks of
`machine` claims: it starts after `at`, and what reads it ends before the operation whose demand it serves.

With copies to host memory, values may also wait there. If the step is shorter than the claimed bound, the bytes that
can be copied in that time are an upper limit; they count as more room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from weft.bounds.choices import ONCE, Choices
from weft.bounds.problem import COMPUTE, BoundError, Clock, Tasks, progress_in
from weft.errors import compose
from weft.quantities import size_text
from weft.simulation.program import OpKind, Program

SHIFT = 20
"""Flows are in nanoseconds divided by 2^20, prices in nanoseconds for each MiB."""
MAX_MOMENTS = 2
"""Moments for which flows are computed: those with the most bytes."""
MAX_WEIGHED = 24
"""Moments whose bytes are counted: those at which the given order of operations holds the most."""
MAX_PRICES = 12
MAX_STEPS = 4
UNLIMITED = 1 << 100


@dataclass(frozen=True)
class Moment:
    """The state of memory when an operation first starts."""

    at: int
    before: frozenset[int]
    """Its ancestors."""
    settled: frozenset[int]
    """Storages that are held in any case, or made later in any case."""
    fixed_bytes: int
    """Bytes of those that are held."""
    demands: tuple[tuple[int, int], ...]
    """(operation that runs once and later, storage that it reads), for storages that may be made again."""
    made_bytes: int
    """Bytes of the demanded values that ancestors make: each is held, or made a second time later."""


@dataclass(frozen=True)
class ForcedRun:
    """Work that runs again on a resource, with the flow that proves it."""

    step_ns: int
    """The step that it proves."""
    work_ns: int
    at: int
    price: int
    flows: list[tuple[int, int, int]]
    """(operation, storage, flow): the demand of a later operation, or what an operation passes to an input."""
    shorter_ns: int = 0
    """No step is shorter than this, because so much time is too short to copy enough to host memory. 0: no copies."""


class Moments:
    """The moments of one program that hold the most."""

    def __init__(self, choices: Choices) -> None:
        self.choices, self.program = choices, choices.program
        self.maker = single_makers(self.program)
        self.size = {s: size for made in self.program.allocates for s, size in made if s in self.maker}
        self.given_bytes = sum(n for made in self.program.allocates for s, n in made if s in self.program.given)
        self.succs: list[list[int]] = [[] for _ in self.program.kinds]
        for op, preds in enumerate(self.program.preds):
            for pred in {*preds, *self.program.waits_for[op]}:
                self.succs[pred].append(op)
        found = (self.moment(op) for op in self._held_most())
        self.best = sorted(found, key=lambda m: (-m.fixed_bytes - m.made_bytes, m.at))[:MAX_MOMENTS]

    def _held_most(self) -> list[int]:
        """The operations at which the given order holds the most, one for each kernel or collective."""
        program, change = self.program, [0] * (len(self.program.kinds) + 1)
        last = dict(self.maker)
        for op, storages in enumerate(program.uses):
            last.update({s: op for s in storages if s in self.maker})
        for storage, op in self.maker.items():
            change[op] += self.size[storage]
            change[last[storage] + 1 if storage not in program.kept else -1] -= self.size[storage]
        held: list[tuple[int, int]] = []
        now = 0
        for op, kind in enumerate(program.kinds):
            now += change[op]
            if kind is OpKind.COMPUTE:
                held.append((-now, op))
        return [op for _, op in sorted(held)[:MAX_WEIGHED]]

    def moment(self, at: int) -> Moment:
        program, maker, again = self.program, self.maker, self.choices.again_ns
        before = reachable([at], [[*p, *w] for p, w in zip(program.preds, program.waits_for, strict=True)]) - {at}
        later = {op for op in reachable([at], self.succs) - {at} if again[op] == ONCE}
        fixed = {s for s in (*program.uses[at], *(s for s, _ in program.allocates[at])) if s in maker}
        read = {s for op in later for s in program.uses[op] if s in maker}
        once = {s for s, op in maker.items() if again[op] == ONCE and op in before}
        fixed |= {s for s in once if s in read or s in program.kept}
        settled = fixed | {s for s, op in maker.items() if op in later}
        demands = [(op, s) for op in sorted(later) for s in program.uses[op] if s in maker and s not in settled]
        held = self.given_bytes + sum(self.size[s] for s in fixed)
        made = sum(self.size[s] for s in {s for _, s in demands} if maker[s] in before)
        return Moment(at, frozenset(before), frozenset(settled), held, tuple(demands), made)


def single_makers(program: Program) -> dict[int, int]:
    """The operation that makes each storage; without given storages and those that several operations allocate."""
    makers: dict[int, list[int]] = {}
    for op, made in enumerate(program.allocates):
        for storage, _ in made:
            makers.setdefault(storage, []).append(op)
    return {s: ops[0] for s, ops in makers.items() if len(ops) == 1 and s not in program.given}


def reachable(starts: list[int], edges: list[list[int]]) -> set[int]:
    found, stack = set(starts), list(starts)
    while stack:
        new = [other for other in edges[stack.pop()] if other not in found]
        found.update(new)
        stack += new
    return found


class ForcedWork:
    """The work on one resource that a memory limit forces to run again."""

    def __init__(self, moments: Moments, moment: Moment, timed: Tasks, resource: int, clock: Clock) -> None:
        self.moments, self.moment, self.choices = moments, moment, moments.choices
        self.resource, self.clock, self.is_merging = resource, clock, bool(timed.chains)
        costs = {op: UNLIMITED if again == ONCE else self.cost_ns(op) << SHIFT for op, again in self._before()}
        self.network = Network(moments, moment, costs)

    def _before(self) -> Iterable[tuple[int, int]]:
        return ((op, self.choices.again_ns[op]) for op in self.moment.before)

    def cost_ns(self, op: int) -> int:
        """The least time of another run of an operation on the resource, by the clock."""
        program, again_ns = self.choices.program, self.choices.again_ns[op]
        if program.kinds[op] is OpKind.COMPUTE:
            wire_ppm = program.collective_slowdown_ppm if self.clock is Clock.WIRE else 0
            return progress_in(again_ns, wire_ppm) if self.resource == COMPUTE else 0
        if program.kinds[op] is not OpKind.LAUNCH or self.resource != 1 + program.queues[program.queue[op]].link:
            return 0
        saved = program.latency_ns[op] if self.is_merging else 0
        return progress_in(max(0, again_ns - saved), program.slowdown_ppm if self.clock is Clock.WORK else 0)

    def within(self, limit_bytes: int, first_ns: int, known_ns: int) -> ForcedRun | None:
        """The longest step that is proved, where first runs alone take `first_ns`; None if nothing has to run again.

        Raises if no mixture fits.

        If values may wait in host memory, a shorter step has less time to copy them there. More time means more room
        and less work, so the best step lies between the known bound and the one without copies.
        """
        room, away = limit_bytes - self.moment.fixed_bytes, self.choices.away
        self._check_fits(room + (away[0] if away is not None else 0))
        run = self._run(room, first_ns)
        if away is None or run is None:
            return run
        most, bytes_per_us = away
        proved, low, high = None, known_ns, run.step_ns
        for _ in range(MAX_STEPS):
            step_ns = (low + high) // 2
            run = self._run(room + min(most, step_ns * bytes_per_us // 1000), first_ns)
            if run is not None and run.step_ns >= step_ns:
                proved, low = replace(run, step_ns=step_ns, shorter_ns=step_ns), step_ns
            else:
                high = step_ns
        return proved

    def _check_fits(self, room: int) -> None:
        """Raise if no mixture fits into so much room."""
        if self.network.demanded_bytes <= room:
            return
        _, held = self.network.flow(self.network.prices[1])
        if held > room:
            needs = size_text(self.moment.fixed_bytes + held)
            what = f"no choice fits: {self.choices.program.names[self.moment.at]} needs {needs} in any order"
            raise BoundError(compose("bounds", what, do="give a larger memory limit"))

    def _run(self, room: int, first_ns: int) -> ForcedRun | None:
        """The most work that a flow proves for so much room; None if nothing has to run again."""
        network, at = self.network, self.moment.at
        if network.demanded_bytes <= room:
            return None
        found: list[ForcedRun] = []
        # The value is concave in the price: a minimum of lines, one for each cut. Two lines bracket the best price.
        low, high = (0, 0, network.demanded_bytes - room), (0, 0, 0)
        price, most = network.prices
        for _ in range(MAX_PRICES):
            total, held = network.flow(price)
            line = price, total - price * room, held - room
            work_ns = line[1] >> SHIFT
            if not found or work_ns > found[-1].work_ns:
                found.append(ForcedRun(first_ns + work_ns, work_ns, at, price, network.flows()))
            if price == most and line[2] > 0:
                break  # no mixture fits without copies to host memory
            low, high = (line, high) if line[2] > 0 else (low, line)
            if not high[0]:
                price = most
                continue
            (x, a, rise), (y, b, fall) = low, high
            price = (b - fall * y - a + rise * x) // (rise - fall)
            if not x < price < y:
                break
        return found[-1] if found[-1].work_ns > 0 else None


class Network:
    """The network of one moment: storages, the operations that make them, and the storages that those read."""

    def __init__(self, moments: Moments, moment: Moment, costs: dict[int, int]) -> None:
        self.moments, self.costs = moments, costs
        program, maker = moments.program, moments.maker
        self.demand = {s: op for op, s in reversed(moment.demands)}
        self.storages = list(self.demand)
        self.inputs: dict[int, list[int]] = {}
        """By operation, the storages that it reads, if they are not held in any case."""
        known = set(self.storages)
        for storage in self.storages:  # grows by the inputs of the operations that are met
            op = maker[storage]
            if op not in self.inputs:
                self.inputs[op] = [s for s in dict.fromkeys(program.uses[op]) if s in maker and s not in moment.settled]
                self.storages += [s for s in self.inputs[op] if s not in known]
                known.update(self.inputs[op])
        finite = [cost for op in self.inputs if (cost := costs.get(op, 0)) < UNLIMITED]
        self.demanded_bytes = sum(moments.size[s] for s in self.demand)
        smallest = min((moments.size[s] for s in self.storages), default=1)
        self.prices = sum(finite) // smallest + 1, sum(finite) + 1
        """At the first price, making a storage again is worth any work; at the second, so is each byte less."""
        self.graph = MaxFlow()

    def flow(self, price: int) -> tuple[int, int]:
        """The largest flow at a price, and the bytes that its smallest cut holds."""
        maker, size = self.moments.maker, self.moments.size
        graph = self.graph = MaxFlow()
        for s in self.storages:
            if s in self.demand:
                graph.add("source", ("s", s), UNLIMITED)
            graph.add(("s", s), ("o", maker[s]), price * size[s])
        for op, sources in self.inputs.items():
            graph.add(("o", op), "sink", self.costs.get(op, 0))
            for s in sources:
                graph.add(("o", op), ("s", s), UNLIMITED)
        total = graph.run("source", "sink")
        reached = graph.reached("source")
        held = sum(size[s] for s in self.storages if ("s", s) in reached and ("o", maker[s]) not in reached)
        return total, held

    def flows(self) -> list[tuple[int, int, int]]:
        """The flow into each storage, and where it comes from."""
        graph, found = self.graph, list[tuple[int, int, int]]()
        for s in self.storages:
            if s in self.demand and (amount := graph.carried("source", ("s", s))):
                found.append((self.demand[s], s, amount))
        for op, sources in self.inputs.items():
            found += [(op, s, amount) for s in sources if (amount := graph.carried(("o", op), ("s", s)))]
        return found


class MaxFlow:
    """Dinic's algorithm with integer capacities."""

    def __init__(self) -> None:
        self.number: dict[object, int] = {}
        self.edges: list[list[int]] = []
        self.target: list[int] = []
        self.room: list[int] = []
        self.edge_of: dict[tuple[object, object], int] = {}

    def _node(self, name: object) -> int:
        if name not in self.number:
            self.number[name] = len(self.edges)
            self.edges.append([])
        return self.number[name]

    def add(self, start: object, end: object, capacity: int) -> None:
        """Add an edge."""
        first, second = self._node(start), self._node(end)
        self.edge_of[start, end] = len(self.target)
        for node, other, room in ((first, second, capacity), (second, first, 0)):
            self.edges[node].append(len(self.target))
            self.target.append(other)
            self.room.append(room)

    def carried(self, start: object, end: object) -> int:
        """The flow over an edge."""
        return self.room[self.edge_of[start, end] ^ 1]

    def run(self, source: object, sink: object) -> int:
        """Find the largest flow."""
        first, last, total = self._node(source), self._node(sink), 0
        while (level := self._levels(first))[last] >= 0:
            place = [0] * len(self.edges)
            while (amount := self._push(first, last, level, place)) > 0:
                total += amount
        return total

    def _levels(self, first: int) -> list[int]:
        level = [-1] * len(self.edges)
        level[first] = 0
        waiting = deque([first])
        while waiting:
            node = waiting.popleft()
            for edge in self.edges[node]:
                other = self.target[edge]
                if self.room[edge] > 0 and level[other] < 0:
                    level[other] = level[node] + 1
                    waiting.append(other)
        return level

    def _push(self, first: int, last: int, level: list[int], place: list[int]) -> int:
        """Send flow along one path of rising levels; 0 if no path is left."""
        path: list[int] = []
        node = first
        while node != last:
            edges = self.edges[node]
            while place[node] < len(edges):
                edge = edges[place[node]]
                if self.room[edge] > 0 and level[self.target[edge]] == level[node] + 1:
                    break
                place[node] += 1
            else:
                if not path:
                    return 0
                node = self.target[path.pop() ^ 1]
                place[node] += 1
                continue
            path.append(edge)
            node = self.target[edge]
        amount = min(self.room[edge] for edge in path)
        for edge in path:
            self.room[edge] -= amount
            self.room[edge ^ 1] += amount
        return amount

    def reached(self, source: object) -> set[object]:
        """The nodes on the source's side of the smallest cut."""
        level = self._levels(self._node(source))
        return {name for name, node in self.number.items() if level[node] >= 0}
