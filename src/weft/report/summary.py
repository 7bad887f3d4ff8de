"""Summary: two simulated runs in one table, as data, plain text and a rich table.

           before   after    change
step       1.20 ms  1.00 ms  -16.7 %
exposed    300 us   100 us   -66.7 %
...
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property

from rich.table import Table

from weft.quantities import count_text, duration_text, share_text, size_text
from weft.report.collective_record import CollectiveRecord
from weft.report.layers import ExposedLayers, exposed_by_layer, why_slow
from weft.report.plain_text import table
from weft.report.work import Work
from weft.simulation.timeline import NS_PER_US, Timeline

BETTER_STYLE, WORSE_STYLE = "green", "red"


@dataclass(frozen=True)
class SimulatedRun:
    """One simulated order, and the records of its collectives."""

    timeline: Timeline
    queues: tuple[str, ...] = ()
    """The group of each queue, as in `Program.queues`."""
    records: tuple[CollectiveRecord, ...] = ()
    """Its collectives, each with the decisions about it: `explain(module, report).collectives`."""

    @cached_property
    def record_of(self) -> dict[str, CollectiveRecord]:
        """Records by the name of the launch."""
        return {record.name: record for record in self.records}

    @cached_property
    def exposed_layers(self) -> tuple[ExposedLayers, ...]:
        """The exposed communication by layer, the longest first."""
        spans = ((self.record_of.get(span.name), span.exposed_ns / NS_PER_US) for span in self.timeline.collectives)
        return exposed_by_layer((record, time) for record, time in spans if record is not None)

    @property
    def why_slow(self) -> str:
        """Why the step takes so long, in one sentence."""
        timeline = self.timeline
        return why_slow(timeline.step_us, timeline.compute_us, timeline.exposed_us, self.exposed_layers)

    def group(self, queue: int) -> str:
        """The name of a queue's group, or of the queue if the group is not given."""
        return self.queues[queue] if queue < len(self.queues) else f"queue {queue}"

    @property
    def num_queues(self) -> int:
        return max([len(self.queues), *(span.queue + 1 for span in self.timeline.collectives)])


@dataclass(frozen=True)
class Totals:
    """One run in numbers. None: unknown, or not asked for."""

    step_us: float
    compute_us: float
    exposed_us: float
    hidden_us: float
    lower_bound_us: float | None
    gap: float | None
    """step / bound - 1."""
    peak_bytes: int | None
    num_collectives: int
    num_bytes: int | None
    """Size of the full tensors of all collectives, as in their records."""
    mfu: float | None = None
    tokens_per_second: float | None = None
    choices_bound_us: float | None = None
    """A lower bound for every choice of what to keep within the memory limit; None if the run decided nothing."""


@dataclass(frozen=True)
class Row:
    """One quantity of both runs as text."""

    name: str
    before: str
    after: str
    change: str
    better: bool | None
    """Whether the change is for the better; None: neither better nor worse."""


@dataclass(frozen=True)
class Summary:
    """Both runs in numbers."""

    before: Totals
    after: Totals

    def to_json(self) -> str:
        """The summary as JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The quantities that are known for at least one run."""
        return tuple(
            _row(quantity, before, after)
            for quantity in QUANTITIES
            for before, after in [(quantity.read(self.before), quantity.read(self.after))]
            if before is not None or after is not None
        )

    def lines(self) -> list[str]:
        """The table as plain text."""
        cells = [(row.name, row.before, row.after, row.change) for row in self.rows]
        return table([("", "before", "after", "change"), *cells])

    def to_rich(self) -> Table:
        """The table for a terminal."""
        shown = Table(box=None, pad_edge=False)
        shown.add_column("")
        for name in ("before", "after", "change"):
            shown.add_column(name, justify="right")
        for row in self.rows:
            style = "" if row.better is None else BETTER_STYLE if row.better else WORSE_STYLE
            shown.add_row(row.name, row.before, row.after, f"[{style}]{row.change}[/]" if style else row.change)
        return shown


def summarize(before: SimulatedRun, after: SimulatedRun, work: Work | None = None) -> Summary:
    """Both runs in numbers; MFU and tokens per second only if the work of a step is given."""
    return Summary(_totals(before, work or Work()), _totals(after, work or Work()))


def _totals(run: SimulatedRun, work: Work) -> Totals:
    timeline = run.timeline
    seconds = timeline.step_us / 1e6
    sizes = [record.num_bytes for record in run.records]
    known = [size for size in sizes if size is not None]
    is_known = len(known) == len(sizes) and (bool(sizes) or not timeline.collectives)
    return Totals(
        step_us=timeline.step_us,
        compute_us=timeline.compute_us,
        exposed_us=timeline.exposed_us,
        hidden_us=sum(span.hidden_ns for span in timeline.collectives) / NS_PER_US,
        lower_bound_us=timeline.lower_bound_us if timeline.lower_bound_ns else None,
        gap=timeline.gap if timeline.lower_bound_ns else None,
        peak_bytes=timeline.peak_bytes or None,
        num_collectives=len(timeline.collectives),
        num_bytes=sum(known) if is_known else None,
        mfu=work.flops_share / seconds if work.flops_share is not None and seconds else None,
        tokens_per_second=work.num_tokens / seconds if work.num_tokens is not None and seconds else None,
    )


@dataclass(frozen=True)
class _Quantity:
    name: str
    read: Callable[[Totals], float | None]
    text: Callable[[float], str]
    good: int
    """1: more is better; -1: less is better; 0: neither."""
    is_relative: bool = True
    """Whether a change is shown relative to the value before."""


QUANTITIES = (
    _Quantity("step", lambda totals: totals.step_us, duration_text, -1),
    _Quantity("exposed", lambda totals: totals.exposed_us, duration_text, -1),
    _Quantity("hidden", lambda totals: totals.hidden_us, duration_text, 0),
    _Quantity("bound", lambda totals: totals.lower_bound_us, duration_text, 0),
    _Quantity("bound of choices", lambda totals: totals.choices_bound_us, duration_text, 0),
    _Quantity("gap", lambda totals: totals.gap, share_text, -1, is_relative=False),
    _Quantity("peak memory", lambda totals: totals.peak_bytes, size_text, -1),
    _Quantity("collectives", lambda totals: totals.num_collectives, count_text, -1),
    _Quantity("bytes", lambda totals: totals.num_bytes, size_text, 0),
    _Quantity("MFU", lambda totals: totals.mfu, share_text, 1, is_relative=False),
    _Quantity("tokens/s", lambda totals: totals.tokens_per_second, count_text, 1),
)


def _row(quantity: _Quantity, before: float | None, after: float | None) -> Row:
    was, now = ("-" if value is None else quantity.text(value) for value in (before, after))
    if before is None or after is None:
        return Row(quantity.name, was, now, "", None)
    better = None if before == after or not quantity.good else (after > before) == (quantity.good > 0)
    if not quantity.is_relative:
        change = f"{(after - before) * 100:+.1f} points"
    else:
        change = f"{(after / before - 1) * 100:+.1f} %" if before else ""
    return Row(quantity.name, was, now, "" if before == after else change, better)
