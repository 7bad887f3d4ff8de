"""Report: what a run did, as data, text and JSON. Its JSON is the schema."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.passes.pipeline import LogEntry
from weft.planning.plan import Decision
from weft.version import VERSION

MAX_LINES = 20
"""Decisions of each sort that the text shows; all of them are in the data."""


@dataclass(frozen=True)
class PassRecord:
    """One pass of the run."""

    spec: str
    changed: bool
    seconds: float
    applied: int
    declined: dict[str, int]
    """Number of declined opportunities by reason."""


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
    cluster: str | None = None
    plan_digest: str = ""
    witnesses: tuple[str, ...] = ()
    """What was called to check the result, each with its outcome."""
    version: str = field(default=VERSION)

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @property
    def refusals(self) -> tuple[Decision, ...]:
        """The declined decisions for which a rewrite was possible in kind."""
        return tuple(d for d in self.declined if d.reason.is_refusal)

    def __str__(self) -> str:
        rows = [("pass", "applied", "declined", "ms"), *map(_row, self.passes)]
        lines = [
            f"nodes       {self.before.num_nodes} -> {self.after.num_nodes}",
            f"collectives {self.before.num_collectives} -> {self.after.num_collectives}",
            "",
            *table(rows),
            "",
            *_shortened([f"+ {d.pass_name}: {d.sentence}" for d in self.applied], "applied"),
            *_shortened([f"- {d.pass_name}: {d.sentence} ({d.reason.value})" for d in self.refusals], "declined"),
            *(f"checked: {witness}" for witness in self.witnesses),
        ]
        return "\n".join(lines)


def _shortened(lines: list[str], where: str) -> list[str]:
    rest = len(lines) - MAX_LINES
    return lines if rest <= 0 else [*lines[:MAX_LINES], f"  ... and {rest} more in report.{where}"]


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
