"""The execution model: when each operation of a program runs, in one order.

The compute stream takes operations in order. It issues compute, launches and draining operations; the launch gap passes
between one issue and the next, except between two parts of one kernel. Compute that takes no time is not issued unless
it drains. A wait blocks the stream until its collectives have ended. A gap that passes during a wait costs nothing
extra. If the program has host times, the host issues operations in the same order, and none starts before it is issued.
The host runs ahead of the stream; it waits for the stream only at draining operations.

A launch puts its collective on its group's queue when the stream reaches it, so all compute before it has ended. The
first collective of each queue runs. If k of them run on one link, each progresses at 1/k of its speed alone, latency
included. Compute progresses at 1 / (1 + slowdown) of its speed while any collective runs, and collectives at 1 / (1 +
their slowdown) while compute runs. Copies are launched and waited for in the same way, on queues of their own: those to
and from host memory, and those that a group makes through symmetric memory. No compute slows them. While they run,
compute loses the share of the multiprocessors that they take: none for copy engines. If several collectives and copies
run, the one that slows compute most counts. The step ends with the last operation or collective, as if the end of the
graph waited for everything in flight.

Rounding: progress is counted in units so fine that every speed is a whole number of units per nanosecond. An end is the
first whole nanosecond at which no work is left. Only ends are rounded, never the remaining work of other operations, so
errors do not accumulate and the result does not depend on how often the clock is advanced.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from weft.errors import GraphError, compose
from weft.graph.dag import collector_paused
from weft.simulation.memory import memory_of
from weft.simulation.program import MILLION, OpKind, Program
from weft.simulation.timeline import CollectiveSpan, Coverage, Span, Timeline

NONE = -1


@dataclass(frozen=True)
class OperationTimes:
    """When each operation ran: the basis of a timeline, and all that a search needs."""

    order: Sequence[int]
    start_ns: list[int]
    """Start of compute, or of a launch's collective; for other operations, when the stream reached them."""
    end_ns: list[int]
    """End of compute or of the collective; for a wait, when the stream continues."""
    reached_ns: list[int]
    """When the stream reached the operation."""
    waited_ns: dict[int, int]
    """When the stream reached the first wait for each launch."""
    exposed_ns: dict[int, int]
    """How long the stream was blocked by each launch; the end of the graph waits for all of them."""
    cause: list[int]
    """The compute or launch whose end let each compute and collective start; -1 for none."""
    last: int
    """The compute or launch that ended last; -1 if no operation takes time."""
    step_ns: int


def simulate(program: Program, order: Sequence[int] | None = None) -> Timeline:
    """The timeline of a program in its own order, or in another legal one."""
    with collector_paused():
        trace = run(program, order)
        peak, memory = memory_of(program, trace.order, trace.reached_ns, trace.end_ns)
        compute = compute_spans(program, trace)
        launched = _collective_spans(program, trace, Coverage(compute))
        return Timeline(
            compute=compute,
            collectives=tuple(span for span in launched if not program.queues[span.queue].is_host),
            copies=tuple(span for span in launched if program.queues[span.queue].is_host),
            step_ns=trace.step_ns,
            critical_path=_critical_path(trace),
            peak_bytes=peak,
            memory=memory,
            program=program,
        )


def run(program: Program, order: Sequence[int] | None = None, *, is_legal: bool = False) -> OperationTimes:
    """Run a program without building a timeline. `is_legal` skips the check of the order."""
    if order is None:
        order = range(len(program.names))
    elif not is_legal:
        check_order(program, order)
    return _Stream(program).run(order)


def compute_spans(program: Program, trace: OperationTimes) -> tuple[Span, ...]:
    """Compute that takes time, in execution order."""
    names, kinds, durations, start, end = (
        program.names,
        program.kinds,
        program.duration_ns,
        trace.start_ns,
        trace.end_ns,
    )
    return tuple(
        Span(op, names[op], start[op], end[op], durations[op])
        for op in trace.order
        if kinds[op] is OpKind.COMPUTE and durations[op]
    )


