"""Report: the record of a run, as data, text and JSON. The JSON has the same fields as the class.

A run for a cluster has a `SimulatedReport` (`simulated.py`), which adds timelines, the lower bound and the page.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from weft.errors import ReportError, compose
from weft.passes.base import parse_pass
from weft.passes.pipeline import LogEntry
from weft.passes.stream_pass import StreamPass
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Plan, Repeat, Retention
from weft.quantities import duration_text, size_text
from weft.report.plain_text import plain, table, with_modules
from weft.version import VERSION

MAX_EXPOSED = 20
"""Maximum number of exposed collectives that the text lists; the data has all of them."""
MAX_MEMORY = 24
"""Maximum number of rows of the memory table in the text."""
MEMORY_COLUMNS = ("values", "choice", "number", "size", "work repeated", "in the given graph")
MAX_ALIKE = 3
"""Maximum number of decisions of one pass with one reason that the text lists; beyond it, one and a count."""
HINT = """\
`weft explain SOURCE` explains each collective; --json, or report.applied and report.declined, has every decision"""
SHARED_INPUTS = (
    "inputs of this graph may share memory, and the graph writes to some of them, so no read of an input moves across "
    "such a write; to record which inputs share memory, use weft.capture or trace the graph with fake tensors"
)
FROM_CACHE = "the plan comes from the plan cache, so the passes were timed while they carried it out"


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
class StreamRecord:
    """The collectives that one streaming pass considered, each counted once."""

    pass_name: str
    num_collectives: int
    streamed: int
    whole: dict[str, int]
    """Number of collectives that stay whole, by reason."""
    other_role: int = 0
    """Number of collectives that carry something else and are left to other passes; not counted above."""

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.whole.items())
        whole = f", {self.num_collectives - self.streamed} stay whole ({reasons})" if self.whole else ""
        others = f"; {self.other_role} carry something else" if self.other_role else ""
        return f"{self.pass_name}: streamed {self.streamed} of {self.num_collectives} collectives{whole}{others}"


@dataclass(frozen=True)
class Report:
    """The record of a whole run."""

    before: GraphRecord
    after: GraphRecord
    passes: tuple[PassRecord, ...]
    applied: tuple[Decision, ...]
    declined: tuple[Decision, ...]
    streams: tuple[StreamRecord, ...] = ()
    """One for each pass that streams collectives through matrix products."""
    memory: tuple[Retention, ...] = ()
    """The choices for the values that backward needs, if a memory limit was given."""
    cluster: str | None = None
    bare_plan: Plan = field(default=Plan(()), repr=False)
    """The plan without evidence; `plan` has it. The JSON holds its digest instead."""
    witnesses: tuple[str, ...] = ()
    """The checks of the result, each with its outcome."""
    version: str = field(default=VERSION)
    may_share_inputs: bool = False
    """Whether inputs may share memory with one that the graph writes; reads of inputs then keep their place."""
    from_cache: bool = False
    """Whether the plan was found in the plan cache. Then the passes were timed while they carried it out."""
    modules: dict[str, str] = field(default_factory=dict[str, str])
    """The modules of the nodes that decisions name."""

    @cached_property
    def plan(self) -> Plan:
        """The plan, with its evidence if the run was for a cluster."""
        return self.bare_plan

    @property
    def plan_digest(self) -> str:
        """The digest of the plan without evidence: equal for ranks that made the same decisions."""
        return self.bare_plan.digest

    @property
    def refusals(self) -> tuple[Decision, ...]:
        """The declined decisions where the graph prevented a rewrite of a kind that was possible."""
        return tuple(d for d in self.declined if d.reason.is_refusal)

    @property
    def exposed(self) -> tuple[Decision, ...]:
        """The decisions about collectives that are still exposed, the longest first."""
        return tuple(sorted((d for d in self.declined if d.exposed_us > 0), key=lambda d: -d.exposed_us))

    @property
    def notes(self) -> tuple[str, ...]:
        """Gaps in the graph's or the cluster's description, and their effect on the result."""
        return (*([SHARED_INPUTS] if self.may_share_inputs else []), *([FROM_CACHE] if self.from_cache else []))

    def to_json(self, *, simulate: bool = True) -> str:
        """The report as JSON, with the simulation of both graphs if a cluster was given and `simulate` is set."""
        told: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(Report)}
        told["bare_plan"] = Plan(())
        data = asdict(Report(**told)) | {
            "plan_digest": self.plan_digest,
            "simulated": self._simulated() if simulate else None,
            "baseline": self._baseline() if simulate else None,
            "notes": list(self.notes),
        }
        del data["bare_plan"]
        return json.dumps(data, indent=1, sort_keys=True)

    def save_html(self, path: str | Path, *, title: str = "Weft") -> None:
        """Write one self-contained page: timelines before and after, collectives with reasons, memory, the bound."""
        _refuse_without_cluster()

    def save_trace(self, path: str | Path) -> None:
        """Write both timelines as a Chrome trace, for Perfetto or chrome://tracing."""
        _refuse_without_cluster()

    def summary_lines(self) -> list[str]:
        """A table of both simulated runs; the sizes of both graphs if no cluster was given."""
        return [
            f"nodes       {self.before.num_nodes} -> {self.after.num_nodes}",
            f"collectives {self.before.num_collectives} -> {self.after.num_collectives}",
        ]

    def pass_lines(self) -> list[str]:
        """A table with one row for each pass."""
        return table([("pass", "applied", "declined", "ms"), *map(_row, self.passes)])

    def memory_lines(self) -> list[str]:
        """A table of the values that backward needs, the largest first; empty without a memory limit."""
        if not self.memory:
            return []
        rows = memory_rows(self.memory)
        lines = table([MEMORY_COLUMNS, *rows[:MAX_MEMORY]])
        rest = sorted((row.num_bytes for row in self.memory), reverse=True)[MAX_MEMORY:]
        more = f"  ... and {len(rest)} smaller groups, {size_text(sum(rest))}"
        return [*lines, *([more] if rest else []), ""]

    def show(self, console: Console) -> None:
        """Print the text; a terminal shows improvements and regressions in colour."""
        self.show_summary(console)
        console.print(plain("\n".join(self._details())), markup=False, highlight=False, soft_wrap=True)

    def show_summary(self, console: Console, indent: int = 0) -> None:
        """Print only the summary."""
        for line in self.summary_lines():
            console.print(f"{' ' * indent}{line}", markup=False, highlight=False, soft_wrap=True)

    def __str__(self) -> str:
        return "\n".join([*self.summary_lines(), *self._details()])

    def _details(self) -> list[str]:
        """The lines after the summary."""
        shown = [
            *_longest(self.exposed),
            *_alike("-", [d for d in self.refusals if d.exposed_us <= 0]),
            *_alike("+", self.applied),
        ]
        shown = [with_modules(line, self.modules) for line in shown]
        return [
            *(f"note: {note}" for note in self.notes),
            "",
            *self.pass_lines(),
            "",
            *(f"{stream}" for stream in self.streams),
            *self.memory_lines(),
            *shown,
            *([HINT] if any(line.startswith(" ") for line in shown) else []),
            *(f"checked: {witness}" for witness in self.witnesses),
        ]

    def _simulated(self) -> dict[str, Any] | None:
        """The simulation of both graphs for the JSON."""
        return None

    def _baseline(self) -> dict[str, Any] | None:
        """The step that people run today, for the JSON."""
        return None


