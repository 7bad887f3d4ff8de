"""TraceComparison: a measured step compared with the predicted one, as data, text and JSON.

Contract: exposed time means the same on both sides: the time during which the compute stream is idle while collectives
run, divided among those that end before it continues (`attribute_stalls`). Times in the data are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.cost.calibration.measured_step import MeasuredStep
from weft.cost.calibration.stalls import attribute_stalls
from weft.quantities import duration_text, size_text
from weft.report.collective_alignment import Alignment, align
from weft.report.plain_text import plain_line, table
from weft.simulation.predicted_step import PredictedCollective, PredictedStep
from weft.simulation.timeline import NS_PER_US

MAX_ROWS = 20
"""Most collectives that the text lists; the data has all of them."""
MAX_LISTED = 5
"""Most differences of one sort that the text lists."""
TOLERANCE = 0.01
"""Exposed times that differ by less than this share of the measured step count as equal."""


@dataclass(frozen=True)
class ComparedTime:
    """One total of the step."""

    name: str
    predicted_us: float | None
    measured_us: float | None
    """None if the trace does not say; likewise for the prediction."""

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        return self.predicted_us / self.measured_us - 1 if self.predicted_us is not None and self.measured_us else None


@dataclass(frozen=True)
class ComparedCollective:
    """One planned collective that ran."""

    name: str
    kind: str
    group: str
    num_bytes: int | None
    planned_position: int
    """In the planned launch order, from 0."""
    position: int
    """In the launch order that ran."""
    predicted_start_us: float
    start_us: float
    predicted_us: float
    measured_us: float | None
    """The shortest time over the given ranks; None if the trace does not say."""
    late_us: float | None
    """How much longer this rank's kernel ran than the shortest: it waited for other ranks. None with one trace."""
    predicted_exposed_us: float
    exposed_us: float

    @property
    def disagreement_us(self) -> float:
        """The larger of the errors of its time and of its exposed time."""
        duration = 0.0 if self.measured_us is None else abs(self.predicted_us - self.measured_us)
        return max(duration, abs(self.predicted_exposed_us - self.exposed_us))


@dataclass(frozen=True)
class ComparedKind:
    """All paired collectives of one group and kind."""

    group: str
    kind: str
    count: int
    predicted_us: float
    measured_us: float
    predicted_exposed_us: float
    exposed_us: float


@dataclass(frozen=True)
class ComparedProduct:
    """How often a shape of matrix product was planned, and how often it ran."""

    dtype: str
    batch: int
    rows: int
    columns: int
    terms: int
    planned: int
    ran: int

    @property
    def text(self) -> str:
        """`bf16 4096 x 1024 x 512`: rows, columns and terms."""
        batch = f"{self.batch} times " if self.batch > 1 else ""
        return f"{batch}{self.dtype} {self.rows} x {self.columns} x {self.terms}"


