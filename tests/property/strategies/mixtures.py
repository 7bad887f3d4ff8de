"""Random small programs with choices, and the shortest step of all their mixtures by exhaustive search.

A step of a mixture may run an operation again whenever its result is gone, and drop or copy any value at any time. The
search is generous: a launch holds its inputs only when it is issued. So its steps are never longer than those of the
simulator, and a bound must be below them all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush
from random import Random

from weft.bounds.choices import ONCE, Choices
from weft.simulation.program import OpKind, Program, Queue

Flight = tuple[str, int, int]
"""Link, operation or copied value, and the time until it ends."""
State = tuple[int, int, int, tuple[Flight, ...]]
"""Values in memory, operations that have run, values in host memory (as bits), and what is in flight."""
OUT, BACK = "to host", "from host"


def random_choices(rng: Random, most_early: int = 5) -> Choices:
    """Kernels of a forward that may run again, then kernels that run once, each with one result."""
    num_early, num_late = rng.randint(3, most_early), rng.randint(3, max(3, most_early - 1))
    num = num_early + num_late
    preds: list[tuple[int, ...]] = [()]
    for op in range(1, num):
        source = rng.randrange(op) if op < num_early else min(num_early - 1, rng.randint(0, num - op))
        preds.append(tuple(sorted({source if op < num_early and rng.random() < 0.3 else op - 1, source})))
    again = [rng.choice((ONCE, *[1] * 9)) if op < num_early else ONCE for op in range(num)]
    durations = tuple(rng.randint(1, 9) for _ in range(num))
    program = Program(
        names=tuple(f"op{op}" for op in range(num)),
        kinds=(OpKind.COMPUTE,) * num,
        duration_ns=durations,
        preds=tuple(preds),
        queue=(-1,) * num,
        waits_for=((),) * num,
        queues=(),
        links=(),
        drains=(False,) * num,
        allocates=tuple(((op, rng.randint(1, 5)),) for op in range(num)),
        uses=tuple(preds),
        kept=frozenset({num - 1}),
    )
    return Choices(program, tuple(d if a != ONCE else ONCE for d, a in zip(durations, again, strict=True)))


def random_small_choices(rng: Random) -> Choices:
    """The same with six kernels."""
    return random_choices(rng, most_early=3)


def with_copies(rng: Random, choices: Choices) -> Choices:
    """The same choices, and values may wait in host memory."""
    return replace(choices, away=(rng.choice((3, 6, 100)), rng.choice((100, 250, 500))))


def random_collectives(rng: Random) -> Choices:
    """Two layers, each with a weight or a value that is gathered; kernels of the late part read it, too."""
    kinds: list[OpKind] = []
    preds: list[tuple[int, ...]] = []
    uses: list[tuple[int, ...]] = []
    again: list[bool] = []

    def add(kind: OpKind, read: list[int], after: list[int], is_free: bool) -> int:
        kinds.append(kind)
        preds.append(tuple(sorted({*read, *after})))
        uses.append(tuple(sorted(read)))
        again.append(is_free)
        return len(kinds) - 1

    def gathered(read: list[int]) -> tuple[list[int], list[int]]:
        is_free = rng.random() < 0.9
        launch = add(OpKind.LAUNCH, read, [], is_free)
        return [launch], [add(OpKind.WAIT, [launch], [], is_free)]

    layers: list[list[int]] = []
    waits: list[list[int]] = []
    last: list[int] = []
    after: list[int] = []
    """The wait for the last value, if a collective makes it."""
    for _ in range(2):
        if rng.random() < 0.6:
            weight, wait = gathered([])
            value = [add(OpKind.COMPUTE, [*last, *weight], [*after, *wait], rng.random() < 0.9)]
            layers.append([*weight, *(last or value)])
            after = []
        else:
            inner = [add(OpKind.COMPUTE, last, after, rng.random() < 0.9)]
            value, wait = gathered(inner)
            layers.append([*value, *rng.choice((inner, []))])
            after = wait
        waits.append(wait)
        last = value
    for layer, wait in reversed([*zip(layers, waits, strict=True)]):
        last = [add(OpKind.COMPUTE, [*{*last, *layer}], [*after, *wait], False)]
        after = []
    size = len(kinds)
    makes = [kind in (OpKind.COMPUTE, OpKind.LAUNCH) for kind in kinds]
    durations = tuple(rng.randint(1, 4) * made for made in makes)
    program = Program(
        names=tuple(f"op{op}" for op in range(size)),
        kinds=tuple(kinds),
        duration_ns=durations,
        preds=tuple(preds),
        queue=tuple(0 if kind is OpKind.LAUNCH else -1 for kind in kinds),
        waits_for=tuple(uses[op] if kind is OpKind.WAIT else () for op, kind in enumerate(kinds)),
        queues=(Queue("g", 0),),
        links=("link",),
        drains=(False,) * size,
        allocates=tuple(((op, rng.randint(1, 5)),) if made else () for op, made in enumerate(makes)),
        uses=tuple(uses),
        kept=frozenset({max(op for op in range(size) if makes[op])}),
    )
    return Choices(program, tuple(d if free else ONCE for d, free in zip(durations, again, strict=True)))


def shortest_step(choices: Choices, limit_bytes: int) -> int | None:
    """The shortest step of any mixture within a limit, by Dijkstra over all states; None if none fits."""
    search = _Mixtures(choices, limit_bytes)
    best: dict[State, int] = {(0, 0, 0, ()): 0}
    waiting: list[tuple[int, State]] = [(0, (0, 0, 0, ()))]
    while waiting:
        time, state = heappop(waiting)
        if time > best[state]:
            continue
        if state[1] == search.every:
            return time
        for more, then in search.moves(state):
            if time + more < best.get(then, time + more + 1):
                best[then] = time + more
                heappush(waiting, (time + more, then))
    return None


class _Mixtures:
    def __init__(self, choices: Choices, limit_bytes: int) -> None:
        self.choices, self.program, self.limit = choices, choices.program, limit_bytes
        self.size = {storage: size for made in self.program.allocates for storage, size in made}
        self.every = (1 << len(self.program.kinds)) - 1

    def bytes_of(self, values: int) -> int:
        return sum(size for value, size in self.size.items() if values >> value & 1)

    def moves(self, state: State) -> Iterator[tuple[int, State]]:
        """Each thing that the stream may do next, and how long it takes."""
        held, done, away, flights = state
        arriving = sum(1 << value for link, value, _ in flights if link != OUT)
        leaving = sum(1 << value for link, value, _ in flights if link == OUT)
        for op in range(len(self.program.kinds)):
            yield from self._runs(op, state, held & ~arriving)
        for value in self.size:
            bit = 1 << value
            if held & ~arriving & ~leaving & bit and value not in self.program.kept:
                yield 0, (held & ~bit, done, away, flights)
        if self.choices.away is not None:
            yield from self._copies(state, held & ~arriving, leaving)

    def _runs(self, op: int, state: State, ready: int) -> Iterator[tuple[int, State]]:
        """The operation runs, if it may."""
        held, done, away, flights = state
        program, bit = self.program, 1 << op
        if program.kinds[op] is OpKind.WAIT:
            for flight in flights:
                if flight[1] in program.waits_for[op] and flight[0] not in (OUT, BACK):
                    yield flight[2], (held, done | bit, away, self._later(flights, flight[2], flight))
            return
        is_over = held & bit or (done & bit and self.choices.again_ns[op] == ONCE)
        if is_over or any(not ready >> s & 1 for s in program.uses[op]):
            return
        if any(not done >> pred & 1 for pred in program.preds[op]) or self.bytes_of(held | bit) > self.limit:
            return
        time = program.duration_ns[op]
        if program.kinds[op] is OpKind.COMPUTE:
            yield time, (held | bit, done | bit, away, self._later(flights, time))
        else:
            yield 0, (held | bit, done | bit, away, self._with(flights, "link", op, time))

    def _copies(self, state: State, ready: int, leaving: int) -> Iterator[tuple[int, State]]:
        """A value leaves, comes back, or is waited for on its way."""
        held, done, away, flights = state
        assert self.choices.away is not None
        most, bytes_per_us = self.choices.away
        for flight in flights:
            if flight[0] in (OUT, BACK):
                yield flight[2], (held, done, away, self._later(flights, flight[2], flight))
        for value, size in self.size.items():
            bit, time = 1 << value, -(-size * 1000 // bytes_per_us)
            if ready & bit and not away & bit and self.bytes_of(away | bit) <= most:
                yield 0, (held, done, away | bit, self._with(flights, OUT, value, time))
            if away & bit and not leaving & bit:
                if not held & bit and self.bytes_of(held | bit) <= self.limit:
                    yield 0, (held | bit, done, away, self._with(flights, BACK, value, time))
                if not any(link == BACK and other == value for link, other, _ in flights):
                    yield 0, (held, done, away & ~bit, flights)

    def _with(self, flights: tuple[Flight, ...], link: str, value: int, time: int) -> tuple[Flight, ...]:
        """One more flight, after the last one on its link."""
        ends = max((end for other, _, end in flights if other == link), default=0)
        return tuple(sorted((*flights, (link, value, ends + time))))

    def _later(self, flights: tuple[Flight, ...], time: int, landed: Flight | None = None) -> tuple[Flight, ...]:
        return tuple(sorted((link, v, max(0, end - time)) for link, v, end in flights if (link, v, end) != landed))
