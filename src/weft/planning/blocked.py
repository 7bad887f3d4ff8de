"""What became of every collective in a planned order, and what still holds back those that are exposed.

A collective that the stream stands still for is told by what would have to be lifted first:

    link         others share its link, so that it takes longer than alone
    queue        it was launched, but others of its group went first
    memory       it could have been launched earlier, but there was no room for what it holds
    dependency   it starts as soon as what it needs is there, and what needs it comes right behind

What lifting that would gain is an upper limit: not more than the time for which it is exposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.planning.plan import Decision, Reason, bucket_names
from weft.planning.search import Outcome
from weft.simulation.program import Program, Sort


def explain_exposed(pass_name: str, program: Program, outcome: Outcome) -> list[Decision]:
    """A decision for every collective, in the order of the graph."""
    tell = _Teller(pass_name, program, outcome)
    launches = [op for op, sort in enumerate(program.sorts) if sort is Sort.LAUNCH]
    return [*map(tell.bucket, outcome.buckets), *map(tell.launch, launches)]


class _Teller:
    def __init__(self, pass_name: str, program: Program, outcome: Outcome) -> None:
        self.name, self.program, self.outcome = pass_name, program, outcome
        self.first = {op: bucket[0] for bucket in outcome.buckets for op in bucket}
        self.place = [0] * len(program.sorts)
        for place, op in enumerate(outcome.order):
            self.place[op] = place
        self.room = _Room(outcome.memory, outcome.limit_bytes)

    def bucket(self, bucket: Sequence[int]) -> Decision:
        names = tuple(self.program.names[op] for op in bucket)
        group = self.program.queues[self.program.queue[bucket[0]]].group
        sentence = (
            f"{len(names)} launches in {group!r} that wait beside each other become one: {names[0]} to {names[-1]}"
        )
        return Decision(self.name, Reason.APPLIED, sentence, (*names, *bucket_names(names[0])))

    def launch(self, op: int) -> Decision:
        program, trace = self.program, self.outcome.trace
        name, before = program.names[op], self.outcome.given_exposed_ns.get(op, 0)
        exposed = sum(trace.exposed_ns.get(member, 0) for member in self._bucket(op))
        if not exposed:
            if not before:
                return Decision(self.name, Reason.ALREADY_DONE, f"{name} is hidden, as it was", (name,))
            return Decision(self.name, Reason.APPLIED, f"{name} is hidden: it was exposed for {us(before)}", (name,))
        reason, why, gain, blocking = self._why(self.first.get(op, op), exposed)
        sentence = (
            f"{name} is exposed for {us(exposed)}, {us(before)} before: {why}; lifting that gains {us(gain)} at most"
        )
        return Decision(self.name, reason, sentence, (name,), blocking)

    def _bucket(self, op: int) -> Sequence[int]:
        if op not in self.first:
            return (op,)
        return next(bucket for bucket in self.outcome.buckets if op in bucket)

    def _why(self, op: int, exposed: int) -> tuple[Reason, str, int, str | None]:
        program, trace = self.program, self.outcome.trace
        start, end, reached = trace.start_ns[op], trace.end_ns[op], trace.reached_ns[op]
        names = program.names
        longer = end - start - self.outcome.duration_ns[op]
        if longer > 0:
            link = program.links[program.queues[program.queue[op]].link]
            return Reason.EXPOSED_BY_LINK, f"others share {link} with it", min(exposed, longer), None
        if start > reached:
            other = trace.cause[op]
            why = f"{names[other]} goes first in its queue" if other >= 0 else "others go first in its queue"
            return Reason.EXPOSED_BY_QUEUE, why, min(exposed, start - reached), names[other] if other >= 0 else None
        ready, last = self._ready(op)
        held = sum(num_bytes for _, num_bytes in program.allocates[op]) if program.allocates else 0
        if ready < reached and not self.room.has(held, ready, reached):
            return Reason.EXPOSED_BY_MEMORY, "there is no room for it earlier", min(exposed, reached - ready), None
        needed = f"it needs {names[last]}" if last is not None else "nothing runs before it"
        use = self._first_use(op)
        behind = f", and {names[use]} needs it" if use is not None else ""
        return Reason.EXPOSED_BY_DEPENDENCY, needed + behind, exposed, names[last] if last is not None else None

    def _ready(self, op: int) -> tuple[int, int | None]:
        """When all that a launch needs is computed, and what comes last of it."""
        ends = [(self.outcome.trace.end_ns[p], p) for p in self._computed(op)]
        return max(ends, default=(0, None))

    def _computed(self, op: int) -> Iterator[int]:
        """The compute and the collectives that an operation needs, through views and waits."""
        program, seen, stack = self.program, set[int](), [op]
        while stack:
            for pred in (*program.preds[(top := stack.pop())], *program.waits_for[top]):
                if pred in seen:
                    continue
                seen.add(pred)
                if program.sorts[pred] in (Sort.COMPUTE, Sort.LAUNCH):
                    yield pred
                else:
                    stack.append(pred)

    def _first_use(self, op: int) -> int | None:
        """The first compute behind the first wait for a launch."""
        wait, program = self.outcome.first_wait.get(op), self.program
        if wait is None:
            return None
        order = self.outcome.order
        for other in order[self.place[wait] + 1 : self.place[wait] + 50]:
            if program.sorts[other] is Sort.COMPUTE and program.duration_ns[other]:
                return other
        return None


class _Room:
    """Whether memory is free in a stretch of time."""

    def __init__(self, curve: Sequence[tuple[int, int]], limit_bytes: int) -> None:
        self.curve, self.limit_bytes = curve, limit_bytes

    def has(self, num_bytes: int, start: int, end: int) -> bool:
        inside = [used for time, used in self.curve if start <= time < end]
        return not inside or max(inside) + num_bytes <= self.limit_bytes


def us(time_ns: int) -> str:
    """A time for people."""
    return f"{time_ns / 1000:.1f} us"