@dataclass(frozen=True)
class TraceComparison:
    """A measured step compared with a predicted one."""

    trace: str
    step: int | None
    """Number of the profiler's mark; None if the trace has no marks."""
    rank: int | None
    is_as_planned: bool
    """Whether exactly the planned collectives ran, in the planned order."""
    first_difference: str
    """Empty if nothing differs."""
    moved: tuple[str, ...]
    """Collectives that ran earlier or later than planned."""
    regrouped: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    outside: tuple[str, ...]
    """Collectives outside of the plan: before its first, after its last, or in another group."""
    num_planned: int
    num_ran: int
    totals: tuple[ComparedTime, ...]
    kinds: tuple[ComparedKind, ...]
    collectives: tuple[ComparedCollective, ...]
    """Those that were planned and ran, the largest disagreement first."""
    notes: tuple[str, ...]
    products: tuple[ComparedProduct, ...] | None = None
    """Matrix products by dtype and shape; None if the plan or the trace does not say."""

    @property
    def are_products_as_planned(self) -> bool | None:
        """Whether exactly the planned products ran; None if that is unknown."""
        return None if self.products is None else all(each.planned == each.ran for each in self.products)

    @property
    def timed(self) -> tuple[ComparedCollective, ...]:
        """The collectives whose times the trace shows."""
        return tuple(each for each in self.collectives if each.measured_us is not None)

    @property
    def surprises(self) -> tuple[ComparedCollective, ...]:
        """Collectives that were waited for longer or shorter than planned, by more than 1 % of the step."""
        limit = TOLERANCE * next(total.measured_us or 0.0 for total in self.totals if total.name == "step")
        found = (each for each in self.timed if abs(each.exposed_us - each.predicted_exposed_us) > limit)
        return tuple(sorted(found, key=lambda each: -abs(each.exposed_us - each.predicted_exposed_us)))

    def to_json(self) -> str:
        """The comparison as JSON."""
        told: dict[str, Any] = asdict(self)
        told["are_products_as_planned"] = self.are_products_as_planned
        told["surprises"] = [each.name for each in self.surprises]
        return json.dumps(told, indent=1, sort_keys=True, allow_nan=False)

    def __str__(self) -> str:
        lines = [*self._totals(), "", *self._order(), *self._products(), *self._waits(), ""]
        lines += [*self._kinds(), "", *self._rows()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(map(plain_line, lines))

    def _totals(self) -> list[str]:
        rows = [("", "predicted", "measured", "error")]
        for total in self.totals:
            error = "" if total.error is None else f"{total.error * 100:+.1f} %"
            rows.append((total.name, _time(total.predicted_us), _time(total.measured_us), error))
        return table(rows)

    def _order(self) -> list[str]:
        if self.is_as_planned:
            return [f"order: the {self.num_planned} planned collectives ran, and in the planned order"]
        lines = [f"order: differs from the plan ({self.num_planned} collectives planned, {self.num_ran} ran)"]
        lines += [f"  first difference: {self.first_difference}"] if self.first_difference else []
        for what, found in (
            ("merged differently", self.regrouped),
            ("planned, but did not run", self.missing),
            ("ran, but was not planned", self.extra),
            ("ran earlier or later than planned", self.moved),
        ):
            lines += [f"  {what}: {each}" for each in found[:MAX_LISTED]]
            lines += [f"  {what}: {len(found) - MAX_LISTED} more"] if len(found) > MAX_LISTED else []
        return lines

    def _products(self) -> list[str]:
        if self.products is None:
            return []
        planned, ran = sum(each.planned for each in self.products), sum(each.ran for each in self.products)
        if self.are_products_as_planned:
            return [f"products: the {planned} planned matmuls ran, with the planned shapes"]
        lines = [f"products: differ from the plan ({planned} matmuls planned, {ran} ran)"]
        other = sorted((e for e in self.products if e.planned != e.ran), key=lambda e: -abs(e.planned - e.ran))
        lines += [f"  {each.text}: planned {each.planned}, ran {each.ran}" for each in other[:MAX_LISTED]]
        return lines + ([f"  {len(other) - MAX_LISTED} more shapes"] if len(other) > MAX_LISTED else [])

    def _waits(self) -> list[str]:
        count, found = len(self.timed), self.surprises
        if not count:
            return ["waits: the trace does not show when the planned collectives ran"] if self.collectives else []
        as_planned = f"{count - len(found)} of {count} collectives are exposed as predicted, within 1 % of the step"
        lines = [f"waits: {as_planned}"]
        for each in found[:MAX_LISTED]:
            predicted, measured = duration_text(each.predicted_exposed_us), duration_text(each.exposed_us)
            lines.append(f"  {each.name}: predicted {predicted}, measured {measured}")
        return lines

    def _kinds(self) -> list[str]:
        rows: list[tuple[str, ...]] = [
            ("group", "kind", "count", "predicted", "measured", "exposed: predicted", "measured")
        ]
        for each in self.kinds:
            times = (each.predicted_us, each.measured_us, each.predicted_exposed_us, each.exposed_us)
            rows.append((each.group, each.kind, str(each.count), *map(duration_text, times)))
        return table(rows)

    def _rows(self) -> list[str]:
        has_late = any(each.late_us is not None for each in self.collectives)
        head = ("largest disagreements", "group", "size", "start: predicted", "measured", "time: predicted", "measured")
        rows: list[tuple[str, ...]] = [
            (*head, *(("late ranks",) if has_late else ()), "exposed: predicted", "measured")
        ]
        for each in self.collectives[:MAX_ROWS]:
            late = (_time(each.late_us),) if has_late else ()
            starts = duration_text(each.predicted_start_us), duration_text(each.start_us)
            times = duration_text(each.predicted_us), _time(each.measured_us)
            size = "-" if each.num_bytes is None else size_text(each.num_bytes)
            exposed = duration_text(each.predicted_exposed_us), duration_text(each.exposed_us)
            rows.append((each.name, each.group, size, *starts, *times, *late, *exposed))
        rest = len(self.collectives) - MAX_ROWS
        return [*table(rows), *([f"... and {rest} more"] if rest > 0 else [])]


def _time(us: float | None) -> str:
    return "-" if us is None else duration_text(us)


def compare_step(prediction: PredictedStep, step: MeasuredStep, others: Sequence[MeasuredStep] = ()) -> TraceComparison:
    """Compare a prediction with a step of one rank; `others` are the same step on other ranks.

    A rank that arrives early waits inside its kernel. With several ranks, the shortest time counts for a collective.
    """
    found = align(prediction, step)
    shortest = [_durations(align(prediction, other), other) for other in others]
    predicted_exposed = _predicted_exposed(found.planned)
    rows: list[ComparedCollective] = []
    own = _durations(found, step)
    for i, j in found.pairs:
        planned, ran = found.planned[i], step.collectives[j]
        here = own.get(i)
        best = None if here is None else min([here, *(times[i] for times in shortest if i in times)])
        rows.append(
            ComparedCollective(
                planned.name,
                planned.kind,
                planned.group,
                planned.num_bytes,
                i,
                j,
                planned.start_ns / NS_PER_US,
                ran.start_ns / NS_PER_US,
                (planned.end_ns - planned.start_ns) / NS_PER_US,
                None if best is None else best / NS_PER_US,
                None if here is None or best is None or not others else (here - best) / NS_PER_US,
                predicted_exposed[i] / NS_PER_US,
                ran.exposed_ns / NS_PER_US,
            )
        )
    rows.sort(key=lambda row: (-row.disagreement_us, row.planned_position))
    return TraceComparison(
        step.path,
        step.number,
        step.rank,
        found.is_as_planned,
        "" if found.is_as_planned else _difference(found, step),
        tuple(f"{found.planned[i].name}: planned as number {i + 1}, ran as number {j + 1}" for i, j in found.moved),
        tuple(_regrouping(found, step, k) for k in range(len(found.regrouped))),
        tuple(_planned_text(found.planned[i]) for i in found.missing),
        tuple(f"number {j + 1}: {_ran_text(found, step, j)}" for j in found.extra),
        tuple(f"number {j + 1}: {_ran_text(found, step, j)}" for j in found.outside),
        len(found.planned),
        len(step.collectives) - len(found.outside),
        _totals(prediction, step, sum(predicted_exposed)),
        _by_kind(rows),
        tuple(rows),
        tuple(_notes(prediction, found, step, others)),
        _products(prediction, step),
    )


def _products(prediction: PredictedStep, step: MeasuredStep) -> tuple[ComparedProduct, ...] | None:
    if prediction.products is None or not step.products:
        return None
    planned = {(p.dtype, p.batch, p.rows, p.columns, p.terms): p.count for p in prediction.products}
    ran = {(p.dtype, p.batch, p.rows, p.columns, p.terms): count for p, count in step.products}
    shapes = sorted({*planned, *ran})
    return tuple(ComparedProduct(*shape, planned.get(shape, 0), ran.get(shape, 0)) for shape in shapes)


def _durations(found: Alignment, step: MeasuredStep) -> dict[int, int]:
    """How long each planned collective ran."""
    spans = ((i, step.collectives[j]) for i, j in found.pairs)
    return {i: each.end_ns - each.start_ns for i, each in spans if each.end_ns is not None}


def _predicted_exposed(planned: Sequence[PredictedCollective]) -> list[int]:
    """Predicted exposed times, attributed in the same way as in a trace, which does not show which wait blocks."""
    stalls = sorted((each.end_ns - each.exposed_ns, each.end_ns) for each in planned if each.exposed_ns)
    return attribute_stalls(stalls, [(each.start_ns, each.end_ns) for each in planned])


def _totals(prediction: PredictedStep, step: MeasuredStep, exposed_ns: int) -> tuple[ComparedTime, ...]:
    ran = [each.end_ns - each.start_ns for each in step.collectives if each.end_ns is not None]
    is_timed = len(ran) == len(step.collectives)
    idle_ns = step.step_ns - step.compute_ns - step.exposed_ns
    predicted_idle_ns = prediction.step_ns - prediction.compute_ns - exposed_ns
    communication_ns = sum(each.end_ns - each.start_ns for each in prediction.collectives)
    rows: list[tuple[str, int | None, int | None]] = [
        ("step", prediction.step_ns, step.step_ns),
        ("compute", prediction.compute_ns, step.compute_ns),
        ("communication", communication_ns, sum(ran) if is_timed else None),
        ("exposed", exposed_ns, step.exposed_ns if is_timed else None),
        ("gaps", predicted_idle_ns, idle_ns if is_timed else None),
        ("gaps from a late host", None, step.host_late_ns),
    ]
    return tuple(ComparedTime(name, *(None if ns is None else ns / NS_PER_US for ns in both)) for name, *both in rows)


def _by_kind(rows: Sequence[ComparedCollective]) -> tuple[ComparedKind, ...]:
    found: dict[tuple[str, str], list[ComparedCollective]] = {}
    for row in sorted(rows, key=lambda row: row.planned_position):
        found.setdefault((row.group, row.kind), []).append(row)
    return tuple(
        ComparedKind(
            group,
            kind,
            len(each),
            sum(row.predicted_us for row in each),
            sum(row.measured_us or 0.0 for row in each),
            sum(row.predicted_exposed_us for row in each),
            sum(row.exposed_us for row in each),
        )
        for (group, kind), each in found.items()
    )


def _notes(
    prediction: PredictedStep, found: Alignment, step: MeasuredStep, others: Sequence[MeasuredStep]
) -> list[str]:
    notes = list(step.notes)
    if apart := len(prediction.collectives) - len(found.planned):
        notes.append(f"not compared: {apart} planned transfers, barriers, and collectives of one rank or no bytes")
    if found.outside:
        notes.append(f"{len(found.outside)} collectives of the step lie outside of the plan")
    matched = set(found.groups.values())
    wanted = dict.fromkeys(each.group for each in found.planned)
    if step.groups and (unmatched := [name for name in wanted if name not in matched]):
        notes.append(f"no group of the trace was recognised as {', '.join(unmatched)}")
    if not step.groups and len(wanted) > 1:
        notes.append("the trace does not say which group a collective belongs to: groups are not compared")
    if prediction.products and not step.products:
        notes.append("the trace shows no shapes of matmuls (record_shapes=True; not in CUDA graphs): not compared")
    if not others:
        notes.append("one rank's times include waiting for late ranks; give the traces of other ranks with --rank")
    return notes


def _planned_text(planned: PredictedCollective) -> str:
    size = "unknown size" if planned.num_bytes is None else size_text(planned.num_bytes)
    return f"{planned.name} ({planned.kind} of {size} in {planned.group})"


def _ran_text(found: Alignment, step: MeasuredStep, j: int) -> str:
    ran = step.collectives[j]
    size = "unknown size" if ran.num_bytes is None else size_text(ran.num_bytes)
    group = found.groups.get(ran.group) or (f"group {ran.group!r}" if ran.group else "an unknown group")
    return f"{ran.kind.value} of {size} in {group}"


def _regrouping(found: Alignment, step: MeasuredStep, k: int) -> str:
    each = found.regrouped[k]
    planned = ", ".join(found.planned[i].name for i in each.planned[:MAX_LISTED])
    planned += f" and {len(each.planned) - MAX_LISTED} more" if len(each.planned) > MAX_LISTED else ""
    ran = f"{len(each.ran)} launches from number {each.ran[0] + 1} on, the first {_ran_text(found, step, each.ran[0])}"
    return f"{len(each.planned)} planned ({planned}) ran as {ran}"


def _difference(found: Alignment, step: MeasuredStep) -> str:
    if found.first is None:
        return ""
    i, j = found.first
    planned = "nothing" if i is None else f"number {i + 1}, {_planned_text(found.planned[i])}"
    ran = "nothing" if j is None else f"number {j + 1}, {_ran_text(found, step, j)}"
    return f"planned {planned}; ran {ran}"
