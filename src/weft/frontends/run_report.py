"""RunReport: one report over all graphs of a run, and the side file that outlives the run.

Contract: the side file of a pass holds one JSON line per graph, under the pass's identity. Ranks and later runs append
to it; a line is written at once, so that lines do not mix, and one that cannot be read is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.report.plain_text import table


@dataclass(frozen=True)
class Entry:
    """What happened to one graph."""

    identity: str
    """Of the pass, with its options."""
    frame: str
    """The digest of what Dynamo handed to the backend; empty for a bare hook, which does not see it."""
    compile_id: str
    phase: str
    """`forward`, `backward` or `inference`."""
    report: dict[str, Any] = field(default_factory=dict[str, Any])
    """The report of `weft.optimize` as data; empty where the graph was left as it was."""
    skipped: str = ""
    """Why the graph was left as it was."""
    fault: str = ""
    """The traceback, where a fault of Weft is why."""
    num_left: int = 0
    """The collectives of a graph that was left as it was."""
    statement: str = ""
    """What ranks compare, as JSON: `verification.agreement.rank_record.Statement` without its name and decisions."""
    rank: int = 0
    """The rank that said so."""
    from_cache: bool = False
    """The compiler took its result from a cache, and this was said when the result was made."""

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for what is one graph of one run, on any rank."""
        graph = self.report["before"]["digest"] if self.report else self.skipped
        return self.identity, self.frame, self.compile_id, self.phase, graph

    @property
    def num_collectives(self) -> int:
        """Of the graph as it came."""
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

    entries: tuple[Entry, ...]
    messages: tuple[str, ...] = ()
    """What was said aloud, each once."""

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    def __str__(self) -> str:
        head = ("graph", "nodes", "collectives", "applied", "declined", "ms", "")
        return "\n".join([*table([head, *(entry.row for entry in self.entries)]), *self.messages])


def side_file(folder: Path, identity: str) -> Path:
    """Where the entries of a pass are."""
    return folder / f"{identity}.jsonl"


def read_entries(path: Path) -> Iterator[Entry]:
    """The entries of a side file; none where there is no file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield Entry(**json.loads(line))
        except (ValueError, TypeError, RecursionError):  # torn, or of another version
            continue


def write_entry(path: Path, entry: Entry) -> None:
    """Append an entry, unless the file has it."""
    if any(known.key == entry.key for known in read_entries(path)):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(asdict(entry), sort_keys=True).encode() + b"\n")
