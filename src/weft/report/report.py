"""Report: what a run did, as data, text and JSON. Its JSON is the schema."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding

from weft.errors import ReportError, compose
from weft.passes.pipeline import LogEntry
from weft.plan.decision import Decision, Reason
from weft.report.plain_text import plain
from weft.report.stream_counts import StreamRecord
from weft.version import VERSION

if TYPE_CHECKING:
    from weft.report.comparison import Comparison

MAX_EXPOSED = 20
"""Decisions about exposed collectives that the text shows; all of them are in the data."""
MAX_ALIKE = 3
"""Decisions of one pass with one reason that the text shows each; of more it shows the first and their number."""
HINT = """\
of each collective: `weft explain SOURCE`; every decision: --json, or in Python report.applied and report.declined"""


@dataclass(frozen=True)
class PassRecord:
    """One pass of the run."""

    spec: str
    changed: bool
    seconds: float
    applied: int
    declined: dict[str, int]
    """Number of declined opportunities by reason."""


SHARED_INPUTS = (
    "inputs may share memory, and the graph writes some: around such a write the reads of inputs keep their place. "
    "Trace with fake tensors or weft.capture, so that the graph says where its inputs lie"
)


@dataclass(frozen=True)
class GraphRecord:
    """The size of a graph."""

    num_nodes: int
    num_collectives: int
    digest: str


@dataclass(frozen=True)
class Report:
    """The whole run."""

    before: GraphRecord
    after: GraphRecord
    passes: tuple[PassRecord, ...]
    applied: tuple[Decision, ...]
    declined: tuple[Decision, ...]
    streams: tuple[StreamRecord, ...] = ()
    """What became of the collectives beside products, for each pass that streams them."""
    cluster: str | None = None
    plan_digest: str = ""
    witnesses: tuple[str, ...] = ()
    """What was called to check the result, each with its outcome."""
    version: str = field(default=VERSION)
    may_share_inputs: bool = False
    """Whether inputs may share memory with one that is written, so that their reads keep their place."""
    comparison: Comparison | None = field(default=None, repr=False, compare=False)
    """What simulates both graphs, where a cluster was given. No part of the JSON but for what it says."""

    def to_json(self, *, simulate: bool = True) -> str:
        """The report as JSON; with what a simulation says of both graphs, where a cluster was given."""
        data = asdict(replace(self, comparison=None))
        asked = self.comparison if simulate else None
        data["simulated"] = None if asked is None else asdict(asked.summary(self))
        data["notes"] = list(self.notes)
        del data["comparison"]
        return json.dumps(data, indent=1, sort_keys=True)

    def save_html(self, path: str | Path, *, title: str = "Weft") -> None:
        """Write one self-contained page: timelines before and after, collectives with reasons, memory, the bound."""
        self._simulated().save_html(path, self, title)

    def save_trace(self, path: str | Path) -> None:
        """Write both timelines as a Chrome trace, for Perfetto or chrome://tracing."""
        self._simulated().save_trace(path, self)

    def _simulated(self) -> Comparison:
        if self.comparison is None:
            do = 'give one: weft.optimize(gm, cluster="h100-8x8")'
            raise ReportError(compose("report", "nothing was simulated, for no cluster was given", do=do))
        return self.comparison

    @property
    def refusals(self) -> tuple[Decision, ...]:
        """The declined decisions for which a rewrite was possible in kind."""
        return tuple(d for d in self.declined if d.reason.is_refusal)

    @property
    def exposed(self) -> tuple[Decision, ...]:
        """What is said of collectives that are still exposed, the longest first."""
        return tuple(sorted((d for d in self.declined if d.exposed_us > 0), key=lambda d: -d.exposed_us))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the graph does not say, and what the cluster leaves out; what the result lacks for it."""
        of_cluster = () if self.comparison is None else self.comparison.notes
        return (*([SHARED_INPUTS] if self.may_share_inputs else []), *of_cluster)

    def summary_lines(self) -> list[str]:
        """What a simulation says of both graphs, as a table; their sizes where no cluster was given."""
        if self.comparison is not None:
            return self.comparison.summary(self).lines()
        return [
            f"nodes       {self.before.num_nodes} -> {self.after.num_nodes}",
            f"collectives {self.before.num_collectives} -> {self.after.num_collectives}",
        ]

    def pass_lines(self) -> list[str]:
        """What each pass did, as a table."""
        return table([("pass", "applied", "declined", "ms"), *map(_row, self.passes)])

    def show(self, console: Console) -> None:
        """Print the text; on a terminal what has become better or worse is coloured."""
        self.show_summary(console)
        console.print(plain("\n".join(self._details())), markup=False, highlight=False, soft_wrap=True)

    def show_summary(self, console: Console, indent: int = 0) -> None:
        """Print the table of both runs alone."""
        if self.comparison is not None and console.is_terminal:
            console.print(Padding(self.comparison.summary(self).to_rich(), (0, 0, 0, indent)))
            return
        for line in self.summary_lines():
            console.print(f"{' ' * indent}{line}", markup=False, highlight=False, soft_wrap=True)

    def __str__(self) -> str:
        return "\n".join([*self.summary_lines(), *self._details()])

    def _details(self) -> list[str]:
        """What follows the summary."""
        shown = [
            *_longest(self.exposed),
            *_alike("-", [d for d in self.refusals if d.exposed_us <= 0]),
            *_alike("+", self.applied),
        ]
        return [
            *(f"note: {note}" for note in self.notes),
            "",
            *self.pass_lines(),
            "",
            *(f"{stream}" for stream in self.streams),
            *shown,
            *([HINT] if any(line.startswith(" ") for line in shown) else []),
            *(f"checked: {witness}" for witness in self.witnesses),
        ]


def _line(sign: str, decision: Decision) -> str:
    reason = "" if decision.applied else f" ({decision.reason.value})"
    return f"{sign} {decision.pass_name}: {decision.sentence}{reason}"


def _longest(exposed: Sequence[Decision]) -> list[str]:
    lines, rest = [_line("=", d) for d in exposed[:MAX_EXPOSED]], exposed[MAX_EXPOSED:]
    return [*lines, f"  ... and {len(rest)} more that are exposed, for less time each"] if rest else lines


def _alike(sign: str, decisions: Iterable[Decision]) -> list[str]:
    """Decisions by pass and reason, in the order in which each first comes."""
    groups: dict[tuple[str, Reason], list[str]] = {}
    for decision in decisions:
        groups.setdefault((decision.pass_name, decision.reason), []).append(_line(sign, decision))
    lines: list[str] = []
    for (name, reason), found in groups.items():
        rest = len(found) - 1
        lines += found if len(found) <= MAX_ALIKE else [found[0], f"  ... and {rest} more {reason.value} by {name}"]
    return lines


def record_passes(log: Iterable[LogEntry]) -> tuple[PassRecord, ...]:
    """The records of a pipeline's log."""
    return tuple(
        PassRecord(
            entry.step.spec,
            entry.changed,
            entry.seconds,
            len(entry.step.applied),
            dict(sorted(Counter(d.reason.value for d in entry.step.declined).items())),
        )
        for entry in log
    )


def _row(record: PassRecord) -> tuple[Any, ...]:
    declined = ", ".join(f"{count} {reason}" for reason, count in record.declined.items()) or "0"
    return record.spec, record.applied, declined, f"{record.seconds * 1000:.1f}"


def table(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Rows of text in aligned columns."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]
