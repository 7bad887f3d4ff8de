"""The joint search over buckets, order and memory: many runs of the scheduler, judged by the simulator.

Contract: the result is never slower than the order it started from, and never uses more memory than allowed. The
number of evaluations depends on effort and size, never on a clock, and all random choices come from a fixed seed. The
same program gives the same result on every rank.

The search first tries a portfolio of settings, then the plain orders of frameworks (`recipes.py`). It spends the rest
of its evaluations on random changes: of settings, and in small programs of the places of single jobs. If the program
has late launches (`job_tables.py`), it finally tries settings that treat them differently. If it is large as well, and
exposed to communication, the search then moves, splits and merges single launches (`launch_moves.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any, Literal

from weft.graph.dag import collector_paused
from weft.scheduling.job_tables import JobTables
from weft.scheduling.jobs import NARROW_SPANS, Emitter, Jobs, jobs_of
from weft.scheduling.launch_moves import LaunchMoves
from weft.scheduling.local_moves import Moves, with_waits
from weft.scheduling.memory_budget import NO_LIMIT
from weft.scheduling.recipes import recipe
from weft.scheduling.scheduler import Knobs, Merging, Schedule, Unit, schedule
from weft.simulation.memory import Curve, Footprint, memory_of
from weft.simulation.program import Program
from weft.simulation.simulator import OperationTimes, run, takes_part

Effort = Literal["fast", "default", "best"]
SPARE, SPARE_BYTES = 0.05, 1 << 26
"""Without a memory limit, a plan may use this share more than the given order, or this many bytes (64 MiB) more,
whichever is larger."""
OPERATIONS = {"fast": 50_000, "default": 120_000, "best": 2_000_000}
"""Total number of operations of all evaluations together. Small programs get more evaluations that way."""
LEAST = {"fast": 5, "default": 14, "best": 160}
"""Minimum number of evaluations."""
MOST = {"fast": 100, "default": 2_000, "best": 20_000}
"""Maximum number of evaluations."""
RECIPES = ((0, 1 << 28), (0, NO_LIMIT), (10, 1 << 28), (50, NO_LIMIT))
"""Plain orders: the length of their buckets in latencies (a bucket of ten reaches nine tenths of the bandwidth), and
the most bytes of a queue in flight (256 MiB is the default of hoist-launches and sink-waits)."""
CHANGES = 4
"""Number of settings to try between two rounds of moves."""
MOVES = 150
"""Number of moves in one round."""
LONGER = 50
"""Initial acceptance threshold for a longer order, in thousandths of the step; it falls to 0 within a round."""
LATE_BUCKET = 1000
"""Longest bucket of late launches, in latencies."""
SQUEEZES = 5
"""Number of retries, each with a smaller budget, of settings that need too much memory."""
MEMORY_MOVES = 300
"""Number of moves that are tried to get below a memory limit."""
NUM_SETTINGS = 3
"""Number of settings that a search passes on to probes of similar programs."""
EARLY = tuple(
    Knobs(window, hold=20, lookahead=1000, filler=300, bucket=500, patience=10, keep=keep)
    for window, keep in ((200, True), (80, False))
)
"""Settings that launch gathers as early as memory allows. With a memory limit, most of the shortest orders use them."""
FEW_JOBS = 200
"""Programs with at most this many jobs are also searched by moving single jobs."""
LAUNCH_OPERATIONS = {"fast": 0, "default": 500_000, "best": 4_000_000}
"""Total number of operations of all evaluations of moved launches together."""
EXPOSED = 20
"""Launches are moved while at least this many thousandths of the step are exposed."""
MISSES = 8
"""Illegal moves that may be tried for each evaluation of moved launches."""


@dataclass(frozen=True)
class Outcome:
    """The best order found."""

    program: Program
    order: Sequence[int]
    """All operations."""
    buckets: tuple[tuple[int, ...], ...]
    """Launches that become one, by operation."""
    step_ns: int
    peak_bytes: int
    """Above the limit only if the search found no order that fits; then it is the smallest peak that it found."""
    num_evaluations: int
    trace: OperationTimes
    """Times of that order."""
    memory: Curve
    duration_ns: tuple[int, ...]
    """Durations of all operations, with merged launches."""
    given_exposed_ns: dict[int, int]
    """Exposed time of each launch in the given order."""
    limit_bytes: int
    """The memory limit that was applied."""
    is_near_plain: bool = False
    """Whether a plain order that fits is nearly as short. A pipeline that differs in details may then be shorter."""
    settings: tuple[Knobs, ...] = ()
    """The best settings, which suit similar programs too."""

    @functools.cached_property
    def first_wait(self) -> dict[int, int]:
        """The first operation that waits for each launch."""
        found: dict[int, int] = {}
        for op in self.order:
            for launch in self.program.waits_for[op]:
                found.setdefault(launch, op)
        return found


def search(
    program: Program,
    effort: Effort = "default",
    limit_bytes: int | None = None,
    merging: MergingOf | None = None,
    settings: Sequence[Knobs] = (),
) -> Outcome:
    """The best order of a program within a memory limit; by default slightly more than the given order uses.

    `settings`, for example from a similar program, are tried first.
    """
    with collector_paused():
        return _Search(program, effort, limit_bytes, merging).outcome(settings)


def probe(
    program: Program, settings: Sequence[Knobs], limit_bytes: int | None, merging: MergingOf | None = None
) -> tuple[int, int]:
    """Step and peak of the best of a few settings: a cheap estimate of the result of `search`."""
    with collector_paused():
        return _Search(program, "fast", limit_bytes, merging).probed(settings)


def allowed_bytes(peak_bytes: int) -> int:
    """The memory that a plan may use if no limit is given, from the peak of the given order."""
    return peak_bytes + max(int(peak_bytes * SPARE), SPARE_BYTES)


MergingOf = Callable[[Jobs], Merging]
LEAN = Knobs(window=0, hold=0, lookahead=0, budget_bytes=0)
"""Settings for the least memory."""
UNKNOWN = 1 << 62
"""The peak of an order that is too slow to be the best; it is not measured."""


@dataclass(frozen=True)
class _Found:
    step_ns: int
    peak_bytes: int
    order: Sequence[int]
    buckets: tuple[tuple[int, ...], ...]
    knobs: Knobs | None
    """None: the given order."""
    units: tuple[Unit, ...] = ()
    """The schedule, for moves."""
    in_use_bytes: int = 0
    """Peak memory, by `JobMemory`."""


class _Search:
    def __init__(self, program: Program, effort: Effort, limit_bytes: int | None, merging: MergingOf | None) -> None:
        self.program = program
        self.effort: Effort = effort
        size = max(len(program.names), 1)
        self.left = min(max(OPERATIONS[effort] // size, LEAST[effort]), MOST[effort])
        self.num_evaluations = self.left
        self.sends = limit_bytes is not None
        self.footprint = Footprint(program)
        self.jobs, self.tables = self._cut_into_jobs(limit_bytes)
        self.emitter = Emitter(self.jobs)
        self.merging = merging(self.jobs) if merging is not None else None
        trace = run(program)
        self.takes_part = takes_part(program)
        peak = self.footprint.peak(trace.order)
        self.given_exposed = trace.exposed_ns
        self.given = _Found(trace.step_ns, peak, trace.order, (), None)
        self.limit = allowed_bytes(peak) if limit_bytes is None else limit_bytes
        self.budget = max(self.limit - (peak - int(self.tables.memory.curve.max(initial=0))), 0)
        self.best = self.given
        self.tried: dict[Knobs, _Found] = {}
        self.seen: dict[Schedule, _Found] = {}
        self.judged: dict[tuple[Unit, ...], _Found] = {}
        """Every schedule that was evaluated, with its peak if that was measured. Moves of few jobs repeat many."""
        self.plain: list[_Found] = []
        """The plain orders of `recipes.py`."""
        self.squeezed_before: set[Knobs] = set()
        self.random = Random(0)
        self.moves = Moves(self.jobs, self.merging, self.random)

    def _cut_into_jobs(self, limit_bytes: int | None) -> tuple[Jobs, JobTables]:
        """The jobs of the program; smaller ones if the usual ones, in order and with immediate waits, do not fit."""
        found: list[tuple[int, Jobs, JobTables]] = []
        for span in (None, *NARROW_SPANS):
            jobs = jobs_of(self.program, span)
            tables = JobTables(jobs)
            if limit_bytes is None:
                return jobs, tables
            peak = self.footprint.given_bytes + int(tables.memory.curve.max(initial=0))
            if peak <= limit_bytes:
                return jobs, tables
            found.append((peak, jobs, tables))
        _, jobs, tables = min(found, key=lambda each: each[0])
        return jobs, tables

    def outcome(self, settings: Sequence[Knobs]) -> Outcome:
        if self.best.peak_bytes > self.limit:
            self.save_memory()
        if self.jobs.program.queues and self.best.peak_bytes <= self.limit:
            for knobs in settings:  # as they are: where the limit does not bind, they give the orders known without it
                self.try_knobs(knobs)
            self.try_settings(settings)
            for knobs in self.portfolio():
                if self.left <= 0 and not self.has_room_for_none():
                    break
                self.try_knobs(knobs)
            self.try_recipes()
            self.improve()
            self.try_late()
            self.move_launches(LAUNCH_OPERATIONS[self.effort])
        best = self.best
        program = self.merged(best.buckets)
        trace = run(program, best.order)
        return Outcome(
            program=self.program,
            order=best.order,
            buckets=best.buckets,
            step_ns=best.step_ns,
            peak_bytes=best.peak_bytes,
            num_evaluations=self.num_evaluations - self.left,
            trace=trace,
            memory=memory_of(program, best.order, trace.reached_ns, trace.end_ns)[1],
            duration_ns=program.duration_ns,
            given_exposed_ns=self.given_exposed,
            limit_bytes=self.limit,
            is_near_plain=any(self.is_near(found) for found in self.plain),
            settings=self.best_settings(),
        )

    def probed(self, settings: Sequence[Knobs]) -> tuple[int, int]:
        """Step and peak of the best of these settings, with budgets for the limit of this search."""
        if self.best.peak_bytes > self.limit:
            self.save_memory()
        if self.jobs.program.queues and self.best.peak_bytes <= self.limit:
            self.try_settings((*settings, *EARLY))
        return self.best.step_ns, self.best.peak_bytes

    def try_settings(self, settings: Sequence[Knobs]) -> None:
        """Try settings with budgets for the limit of this search."""
        for knobs in dict.fromkeys(settings):
            self.try_knobs(replace(knobs, sends=self.sends, budget_bytes=self.budget))
        for knobs in self.squeezed() if settings else ():
            self.try_knobs(knobs)

    def best_settings(self) -> tuple[Knobs, ...]:
        """The settings of the shortest schedules that differ from each other."""
        ranked = sorted(self.tried.items(), key=lambda each: each[1].step_ns)
        chosen: dict[tuple[Unit, ...], Knobs] = {}
        for knobs, found in ranked:
            chosen.setdefault(found.units, knobs)
        return tuple(chosen.values())[:NUM_SETTINGS]

    def merged(self, buckets: Sequence[Sequence[int]]) -> Program:
        """The program with merged launches: the first launch of a bucket takes the time of all.

        The host issues one launch for each bucket.
        """
        if not buckets or self.merging is None:
            return self.program
        program, job_of = self.program, self.jobs.job_of
        duration, kernel = list(program.duration_ns), list(program.kernel or range(len(program.names)))
        host = list(program.host_ns)
        for bucket in buckets:
            for op in bucket:
                duration[op], kernel[op] = 0, bucket[0]
            duration[bucket[0]] = self.merging.duration([job_of[op] for op in bucket])
            for op in bucket[1:] if host else ():
                host[op] = 0
        return replace(program, duration_ns=tuple(duration), kernel=tuple(kernel), host_ns=tuple(host))

    # Settings.

    def portfolio(self) -> Iterator[Knobs]:
        """Settings to try; later ones vary the best so far."""
        for hold, (window, lookahead) in product((0, 30, 100), ((40, 30), (200, 100))):
            yield Knobs(window, hold, lookahead, sends=self.sends)
        if self.sends and self.merging is not None:
            yield from (replace(knobs, sends=True, budget_bytes=self.budget) for knobs in EARLY)
        yield from self.squeezed()
        if self.best.knobs is None:
            yield from (replace(LEAN, lookahead=lookahead, sends=self.sends) for lookahead in (0, 30))
        for bucket, patience in ((20, 0), (100, 300), (500, 300), (1000, 300)) if self.merging is not None else ():
            yield replace(self.best_knobs(), bucket=bucket, patience=patience)
        yield from self.filled()
        yield from self.squeezed()
        yield replace(self.best_knobs(), finish="work")
        yield replace(self.best_knobs(), keep=True, budget_bytes=self.budget)
        yield replace(self.best_knobs(), hold=1000)
        yield from self.squeezed()

    def filled(self) -> Iterator[Knobs]:
        """Settings that hold reductions back for large buckets; more of them if the first becomes the best."""
        if self.merging is None:
            return
        first = replace(self.best_knobs(), bucket=1000, fill=20)
        yield first
        if self.best.knobs == first:
            yield from (replace(first, fill=fill) for fill in (5, 50))

    def squeezed(self) -> Iterator[Knobs]:
        """The fastest settings that need too much memory, with their budget lowered by the excess."""
        faster = [
            (found.step_ns, number, knobs)
            for number, (knobs, found) in enumerate(self.tried.items())
            if self.is_over(found) and knobs not in self.squeezed_before
        ]
        for _, _, knobs in sorted(faster)[:2]:
            for attempt in range(1, SQUEEZES + 1):
                found = self.tried[knobs]
                if not self.is_over(found):
                    break
                self.squeezed_before.add(knobs)
                over = (found.peak_bytes - self.limit) * attempt
                knobs = replace(knobs, budget_bytes=max(0, min(knobs.budget_bytes, found.in_use_bytes) - over))
                self.left += 1  # an order that fits is worth an extra evaluation
                yield knobs

    def has_room_for_none(self) -> bool:
        """Whether every order faster than the given one needs too much memory; the search then continues."""
        return self.best.knobs is None and any(map(self.is_over, self.tried.values()))

    def is_over(self, found: _Found) -> bool:
        """Whether an order would be the best if it did not need too much memory."""
        return self.limit < found.peak_bytes < UNKNOWN and found.step_ns < self.best.step_ns

    def best_knobs(self) -> Knobs:
        return self.best.knobs or Knobs(sends=self.sends)

    def changed(self, knobs: Knobs) -> Knobs:
        """The settings with one of them changed at random."""
        values: dict[str, tuple[int | str, ...]] = {
            "window": (0, 10, 20, 40, 80, 150, 300, 600),
            "hold": (0, 5, 10, 20, 30, 50, 80, 120, 200, 400, 1000),
            "lookahead": (5, 10, 20, 30, 50, 80, 120, 200, 1000),
            "filler": (20, 50, 100, 200, 300, 500, 800),
            "finish": ("tail", "work"),
            "keep": (False, True),
            "bucket": (0, 5, 10, 20, 50, 100, 500, 1000, 2000) if self.merging is not None else (0,),
            "fill": (0, 2, 5, 10, 20, 50, 100, 500) if self.merging is not None else (0,),
            "patience": (0, 1, 10, 100, 300, 1000) if self.merging is not None else (0,),
        }
        name = self.random.choice(list(values))
        chosen: dict[str, Any] = {name: self.random.choice(values[name])}
        return replace(knobs, **chosen)

    def try_knobs(self, knobs: Knobs) -> None:
        if knobs in self.tried:
            self.left -= 1
            return
        made = schedule(self.tables, knobs, self.merging)
        if made in self.seen:  # different settings often give the same schedule
            self.left -= 1
        else:
            self.seen[made] = self.judge(made, knobs)
            self.keep(self.seen[made])
        self.tried[knobs] = self.seen[made]

    def try_recipes(self) -> None:
        """Try the plain orders of frameworks, regardless of what the portfolio found."""
        for latencies, in_flight_bytes in RECIPES:
            made = recipe(self.tables, self.merging, latencies, in_flight_bytes)
            if made not in self.seen:
                self.seen[made] = self.judge(made, self.best_knobs())
                self.left += 1
                self.keep(self.seen[made])
            self.plain.append(self.seen[made])

    def is_near(self, found: _Found) -> bool:
        """Whether an order fits and is not much longer than the best."""
        return found.peak_bytes <= self.limit and found.step_ns * 1000 <= self.best.step_ns * (1000 + LONGER)

    def try_late(self) -> None:
        """Settings for the late launches, if there are any, and a few random changes of the best of them.

        They come after everything else and on top of its evaluations, so they can only shorten the step.
        """
        if self.merging is None or not any(self.tables.is_late):
            return
        known, first = self.best, self.best_knobs()
        self.try_knobs(replace(first, together=True, bucket=first.bucket or LATE_BUCKET))
        first = replace(first, at_once=True, together=True, bucket=LATE_BUCKET, fill=50)
        self.try_knobs(replace(first, hold=0, window=40, lookahead=30))
        self.try_knobs(replace(first, hold=100, window=200, lookahead=100))
        if self.best_knobs().at_once:
            self.try_knobs(replace(self.best_knobs(), fill=100))
        for knobs in self.squeezed():
            self.try_knobs(knobs)
        for _ in range(CHANGES if self.best is not known else 0):
            self.try_knobs(self.changed(self.best_knobs()))

    # Judging.

    def judge(self, made: Schedule, knobs: Knobs | None) -> _Found:
        """Evaluate a schedule. Memory is measured only if the schedule may be the best."""
        self.left -= 1
        found = self.judged.get(made.units)
        if found is None:
            order = self.emitter.order(made.events)
            buckets = tuple(tuple(self.jobs.ops[job][0] for job in bucket) for bucket in made.buckets)
            step_ns = run(self.merged(buckets), [op for op in order if self.takes_part[op]], is_legal=True).step_ns
            found = _Found(step_ns, UNKNOWN, order, buckets, knobs, made.units, made.in_use_bytes)
            self.judged[made.units] = found
        best = self.best
        if found.step_ns > best.step_ns + best.step_ns * LONGER // 1000 and best.peak_bytes <= self.limit:
            return replace(found, peak_bytes=UNKNOWN, knobs=knobs)
        if found.peak_bytes == UNKNOWN:
            found = self.judged[made.units] = replace(found, peak_bytes=self.footprint.peak(found.order))
        return replace(found, knobs=knobs)

    def is_better(self, found: _Found) -> bool:
        best = self.best
        if (found.peak_bytes > self.limit) != (best.peak_bytes > self.limit):
            return found.peak_bytes <= self.limit
        if found.peak_bytes > self.limit:
            return found.peak_bytes < best.peak_bytes
        return (found.step_ns, found.peak_bytes) < (best.step_ns, best.peak_bytes)

    def keep(self, found: _Found) -> bool:
        if not self.is_better(found):
            return False
        self.best = found
        return True

    # Moves.

    def improve(self) -> None:
        """Spend the remaining evaluations on changed settings and, in small programs, on moves.

        A round of moves that finds no new schedule ends the search: the program has few orders, and all are known.
        """
        is_small = len(self.jobs) <= FEW_JOBS
        while self.left > 0:
            for _ in range(CHANGES):
                self.try_knobs(self.changed(self.best_knobs()))
            if is_small:
                num_known = len(self.judged)
                self.move_jobs()
                if len(self.judged) == num_known:
                    return

    def move_jobs(self) -> None:
        """One round of moves, by threshold accepting: a slightly longer order is accepted at first, later none."""
        current = self.best
        units = list(current.units) or self.as_given()
        for number in range(MOVES):
            moved = self.moves.changed(units) if self.left > 0 else None
            if moved is None:
                continue
            found = self.judge(Schedule(tuple(moved)), current.knobs)
            slack = current.step_ns * LONGER * (MOVES - number) // (MOVES * 1000)
            if self.keep(found) or (found.peak_bytes <= self.limit and found.step_ns <= current.step_ns + slack):
                units, current = moved, found

    def move_launches(self, operations: int) -> None:
        """Move, split and merge launches of a large program with late launches; keep what makes the step no longer.

        Like the settings for late launches, these evaluations come on top of all others.
        """
        if self.merging is None or not self.best.units or len(self.jobs) <= FEW_JOBS or not any(self.tables.is_late):
            return
        moves, current, units = LaunchMoves(self.jobs, self.merging, self.random), self.best, list(self.best.units)
        exposed = self.exposed_jobs(current)
        for _ in range(operations // len(self.program.names)):
            if sum(exposed.values()) * 1000 < EXPOSED * current.step_ns:
                return
            tries = (moves.changed_launch(units, exposed) for _ in range(MISSES))
            moved = next((found for found in tries if found is not None), None)
            if moved is None:
                continue
            found = self.judge(Schedule(tuple(moved)), current.knobs)
            if found.peak_bytes <= self.limit and found.step_ns <= current.step_ns:
                if self.keep(found):
                    exposed = self.exposed_jobs(found)
                units, current = moved, found

    def exposed_jobs(self, found: _Found) -> dict[int, int]:
        """The exposed time of each launch of an order, by job."""
        trace = run(self.merged(found.buckets), [op for op in found.order if self.takes_part[op]], is_legal=True)
        return {self.jobs.job_of[op]: ns for op, ns in trace.exposed_ns.items()}

    def as_given(self) -> list[Unit]:
        """The jobs in their own order, each launch waited for before its first consumer."""
        return with_waits(self.jobs)

    def save_memory(self) -> None:
        """Look for an order that needs less memory.

        The sequence of tries does not depend on the limit; only its end does. So a user who allows the peak that an
        error named gets the order that needs it.
        """
        lean = [replace(LEAN, lookahead=lookahead, sends=sends) for sends in (False, True) for lookahead in (0, 5, 30)]
        for knobs in lean:
            if self.best.peak_bytes > self.limit:
                self.keep_leaner(self.judge(schedule(self.tables, knobs), knobs))
        if len(self.jobs) > FEW_JOBS:
            return
        moves = Moves(self.jobs, None, Random(1))
        units = list(self.best.units) or self.as_given()
        for _ in range(MEMORY_MOVES):
            moved = moves.changed(units) if self.best.peak_bytes > self.limit else None
            if moved is not None and self.keep_leaner(self.judge(Schedule(tuple(moved)), None)):
                units = moved

    def keep_leaner(self, found: _Found) -> bool:
        if (found.peak_bytes, found.step_ns) > (self.best.peak_bytes, self.best.step_ns):
            return False
        self.best = found
        return True
