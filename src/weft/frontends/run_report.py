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

from weft.report.plain_text import table


@dataclass(frozen=True)
class GraphEntry:
    """The record of one graph."""

    identity: str
    """Identity of the pass and its options."""
    frame: str
    """Digest of the module that Dynamo handed to the backend; empty for a bare hook, which does not see it."""
    compile_id: str
    phase: str
    """`forward`, `backward` or `inference`."""
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
    def row(self) -> tuple[str, ...]:
        """The cells of a table: graph, nodes, collectives, applied, declined, milliseconds, note."""
        name = f"{self.phase} {self.compile_id}".rstrip()
        note = f"left as it was: {self.skipped}" if self.skipped else "from cache" if self.from_cache else ""
        if not self.report:
            return name, "", "", "", "", "", note or "no report"
        before, after = self.report["before"], self.report["after"]
        sizes = [f"{before[key]} -> {after[key]}" for key in ("num_nodes", "num_collectives")]
        milliseconds = sum(record["seconds"] for record in self.report["passes"]) * 1000
        counts = [str(len(self.report[key])) for key in ("applied", "declined")]
        return name, *sizes, *counts, f"{milliseconds:.1f}", note


@dataclass(frozen=True)
class RunReport:
    """All graphs of a run."""

    entries: tuple[GraphEntry, ...]
    messages: tuple[str, ...] = ()
    """The warnings, each once."""

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    def __str__(self) -> str:
        head = ("graph", "nodes", "collectives", "applied", "declined", "ms", "")
        return "\n".join([*table([head, *(entry.row for entry in self.entries)]), *self.messages])


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
