"""Fit a cluster to measured collectives: latency + bytes / bandwidth, and the measured tables themselves.

There is one line for each kind, number of ranks and level (inside a node, between nodes). It is fitted to the medians
of repeated sizes by robust least squares on relative errors. The links of a level are fitted to all of its lines at
once, with a hop for each ring step if groups of several sizes were measured. Tables price what was measured; links
price the rest.

Contract: a fit is data; the same samples in any order give the same fit. The device is an input: `compute_trace` finds
it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from weft.cost.calibration.chrome_trace import ChromeTrace, merge_traces, read_chrome_trace
from weft.cost.calibration.compute_trace import merge_compute
from weft.cost.calibration.nccl_tests import read_nccl_tests
from weft.cost.calibration.robust_fit import fit_times
from weft.cost.calibration.samples import MeasurementError, Measurements, Sample, open_measurements
from weft.cost.cluster import Cluster
from weft.cost.device import UNDESCRIBED, Device
from weft.cost.levels import Level, Link, Transport
from weft.cost.measured_table import Estimate, Table
from weft.graph.groups import Group
from weft.graph.ops import Kind

NODE, NETWORK = "intra-node", "inter-node"
UNIT = Link(0.0, 0.0, 1.0)


@dataclass(frozen=True)
class Residual:
    """One measured size against the fitted line."""

    num_bytes: int
    measured_us: float
    """The median of the samples."""
    fitted_us: float

    @property
    def error(self) -> float:
        """Relative to the measured time."""
        return self.fitted_us / self.measured_us - 1


@dataclass(frozen=True)
class FittedLine:
    """Latency and bandwidth of one kind for one number of ranks at a level."""

    kind: Kind
    group: Group
    level: str
    table: Table
    """Medians of repeated sizes, by bytes of the full tensor."""
    num_samples: int
    latency_us: float | None
    """None if only one size was measured."""
    bandwidth_gbps: float | None
    """Bytes that one rank sends per second, in 1e9; None if times do not grow with the bytes."""
    wire_us: float
    """Time of one byte of the full tensor at 1e9 bytes per second."""

    @property
    def min_bytes(self) -> int:
        return self.table.points[0][0]

    @property
    def max_bytes(self) -> int:
        return self.table.points[-1][0]

    def at(self, num_bytes: int) -> Estimate | None:
        """The fitted time of a size, marked as extrapolated outside the measured range; None without a line."""
        if self.latency_us is None:
            return None
        moving = num_bytes * self.wire_us / self.bandwidth_gbps if self.bandwidth_gbps is not None else 0.0
        return Estimate(self.latency_us + moving, "links", not self.min_bytes <= num_bytes <= self.max_bytes)

    @property
    def residuals(self) -> tuple[Residual, ...]:
        fitted = ((size, us, self.at(size)) for size, us in self.table.points)
        return tuple(Residual(size, us, estimate.us) for size, us, estimate in fitted if estimate is not None)


@dataclass(frozen=True)
class Fit:
    """The fitted lines, and the cluster made of them."""

    lines: tuple[FittedLine, ...]
    cluster: Cluster
    notes: tuple[str, ...] = ()


def read_measurements(paths: Iterable[str | Path], kind: Kind | None = None) -> Measurements:
    """The samples of traces (of the ranks of one run) and of nccl-tests tables; one error lists all faults."""
    traces: list[ChromeTrace] = []
    tables: list[Measurements] = []
    faults: list[str] = []
    for path in map(Path, paths):
        try:
            if _is_trace(path):
                traces.append(read_chrome_trace(path))
            else:
                tables.append(read_nccl_tests(path, kind))
        except MeasurementError as error:
            faults += error.faults
    if faults:
        raise MeasurementError(faults)
    found = [*([merge_traces(traces)] if traces else []), *tables]
    per_node = {each.ranks_per_node for each in tables if each.ranks_per_node is not None}
    return Measurements(
        tuple(sample for each in found for sample in each.samples),
        tuple(dict.fromkeys(note for each in found for note in each.notes)),
        per_node.pop() if len(per_node) == 1 else None,
        merge_compute(each.compute for each in found),
    )


def _is_trace(path: Path) -> bool:
    """Whether a file starts like a JSON object or an array of objects. The readers report unreadable files."""
    try:
        with open_measurements(path) as file:
            head = file.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()
    except (OSError, EOFError, ValueError, zlib.error):
        return True
    return head.startswith(b"{") or (head.startswith(b"[") and head[1:].lstrip()[:1] in (b"{", b"]"))


def fit(
    samples: Sequence[Sample],
    ranks_per_node: int | None = None,
    name: str = "calibrated",
    device: Device = UNDESCRIBED,
    symmetric: Transport | None = None,
    base: str | None = None,
) -> Fit:
    """Fit lines and links; without `ranks_per_node`, all groups are taken to be inside one node.

    `symmetric` are copies through symmetric memory, which the ranks of a node have. `base` names the cluster that
    describes what was not measured.
    """
    if not samples:
        raise MeasurementError(["samples are missing"])
    num_ranks = max(max((sample.num_ranks, *(rank + 1 for rank in sample.ranks))) for sample in samples)
    per_node = ranks_per_node or num_ranks
    blank = _blank(name, -(-num_ranks // per_node), per_node)
    lines = tuple(_lines(samples, blank))
    levels: list[Level] = []
    faults: list[str] = []
    notes = _notes(lines, ranks_per_node)
    for level in blank.levels:
        here = [line for line in lines if line.level == level.name]
        if not here and len(blank.levels) > 1:
            other = f"{NETWORK if level.name == NODE else NODE} ones" if base is None else f"on {base}"
            notes.append(f"no {level.name} group was measured: such groups are priced as {other}")
            continue
        inner = replace(blank, levels=(*levels, *blank.levels[len(levels) :]))
        fitted = _level(level, here, inner)
        if fitted is None:
            faults.append(f"{level.name}: no kind has two sizes whose times grow with their bytes; measure larger ones")
        else:
            levels.append(fitted)
    if faults:
        raise MeasurementError(faults)
    if levels[-1].num_ranks < blank.num_ranks or len(levels) < len(blank.levels):
        levels = [replace(levels[-1], num_ranks=blank.num_ranks)]
    if symmetric is not None and levels[0].name == NODE:
        levels[0] = replace(levels[0], symmetric=symmetric)
    tables = tuple(replace(line.table, level=line.level) for line in lines)
    return Fit(lines, replace(blank, levels=tuple(levels), tables=tables, device=device), tuple(notes))


def _blank(name: str, num_nodes: int, per_node: int) -> Cluster:
    """A cluster with unit links: a time on it counts how much of each link a collective uses."""
    levels = [Level(NODE, per_node, UNIT)]
    if num_nodes > 1:
        levels.append(Level(NETWORK, num_nodes * per_node, UNIT))
    return Cluster(name, num_nodes, per_node, tuple(levels))


def _group(sample: Sample) -> Group:
    return Group("measured", sample.num_ranks, ranks=(sample.ranks,) if sample.ranks else None)


def _lines(samples: Iterable[Sample], blank: Cluster) -> Iterable[FittedLine]:
    """One line for each kind, number of ranks and level, in that order."""
    placed = [(sample, blank.level_of(_group(sample)).name) for sample in samples]

    def key(item: tuple[Sample, str]) -> tuple[str, int, str]:
        return item[0].kind.value, item[0].num_ranks, item[1]

    for (_, num_ranks, level), same in groupby(sorted(placed, key=lambda item: (key(item), item[0].ranks)), key):
        members = [sample for sample, _ in same]
        kind, group = members[0].kind, _group(members[0])
        table = Table.measured(kind, num_ranks, ((sample.num_bytes, sample.us) for sample in members), level)
        unit = blank.collective_us(kind, group, 1_000_000_000) / 1e9
        latency = bandwidth = None
        if len(table.points) > 1:
            columns = [[1.0, size * unit] for size, _ in table.points]
            latency, slowness = fit_times(np.array(columns), np.array([us for _, us in table.points])).tolist()
            bandwidth = 1 / slowness if slowness > 0 else None
        yield FittedLine(kind, group, level, table, len(members), latency, bandwidth, unit)


def _level(level: Level, lines: Sequence[FittedLine], inner: Cluster) -> Level | None:
    """A level with links fitted to its lines: one for all kinds, and one for each kind with enough points."""
    links = ((kind, _link(level, [line for line in lines if line.kind is kind], inner)) for kind in Kind)
    overrides = tuple((kind, link) for kind, link in links if link is not None)
    link = _link(level, lines, inner) or next((link for _, link in overrides), None)
    return None if link is None else replace(level, link=link, overrides=overrides)


def _link(level: Level, lines: Sequence[FittedLine], inner: Cluster) -> Link | None:
    """The link that fits all points of the lines best, given the inner levels; None if there are too few points."""
    lines = [line for line in lines if len(line.table.points) > 1]
    if not lines:
        return None
    levels = inner.levels
    at = [each.name for each in levels].index(level.name)
    stepping = replace(inner, levels=(*levels[:at], replace(level, link=Link(0.0, 1.0, 1.0)), *levels[at + 1 :]))
    rows: list[list[float]] = []
    times: list[float] = []
    for line in lines:
        within = inner.latency_us(line.kind, line.group)
        steps = stepping.latency_us(line.kind, line.group) - within
        for size, us in line.table.points:
            rows.append([1.0, size * line.wire_us, steps])
            times.append(max(us - within, us * 1e-3))
    columns = np.array(rows)
    has_steps = len({row[2] for row in rows}) > 1
    latency, slowness, *hop = fit_times(columns if has_steps else columns[:, :2], np.array(times)).tolist()
    return Link(latency, hop[0] if hop else 0.0, 1 / slowness) if slowness > 0 else None


def _notes(lines: Sequence[FittedLine], ranks_per_node: int | None) -> list[str]:
    notes = [
        f"{line.kind.value} of {line.group.size} ranks, {line.level}: only one size, so it has a table but no line"
        for line in lines
        if line.latency_us is None
    ]
    if ranks_per_node is None:
        notes.append("all groups are taken to be inside one node; give --ranks-per-node if they are not")
    return notes
