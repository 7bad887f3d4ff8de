"""Explains a planned order: which collectives are hidden, and why the others stay exposed.

The reason for an exposed collective is the first of these that accounts for half of its exposed time:

    link         it is slower because other collectives share its link
    memory       its inputs are ready and its queue is free, but its result does not fit into memory
    order        its result would fit, too, but the search found no better order that launches it earlier
    queue        its inputs are ready, but other collectives of its group go first
    dependency   it starts as soon as its inputs are ready, and its consumer comes right after it

A bucket is explained once. A job that prepares a launch, such as the cast of a shard, counts as part of it.

The gain is an upper limit for the collective alone: the time by which it would arrive earlier without the obstacle,
with everything else unchanged, and at most its exposed time. If its queue becomes free earlier, others gain too; they
report that gain themselves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from weft.plan.decision import Decision, Reason
from weft.plan.plan import bucket_names
from weft.quantities import duration_text
from weft.scheduling.search import Outcome
from weft.simulation.program import MILLION, OpKind, Program
from weft.simulation.simulator import compute_spans
from weft.simulation.timeline import Coverage

NS_PER_US = 1000
USES_SEEN = 50
"""Number of operations after a wait that are searched for its first use."""


def explain_exposed(pass_name: str, program: Program, outcome: Outcome) -> list[Decision]:
    """At least one decision for every collective: buckets first, then launches in the order of the graph."""
    explainer = _Explainer(pass_name, program, outcome)
    launches = [op for op, kind in enumerate(program.kinds) if kind is OpKind.LAUNCH]
    return [*map(explainer.bucket, outcome.buckets), *(d for op in launches for d in explainer.launch(op))]


class _Explainer:
    def __init__(self, pass_name: str, program: Program, outcome: Outcome) -> None:
        self.name, self.program, self.outcome, self.trace = pass_name, program, outcome, outcome.trace
        self.bucket_of = {op: bucket for bucket in outcome.buckets for op in bucket}
        self.place = [0] * len(program.kinds)
        for place, op in enumerate(outcome.order):
            self.place[op] = place
        self.before = _before(program, outcome.order)
        self.succs: list[list[int]] = [[] for _ in program.kinds]
        for op, preds in enumerate(program.preds):
            for pred in preds:
                self.succs[pred].append(op)
        self.free_memory = _FreeMemory(outcome.memory, outcome.limit_bytes)
        self.compute = Coverage(compute_spans(program, outcome.trace))

    def bucket(self, bucket: Sequence[int]) -> Decision:
        names = tuple(self.program.names[op] for op in bucket)
        group = self.program.queues[self.program.queue[bucket[0]]].group
        sentence = f"{len(names)} launches of group {group!r} are merged: {names[0]} to {names[-1]}"
        return Decision(self.name, Reason.APPLIED, sentence, (*names, *bucket_names(names[0])))

    def launch(self, op: int) -> Iterator[Decision]:
        """The decisions on a launch; a bucket is explained at its first launch."""
        bucket = self.bucket_of.get(op, (op,))
        exposed = sum(self.trace.exposed_ns.get(member, 0) for member in bucket)
        if exposed and op == bucket[0]:
            yield self._exposed(bucket, exposed)
        if exposed:
            return
        name, before = self.program.names[op], self.outcome.given_exposed_ns.get(op, 0)
        if before:
            yield Decision(
                self.name, Reason.APPLIED, f"{name} is hidden; it was exposed for {duration(before)}", (name,)
            )
        else:
            yield Decision(self.name, Reason.ALREADY_DONE, f"{name} is hidden, as before", (name,))

    def _exposed(self, bucket: Sequence[int], exposed: int) -> Decision:
        reason, why, gain, blocking = self._why(bucket, exposed)
        names = tuple(self.program.names[op] for op in bucket)
        subject = f"{names[0]} is" if len(names) == 1 else f"the bucket of {names[0]} to {names[-1]} ({len(names)}) is"
        before = sum(self.outcome.given_exposed_ns.get(op, 0) for op in bucket)
        saved = f"removing this obstacle could save up to {duration(gain)}"
        sentence = f"{subject} exposed for {duration(exposed)} ({duration(before)} before): {why}; {saved}"
        return Decision(self.name, reason, sentence, names, blocking, exposed / NS_PER_US, gain / NS_PER_US)

    def _why(self, bucket: Sequence[int], exposed: int) -> tuple[Reason, str, int, str | None]:
        """The reason, the reason in words, the possible gain, and the node that blocks the collective."""
        program, trace, names, op = self.program, self.trace, self.program.names, bucket[0]
        start = trace.start_ns[op]
        slowed = 0 if program.queues[program.queue[op]].is_copies else self._slowed(start, trace.end_ns[op])
        longer = trace.end_ns[op] - start - self.outcome.duration_ns[op] - slowed
        if 2 * longer >= exposed:
            link = program.links[program.queues[program.queue[op]].link]
            return Reason.EXPOSED_BY_LINK, f"other collectives share its link {link}", min(exposed, longer), None
        ready, last = max(map(self._ready, bucket), key=lambda found: found[0])
        other = self.before[op]
        free = ready if other is None else max(ready, trace.end_ns[other])
        idle, late = min(exposed, start - free), min(exposed, start - ready)
        if 2 * idle >= exposed:  # its queue was free and its inputs were ready
            when = f"right after {names[last]}" if last is not None else "earlier"
            held = sum(size for member in bucket for _, size in program.allocates[member]) if program.allocates else 0
            if not self.free_memory.has(held, free, start):
                return Reason.EXPOSED_BY_MEMORY, f"its result does not fit into memory {when}", idle, None
            return Reason.EXPOSED_BY_ORDER, f"no better order was found that launches it {when}", idle, None
        if other is not None and 2 * late >= exposed:
            return Reason.EXPOSED_BY_QUEUE, f"{names[other]} goes first in its queue", late, names[other]
        use = self._first_use(bucket)
        who = "it" if len(bucket) == 1 else "the bucket"
        needs = [f"{who} needs {names[last]}"] if last is not None else []
        needed = [f"{names[use]} needs {who}" if use is not None else f"the step ends with {who}"]
        blocking = last if last is not None else use
        why = " and ".join([*needs, *needed])
        return Reason.EXPOSED_BY_DEPENDENCY, why, exposed, names[blocking] if blocking is not None else None

    def _slowed(self, start: int, end: int) -> int:
        """How much longer a collective takes because compute runs between `start` and `end`."""
        slowdown = self.program.collective_slowdown_ppm
        return self.compute.of(start, end)[0] * slowdown // (MILLION + slowdown) if slowdown else 0

    def _ready(self, launch: int) -> tuple[int, int | None]:
        """When the inputs of a launch are ready, and which one is last; None if it needs only jobs that prepare it."""
        program, end = self.program, self.trace.end_ns
        ready, last, prepared = 0, None, 0
        nearest: int | None = None
        seen, stack = {launch}, [launch]
        while stack:
            top = stack.pop()
            for pred in (*program.preds[top], *program.waits_for[top]):
                if pred in seen:
                    continue
                seen.add(pred)
                kind = program.kinds[pred]
                if nearest is None and kind in (OpKind.COMPUTE, OpKind.LAUNCH):
                    nearest = pred
                if kind is OpKind.COMPUTE and self._prepares(pred):
                    prepared += program.duration_ns[pred]
                    stack.append(pred)
                elif kind in (OpKind.COMPUTE, OpKind.LAUNCH):
                    if last is None or end[pred] > ready:
                        ready, last = end[pred], pred
                else:
                    stack.append(pred)
        return ready + prepared, last if last is None else nearest

    def _prepares(self, op: int) -> bool:
        """Whether only launches need an operation, and it is shorter than they are."""
        program, stack, found = self.program, list(self.succs[op]), False
        while stack:
            succ = stack.pop()
            if program.kinds[succ] is OpKind.NOTHING and succ != len(program.kinds) - 1:
                stack += self.succs[succ]
            elif program.kinds[succ] is not OpKind.LAUNCH or program.duration_ns[succ] < program.duration_ns[op]:
                return False
            else:
                found = True
        return found

    def _first_use(self, bucket: Sequence[int]) -> int | None:
        """The first compute after the first wait for a launch."""
        program, order = self.program, self.outcome.order
        waits = [self.place[wait] for op in bucket if (wait := self.outcome.first_wait.get(op)) is not None]
        for place in range(min(waits, default=len(order)) + 1, min(waits, default=len(order)) + USES_SEEN):
            if (
                place < len(order)
                and program.kinds[order[place]] is OpKind.COMPUTE
                and program.duration_ns[order[place]]
            ):
                return order[place]
        return None


def _before(program: Program, order: Sequence[int]) -> list[int | None]:
    """The previous launch of the same queue, for each launch."""
    found: list[int | None] = [None] * len(program.kinds)
    last: dict[int, int] = {}
    for op in order:
        if (queue := program.queue[op]) >= 0:
            found[op] = last.get(queue)
            last[queue] = op
    return found


class _FreeMemory:
    """Whether memory is free during an interval."""

    def __init__(self, curve: Sequence[tuple[int, int]], limit_bytes: int) -> None:
        self.times, self.used = [time for time, _ in curve], [used for _, used in curve]
        self.limit_bytes = limit_bytes

    def has(self, num_bytes: int, start: int, end: int) -> bool:
        """Whether `num_bytes` more fit from `start` to `end`."""
        first = max(bisect_right(self.times, start) - 1, 0)
        inside = self.used[first : bisect_left(self.times, end)]
        return max(inside, default=0) + num_bytes <= self.limit_bytes


def duration(time_ns: int) -> str:
    return duration_text(time_ns / NS_PER_US)
