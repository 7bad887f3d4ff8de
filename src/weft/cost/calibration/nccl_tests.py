"""Read the tables that nccl-tests and rccl-tests print, one or several in a file.

    # Collective test starting: all_gather_perf
    # nThread 1 nGpus 2 minBytes 1048576 maxBytes 2097152 step: 2(factor) ...
    #  Rank  0 Group  0 Pid   7774 on host-a device  0 [0000:8f:00] NVIDIA H200
    #  Rank  1 Group  0 Pid   7774 on host-a device  1 [0000:90:00] NVIDIA H200
    #                                            out-of-place                  in-place
    #     size      count   type  redop  root   time  algbw  busbw #wrong  time  algbw  busbw #wrong
         1048576    131072  float   none    -1  41.20  25.45  12.73      0 40.93  25.62  12.81      0

`size` is the size of the full tensor. Out-of-place times are used, because functional collectives run out of place; a
table without them gives in-place times. The kind comes from the last line above a table that names a test, else from
the caller, else from the file name.

Contract: nothing is executed. One error lists all faults with their lines. Other lines, such as logs, are skipped.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from weft.cost.calibration.samples import (
    MAX_MESSAGE_BYTES,
    MAX_RANKS,
    MAX_US,
    MIN_US,
    MeasurementError,
    Measurements,
    Sample,
    kind_named,
    open_measurements,
)
from weft.graph.ops import Kind
from weft.quantities import size_text

MAX_LINE = 1 << 16
MAX_BYTES = 1 << 26
PREFIX = re.compile(r"^\s*(?:\d{1,7}:(?=\s|$)\s*)?(?:\([^()]{0,200}\)\s*)?(?:\[\d+,\d+\]<std(?:out|err)>:)?\s*")
"""Prefix that `srun -l`, mpirun and launchers add to a line."""
HEADER = re.compile(r"#\s+size\s+count\s+type\s")
TEST = re.compile(r"\b([a-z_]{4,40})_perf\b")
DEVICE = re.compile(r"#\s+Rank\s+(\d{1,7})\s+(?:Group\s+(\d{1,7})\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s")
THREADS = re.compile(r"#\s+nThreads?\s+(\d{1,6})\s+nGpus\s+(\d{1,6})\s")
ROW = re.compile(r"\d+\s")
NUM_FIRST = 3
"""Number of leading columns of every row: size, count, type."""


def read_nccl_tests(path: str | Path, kind: Kind | None = None) -> Measurements:
    """The samples of all tables of a file; `kind` applies to tables that do not name their test."""
    path = Path(path)
    reader = _LogReader(path.name, kind)
    try:
        for number, line in _lines(path):
            reader.add(number, line)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise MeasurementError([f"{path}: it cannot be read: {what}"]) from None
    if not reader.num_tables and not reader.faults:
        do = "give the output of nccl-tests with its header, or a Chrome trace of torch.profiler"
        reader.faults.append((1, f"it contains neither a table nor a trace; {do}"))
    elif not reader.samples and not reader.faults:
        reader.faults.append((1, "its tables contain no measured collective"))
    if reader.faults:
        raise MeasurementError(f"{path}:{line}: {what}" for line, what in reader.faults)
    notes = tuple(f"left out: {count} {what}" for what, count in sorted(reader.skipped.items()))
    return Measurements(tuple(reader.samples), notes, reader.ranks_per_node())


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = num_bytes = 0
    with open_measurements(path) as file:
        while line := file.readline(MAX_LINE):
            number += 1
            num_bytes += len(line)
            if num_bytes > MAX_BYTES:  # a small gzip file may unpack to any size
                raise ValueError(f"it is larger than {size_text(MAX_BYTES)}, too large for a table")
            yield number, PREFIX.sub("", line.decode(errors="replace").rstrip("\r\n"), count=1)


@dataclass
class _LogReader:
    """Collects the samples of one file, line by line."""

    name: str
    kind: Kind | None
    samples: list[Sample] = field(default_factory=list[Sample])
    skipped: Counter[str] = field(default_factory=Counter[str])
    faults: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    num_tables: int = 0
    test: str = ""
    """Test of the next table, or of the one being read."""
    is_used: bool = False
    """Whether a table of that test has been read."""
    num_threads: int = 0
    devices: dict[int, tuple[int, str]] = field(default_factory=dict[int, tuple[int, str]])
    """Group and host by rank."""
    per_host: set[int] = field(default_factory=set[int])
    """Numbers of ranks on a host, in tests on several hosts."""
    columns: list[str] | None = None
    """Columns of the table being read."""
    table: tuple[Kind, tuple[int, ...], int] | None = None
    """Its kind, ranks and number of ranks; None if its rows are skipped."""

    def add(self, number: int, line: str) -> None:
        if HEADER.match(line):
            self._start(number, line)
        elif self.columns is not None and ROW.match(line):
            self._add_row(number, line.split())
        elif found := DEVICE.match(line):
            if self.columns is not None:
                self._end()
            self.devices[int(found[1])] = (int(found[2] or 0), found[3])
        elif found := THREADS.match(line):
            self._end()
            self.num_threads = int(found[1]) * int(found[2])
        elif found := TEST.search(line):
            self.test, self.is_used = found[1], False
            self.columns = None

    def _end(self) -> None:
        """The next lines belong to another test."""
        self.columns = None
        self.devices.clear()
        self.num_threads = 0
        if self.is_used:
            self.test, self.is_used = "", False

    def _start(self, number: int, line: str) -> None:
        self.num_tables += 1
        self.is_used = True
        self.columns = line.lstrip("# ").split()
        self.table = None
        if "time" not in self.columns[NUM_FIRST:]:
            self.faults.append((number, f"expected a column called time, found {' '.join(self.columns)[:200]}"))
            return
        kind = kind_named(self.test) if self.test else self.kind or kind_named(self.name)
        if kind is None and self.test:
            return
        if kind is None:
            do = "give --kind, or keep the line that names the test"
            self.faults.append((number, f"neither a line above the table nor the file's name says its kind; {do}"))
        ranks = self._ranks()
        num_ranks = len(ranks) or self.num_threads
        if not 1 <= num_ranks <= MAX_RANKS:
            do = "keep the lines '#  Rank  0 ... on HOST device 0' above the table"
            self.faults.append((number, f"the number of ranks is missing; {do}"))
        elif kind is not None:
            self.table = kind, ranks, num_ranks

    def _ranks(self) -> tuple[int, ...]:
        """The ranks of the first group; counts the ranks of each host, too."""
        hosts = Counter(host for _, host in self.devices.values())
        if len(hosts) > 1:
            self.per_host |= set(hosts.values())
        first = min((group for group, _ in self.devices.values()), default=0)
        return tuple(sorted(rank for rank, (group, _) in self.devices.items() if group == first))

    def _add_row(self, number: int, cells: list[str]) -> None:
        columns = self.columns or []
        if "time" not in columns[NUM_FIRST:]:
            return
        # Some versions leave redop and root empty, so times are counted from the end.
        from_end = [len(columns) - i for i, column in enumerate(columns) if column == "time"]
        if not NUM_FIRST + from_end[0] <= len(cells) <= len(columns):
            self.faults.append((number, f"expected {len(columns)} columns, found {len(cells)}"))
            return
        times = [cells[-place] for place in from_end if cells[-place] != "N/A"]
        us = _time(times[0]) if times else MIN_US / 2
        size = int(cells[0]) if len(cells[0]) < 20 else MAX_MESSAGE_BYTES + 1
        if us is None:
            self.faults.append((number, f"time: expected microseconds of 0 or more, found {times[0][:60]!r}"))
        elif size > MAX_MESSAGE_BYTES:
            self.faults.append((number, f"size: expected at most {MAX_MESSAGE_BYTES} bytes, found {cells[0][:60]}"))
        elif self.table is None:
            self.skipped[f"rows of {self.test or 'a table'} that cannot be priced"] += 1
        elif size == 0 or us < MIN_US or self.table[2] == 1:
            self.skipped["rows of no bytes, no time or one rank"] += 1
        else:
            kind, ranks, num_ranks = self.table
            self.samples.append(Sample(kind, num_ranks, size, us, ranks))

    def ranks_per_node(self) -> int | None:
        """Ranks per host, if tests ran on several hosts with equal numbers."""
        return next(iter(self.per_host)) if len(self.per_host) == 1 else None


def _time(text: str) -> float | None:
    try:
        us = float(text)
    except ValueError:
        return None
    return us if 0 <= us <= MAX_US else None