def _collective_spans(program: Program, trace: OperationTimes, coverage: Coverage) -> tuple[CollectiveSpan, ...]:
    """Collectives and copies in launch order."""
    found: list[CollectiveSpan] = []
    for op in trace.order:
        if program.kinds[op] is OpKind.LAUNCH:
            start, end = trace.start_ns[op], trace.end_ns[op]
            hidden, by = coverage.of(start, end)
            span = CollectiveSpan(
                op=op,
                name=program.names[op],
                start_ns=start,
                end_ns=end,
                alone_ns=program.duration_ns[op],
                queue=program.queue[op],
                launched_ns=trace.reached_ns[op],
                waited_ns=trace.waited_ns.get(op),
                hidden_ns=hidden,
                exposed_ns=trace.exposed_ns.get(op, 0),
                hidden_by=by,
            )
            found.append(span)
    return tuple(found)


def _critical_path(trace: OperationTimes) -> tuple[int, ...]:
    """Follow causes back from the operation that ended last."""
    path: list[int] = []
    op = trace.last
    while op != NONE:
        path.append(op)
        op = trace.cause[op]
    return tuple(reversed(path))


def check_order(program: Program, order: Sequence[int]) -> None:
    """Raise if the order is not a permutation of the operations, or puts one before another that it needs."""
    size = len(program.names)
    position = [NONE] * size
    for place, op in enumerate(order):
        if not 0 <= op < size or position[op] != NONE:
            what = f"operation {op} appears twice" if 0 <= op < size else f"operation {op} does not exist"
            raise GraphError(compose("simulate", what, do=f"list each of 0 to {size - 1} once"))
        position[op] = place
    if len(order) != size:
        what = f"the order has {len(order)} operations, the program {size}"
        raise GraphError(compose("simulate", what, do=f"list each of 0 to {size - 1} once"))
    for op in order:
        place = position[op]
        for before in (*program.preds[op], *program.waits_for[op]):
            if position[before] > place:
                what = f"{program.names[op]} comes before {program.names[before]}, which it needs"
                raise GraphError(compose("simulate", what, do="give an order that respects the edges of the program"))


def takes_part(program: Program) -> list[bool]:
    """For each operation, whether it can affect time; an order without the others takes as long."""
    host = program.host_ns or (0,) * len(program.kinds)
    rows = zip(program.kinds, program.duration_ns, program.drains, host, strict=True)
    return [
        kind in (OpKind.LAUNCH, OpKind.WAIT) or drains or issue > 0 or (kind is OpKind.COMPUTE and ns > 0)
        for kind, ns, drains, issue in rows
    ]


