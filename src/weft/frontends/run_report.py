"""RunReport: the report on all graphs of a run, and the side file that outlives the run.

Contract: the side file of a pass holds one JSON line per graph, under the pass's identity. Ranks and later runs append
to it. Each line is one write, so lines of several processes do not mix; readers skip lines that they cannot parse.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import ReportError
from weft.plan.plan import save_text
from weft.quantities import duration_text, size_text
from weft.report.plain_text import table
from weft.report.run_page import GraphSection, RunPage

HEADS = ("graph", "nodes", "collectives", "applied", "declined", "ms", "step", "exposed", "bound", "peak memory", "")
WHOLE_STEP = "whole step"
NUM_FIGURES = 4
"""Number of columns before the last that hold simulated figures."""


@dataclass(frozen=True)
class GraphEntry:
    """The record of one graph."""

    identity: str
    """Identity of the pass and its options."""
    frame: str
    """Digest of the module that Dynamo handed to the backend; empty for a bare hook, which does not see it."""
    compile_id: str
    phase: str
    """The graph as AOTAutograd calls it: `forward`, `backward` or `inference`."""
    report: dict[str, Any] = field(default_factory=dict[str, Any])
    """The report of `weft.optimize` as data; empty if the graph was left unchanged."""
    skipped: str = ""
    """Why the graph was left unchanged."""
    fault: str = ""
    """The traceback, if a fault of Weft is the reason."""
    num_left: int = 0
    """Number of collectives of a graph that was left unchanged."""
    statement: str = ""
    """The statement that ranks compare, as JSON: `rank_record.Statement` without its name and decisions."""
    rank: int = 0
    """The rank that wrote the entry."""
    from_cache: bool = False
    """The compiler took its result from a cache; the entry dates from when the result was made."""
    role: str = ""
    """The part of the step that the graph computes: `forward`, `backward`, `optimizer` or `inference`."""
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    """The simulated figures before and after, why the step is slow, and the rows of the exposed time by layer."""

    @property
    def name(self) -> str:
        """`backward 0/1`."""
        return f"{self.role or self.phase} {self.compile_id}".rstrip()

    @property
    def is_by_compiled_autograd(self) -> bool:
        """Whether compiled autograd made the graph, which then holds all of backward."""
        return self.compile_id.startswith("!")

    @property
    def place(self) -> tuple[str, str]:
        """Equal for a graph and its recompiles."""
        frame = "!" if self.is_by_compiled_autograd else self.compile_id.rpartition("/")[0]
        return frame, self.role or self.phase

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for entries of the same graph of one run, on any rank."""
        graph = self.report["before"]["digest"] if self.report else self.skipped
        return self.identity, self.frame, self.compile_id, self.phase, graph

    @property
    def num_collectives(self) -> int:
        """Number of collectives of the original graph."""
        return self.report["before"]["num_collectives"] if self.report else self.num_left

    @property
    def note(self) -> str:
        """Why there is no more to tell of the graph, or where it comes from."""
        if self.skipped:
            return f"left as it was: {self.skipped}"
        number = self.compile_id.rpartition("/")[2]
        again = (
            f"recompile {number}" if number.isdigit() and int(number) and not self.compile_id.startswith("!") else ""
        )
        told = ", ".join(filter(None, ("from cache" if self.from_cache else "", again)))
        return told or ("" if self.report else "no report")

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of a table, as `HEADS` names them."""
        if not self.report:
            return self.name, *[""] * 9, self.note
        before, after = self.report["before"], self.report["after"]
        sizes = [f"{before[key]} -> {after[key]}" for key in ("num_nodes", "num_collectives")]
        milliseconds = sum(record["seconds"] for record in self.report["passes"]) * 1000
        counts = [str(len(self.report[key])) for key in ("applied", "declined")]
        return self.name, *sizes, *counts, f"{milliseconds:.1f}", *figure_cells(self.figures), self.note


def figure_cells(figures: dict[str, Any]) -> tuple[str, ...]:
    """Step, exposed time, bound and peak memory as text; empty cells without figures."""
    if not figures:
        return ("",) * NUM_FIGURES
    before, after = figures.get("before"), figures["after"]
    step, exposed = (
        f"{duration_text(before[key])} -> {duration_text(after[key])}" if before else duration_text(after[key])
        for key in ("step_us", "exposed_us")
    )
    bound, peak = after["lower_bound_us"], after["peak_bytes"]
    return step, exposed, duration_text(bound) if bound else "", size_text(peak) if peak else ""


@dataclass(frozen=True)
class RunReport:
    """All graphs of a run."""

    entries: tuple[GraphEntry, ...]
    messages: tuple[str, ...] = ()
    """The warnings, each once."""
    whole_step: dict[str, Any] = field(default_factory=dict[str, Any])
    """The simulated figures of the last version of each graph in one timeline, why that step is slow, and the rows of
    its exposed time by layer."""

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    def save_html(self, path: str | Path, *, title: str = "Weft: all graphs of a run") -> None:
        """Write one self-contained page: every graph with its recompiles, the whole step, and the exposed time."""
        save_text(path, self._page(title).render(), ReportError)

    def _page(self, title: str) -> RunPage:
        known = [(entry.name, entry.figures) for entry in self.entries if entry.figures]
        known = [(WHOLE_STEP, self.whole_step), *known] if self.whole_step else known
        sections = tuple(GraphSection(name, found["why"], tuple(map(tuple, found["layers"]))) for name, found in known)
        return RunPage(title, self._why, self._clusters, self._rows, sections, self.messages)

    @property
    def _why(self) -> str:
        """Why the whole step is slow, in one sentence; empty without simulated figures."""
        return self.whole_step.get("why", "")

    @property
    def _clusters(self) -> str:
        return ", ".join(dict.fromkeys(entry.figures["cluster"] for entry in self.entries if entry.figures))

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        rows = [HEADS, *(entry.row for entry in self.entries)]
        if self.whole_step:
            rows.append((WHOLE_STEP, *[""] * 5, *figure_cells(self.whole_step), ""))
        if not any(entry.figures for entry in self.entries):
            rows = [(*row[: -NUM_FIGURES - 1], row[-1]) for row in rows]
        return rows

    def __str__(self) -> str:
        simulated = [f"simulated on {self._clusters}"] if self._clusters else []
        why = [self._why] if self._why else []
        return "\n".join([*why, *table(self._rows), *simulated, *self.messages])


def side_file(folder: Path, identity: str) -> Path:
    """The file with the entries of a pass."""
    return folder / f"{identity}.jsonl"


def read_entries(path: Path) -> Iterator[GraphEntry]:
    """The entries of a side file; empty if the file does not exist."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield GraphEntry(**json.loads(line))
        except (ValueError, TypeError, RecursionError):  # incomplete, or written by another version
            continue


def write_entry(path: Path, entry: GraphEntry) -> None:
    """Append an entry unless the file already has it."""
    if any(known.key == entry.key for known in read_entries(path)):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(asdict(entry), sort_keys=True).encode() + b"\n")