def record_memory(log: Iterable[LogEntry]) -> tuple[Retention, ...]:
    """The choices of the pass that decides what to keep in memory."""
    actions = [action for entry in log for action in entry.step.actions if isinstance(action, Repeat)]
    return tuple(row for action in actions for row in action.table)


def memory_rows(memory: Iterable[Retention]) -> list[tuple[str, str, int, str, str, str]]:
    """The cells of `MEMORY_COLUMNS` for each choice, the one with the most bytes first."""
    return [
        (row.group, row.choice, row.num_values, size_text(row.num_bytes), duration_text(row.work_us), row.given)
        for row in sorted(memory, key=lambda row: -row.num_bytes)
    ]


def _refuse_without_cluster() -> NoReturn:
    do = 'give one: weft.optimize(gm, cluster="h100-8x8")'
    raise ReportError(compose("report", "timelines need a cluster, and none was given", do=do))


def _line(sign: str, decision: Decision) -> str:
    reason = "" if decision.applied else f" ({decision.reason.value})"
    return f"{sign} {decision.pass_name}: {decision.sentence}{reason}"


def _longest(exposed: Sequence[Decision]) -> list[str]:
    lines, rest = [_line("=", d) for d in exposed[:MAX_EXPOSED]], exposed[MAX_EXPOSED:]
    return [*lines, f"  ... and {len(rest)} more that are exposed for less time"] if rest else lines


def _alike(sign: str, decisions: Iterable[Decision]) -> list[str]:
    """One line for each decision, or one for all with the same pass and reason if they are many."""
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


def record_streams(log: Iterable[LogEntry]) -> tuple[StreamRecord, ...]:
    """The counts of each streaming pass in a pipeline's log.

    The last decision about a collective counts, unless one applied it: a pass declines single products of a collective
    before it decides about the whole.
    """
    found: list[StreamRecord] = []
    for entry in log:
        if not isinstance(parse_pass(entry.step.spec), StreamPass):
            continue
        last: dict[str, Reason] = {}
        for decision in entry.step.decisions:
            if last.get(decision.nodes[0]) is not Reason.APPLIED:
                last[decision.nodes[0]] = decision.reason
        counts = Counter(reason.value for reason in last.values() if reason is not Reason.APPLIED)
        others = counts.pop(Reason.OTHER_ROLE.value, 0)
        total, name = len(last) - others, entry.step.spec.partition("{")[0]
        found.append(StreamRecord(name, total, total - sum(counts.values()), dict(sorted(counts.items())), others))
    return tuple(found)


def _row(record: PassRecord) -> tuple[Any, ...]:
    declined = ", ".join(f"{count} {reason}" for reason, count in record.declined.items()) or "0"
    return record.spec, record.applied, declined, f"{record.seconds * 1000:.1f}"