class _Wires:
    """Queues and links: which collectives run, and how much work each has left."""

    def __init__(self, program: Program, cause: list[int]) -> None:
        self.program = program
        self.link = [queue.link for queue in program.queues]
        self.unit = lcm(*range(1, max(Counter(self.link).values(), default=1) + 1))
        """Work units of a nanosecond: divisible by every number of queues that can share a link."""
        slowdown = program.collective_slowdown_ppm
        self.alone, self.beside = (MILLION + slowdown, MILLION) if slowdown else (1, 1)
        """Speeds without and with compute. A collective of one nanosecond is `unit * alone` units of work."""
        self.speed = self.alone
        self.known_end = NONE
        """What `next_end` returned last; NONE once a collective began or ended, or the speed changed."""
        self.now = 0
        self.num_running = 0
        self.is_copies = [queue.is_copies for queue in program.queues]
        """By queue, whether it carries copies, whose speed does not change while compute runs."""
        self.shares = program.sm_share_ppm
        fine = MILLION if self.shares else 1
        self.alone_pace = fine * (MILLION + program.slowdown_ppm)
        """Work that compute does in a nanosecond with nothing beside it, in units that make every pace whole."""
        self.beside_pace = fine * MILLION
        """The same beside a collective that is not made of copies."""
        self.paces = [self.alone_pace] * len(program.queues)
        """The pace of compute beside what each queue runs."""
        self.pace = self.alone_pace
        """The pace of compute beside everything that runs."""
        self.waiting: list[deque[int]] = [deque() for _ in program.queues]
        """Launches of each queue, in order; the first one runs."""
        self.left: list[int] = [0] * len(program.queues)
        self.active: list[list[int]] = [[] for _ in program.links]
        """Queues that have a running collective, for each link."""
        self.start: dict[int, int] = {}
        self.end: dict[int, int] = {}
        self.cause = cause

    def launch(self, op: int, time: int, cause: int) -> None:
        """Put a collective on its queue."""
        self.advance(time)
        queue = self.program.queue[op]
        self.cause[op] = cause
        self.waiting[queue].append(op)
        if len(self.waiting[queue]) == 1:
            self._begin(queue)

    def advance(self, time: int) -> None:
        """Advance the clock to a time, through all ends before it."""
        while self.num_running and (event := self.next_end()) <= time:
            self.step(event)
        if time > self.now:
            self._progress(time)

    def wait(self, op: int) -> int:
        """Advance until a collective has ended; return that time."""
        while op not in self.end:
            self.step(self.next_end())
        return self.end[op]

    def next_end(self) -> int:
        """When the next running collective ends, if no launch comes before and compute does not start or stop."""
        if self.known_end == NONE:
            left, unit, least = self.left, self.unit * self.speed, 1 << 62
            steady = self.unit * self.alone
            for active in self.active:
                for queue in active:
                    per_ns = steady if self.is_copies[queue] else unit
                    least = min(least, -(-left[queue] * len(active) // per_ns))
            self.known_end = self.now + least
        return self.known_end

    def set_speed(self, speed: int) -> None:
        """Let compute start or stop."""
        if speed != self.speed:
            self.speed, self.known_end = speed, NONE

    def step(self, event: int) -> None:
        """Advance to the next end, and start the next collective of each queue that became free."""
        self._progress(event)
        self.known_end = NONE
        done = [queue for active in self.active for queue in active if self.left[queue] <= 0]
        for queue in done:
            self.active[self.link[queue]].remove(queue)
            self.num_running -= 1
            self.paces[queue] = self.alone_pace
            ended = self.waiting[queue].popleft()
            self.end[ended] = event
            if self.waiting[queue]:
                self.cause[self.waiting[queue][0]] = ended
                self._begin(queue)
        self.pace = min(self.paces)

    def _begin(self, queue: int) -> None:
        """Start the first collective of a queue. One that takes no time ends at once and slows no other."""
        waiting = self.waiting[queue]
        while waiting:
            op = waiting[0]
            self.start[op] = self.now
            if self.program.duration_ns[op] > 0:
                self.left[queue] = self.program.duration_ns[op] * self.unit * self.alone
                self.active[self.link[queue]].append(queue)
                self.num_running += 1
                self.paces[queue] = self._pace_beside(op, queue)
                self.pace = min(self.pace, self.paces[queue])
                self.known_end = NONE
                return
            self.end[op] = self.now
            waiting.popleft()
            if waiting:
                self.cause[waiting[0]] = op

    def _pace_beside(self, op: int, queue: int) -> int:
        """The pace of compute beside a collective or copy alone."""
        if not self.is_copies[queue]:
            return self.beside_pace
        return self.alone_pace // MILLION * (MILLION - self.shares[op]) if self.shares else self.alone_pace

    def _progress(self, time: int) -> None:
        passed = time - self.now
        for active in self.active:
            if active:
                done = passed * (self.unit // len(active))
                for queue in active:
                    self.left[queue] -= done * (self.alone if self.is_copies[queue] else self.speed)
        self.now = time


class _Stream:
    """The compute stream."""

    def __init__(self, program: Program) -> None:
        self.program = program
        size = len(program.names)
        self.start, self.end, self.reached = [0] * size, [0] * size, [0] * size
        self.cause = [NONE] * size
        self.wires = _Wires(program, self.cause)
        self.waited: dict[int, int] = {}
        self.exposed: dict[int, int] = {}

    def run(self, order: Sequence[int]) -> OperationTimes:
        """Run every operation in order."""
        program, wires = self.program, self.wires
        kinds, durations, gap, drains = program.kinds, program.duration_ns, program.launch_gap_ns, program.drains
        launch, compute, wait = OpKind.LAUNCH, OpKind.COMPUTE, OpKind.WAIT
        kernels = program.kernel or range(len(kinds))
        start, end, reached, cause = self.start, self.end, self.reached, self.cause
        # `free` is when the last issued operation ended; the next issue comes one gap later. `blocked` is the end of
        # the longest wait so far. They are kept apart because a gap and a wait overlap: the next issue comes at the
        # later of the two. `by_free` and `by_blocked` are the operations that caused them. `free` starts one gap early,
        # so that the first operation starts at 0.
        free, blocked = -gap, 0
        by_free = by_blocked = by_host = kernel = NONE
        # `issued` is when the host has issued the current operation: it issues them one after another, and waits only
        # where it reads device data. No kernel or launch starts before.
        issued, host = 0, program.host_ns
        for op in order:
            kind = kinds[op]
            if host:
                issued += host[op]
            has_work = kind is compute and durations[op] > 0
            if not has_work and kind is not launch and (kind is wait or not drains[op]):
                now = free if free > blocked else blocked
                start[op] = reached[op] = end[op] = now
                if kind is wait:
                    until, last = self._wait(op, now)
                    end[op] = until
                    if until > now:
                        blocked, by_blocked = until, last
                continue
            now, by = free if kernels[op] == kernel != NONE else free + gap, by_free
            kernel = kernels[op]
            if blocked > now:
                now, by = blocked, by_blocked
            if issued > now:
                now, by = issued, by_host
            start[op] = reached[op] = end[op] = free = now
            by_free = by
            if kind is launch:
                wires.launch(op, now, by)
            elif has_work:
                cause[op] = by
                free = end[op] = self._compute(durations[op], now)
                by_free = op
            if drains[op] and free > issued:
                issued, by_host = free, by_free
        if blocked > free:
            free, by_free = blocked, by_blocked
        return self._finish(order, free, by_free)

    def _compute(self, duration: int, now: int) -> int:
        """When compute that starts now ends.

        Its pace changes with the set of running collectives, so it advances from end to end.
        """
        wires = self.wires
        if wires.beside_pace == wires.alone_pace and not wires.shares and wires.beside == wires.alone:
            return now + duration
        wires.advance(now)
        if not wires.num_running:  # whatever is launched later advances the clock first
            return now + duration
        wires.set_speed(wires.beside)
        left = duration * wires.alone_pace
        while wires.pace < wires.alone_pace:
            event = wires.next_end()
            done = (event - now) * wires.pace
            if done >= left:
                break
            left -= done
            now = event
            wires.step(event)
        end = now - (-left // wires.pace)
        wires.advance(end)
        wires.set_speed(wires.alone)
        return end

    def _wait(self, op: int, now: int) -> tuple[int, int]:
        """Until when a wait blocks the stream, and the launch that ends last."""
        launches = self.program.waits_for[op]
        for launch in launches:
            self.waited.setdefault(launch, now)
            self.wires.wait(launch)
        return self._expose(launches, now)

    def _expose(self, launches: Sequence[int], now: int) -> tuple[int, int]:
        """Attribute the blocked time to launches in order of their ends, so that no time is counted twice."""
        last = NONE
        for end, launch in sorted((self.wires.end[launch], launch) for launch in launches):
            if end > now:
                self.exposed[launch] = self.exposed.get(launch, 0) + end - now
                now, last = end, launch
        return now, last

    def _finish(self, order: Sequence[int], free: int, last: int) -> OperationTimes:
        """Wait for everything that is still in flight."""
        wires = self.wires
        while wires.num_running:
            wires.step(wires.next_end())
        in_flight = [launch for launch, end in wires.end.items() if end > free]
        step, waited_for = self._expose(in_flight, max(free, 0))
        for launch, end in wires.end.items():
            self.start[launch], self.end[launch] = wires.start[launch], end
        return OperationTimes(
            order=order,
            start_ns=self.start,
            end_ns=self.end,
            reached_ns=self.reached,
            waited_ns=self.waited,
            exposed_ns=self.exposed,
            cause=self.cause,
            last=last if waited_for == NONE else waited_for,
            step_ns=step,
        )
