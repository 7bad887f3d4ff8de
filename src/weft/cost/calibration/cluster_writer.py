"""Write a fit as a file that `Cluster.load` reads.

Contract: the text is read back before it is returned, so it always describes a valid cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from weft.cost import cluster_file
from weft.cost.calibration.fit import Fit, FittedLine
from weft.cost.device import Device
from weft.cost.levels import Level, Link
from weft.graph.ops import Kind

NO_DEVICE = "# Without [device], compute takes no time: the measurements contain no compute."
MAX_POINTS = 200
"""Maximum points of one table; if more sizes were measured, evenly spaced ones are written."""


def cluster_text(fit: Fit, sources: Iterable[str] = ()) -> str:
    """The TOML of a fitted cluster; `sources` are the names of the measured files."""
    cluster = fit.cluster
    lines = [
        f"# Fitted by `weft calibrate` to {', '.join(map(json.dumps, sources)) or 'samples'}.",
        "# Tables are medians of measured times. Links are fitted to them and price everything else.",
        *([] if cluster.device.name else [NO_DEVICE]),
        "",
        f"name = {json.dumps(cluster.name)}",
        f"num_nodes = {cluster.num_nodes}",
        f"ranks_per_node = {cluster.ranks_per_node}",
    ]
    if cluster.device.name:
        lines += ["", *_device(cluster.device)]
    for level in cluster.levels:
        lines += ["", *_level(level, "node" if level.num_ranks == cluster.ranks_per_node else "cluster")]
    known = {level.name for level in cluster.levels}
    for line in fit.lines:
        lines += ["", *_table(line, known)]
    text = "\n".join(lines) + "\n"
    cluster_file.read(cluster.name, text.encode())
    return text


def _device(device: Device) -> Iterator[str]:
    yield from ("[device]", f'name = "{device.name}"')
    if device.peak_tflops:
        peaks = ", ".join(f"{key} = {peak:.6g}" for key, peak in device.peak_tflops)
        yield f"peak_tflops = {{ {peaks} }}  # reached by large products, hence:"
    yield f"matmul_efficiency = {device.matmul_efficiency:.6g}"
    if device.launch_gap_us:
        yield f"launch_gap_us = {device.launch_gap_us:.4g}"
    if device.overlap_slowdown:
        yield f"overlap_slowdown = {device.overlap_slowdown:.4g}"
    if device.collective_slowdown:
        yield f"collective_slowdown = {device.collective_slowdown:.4g}"
    if device.memory_gbps is not None:
        yield f"memory_gbps = {device.memory_gbps:.6g}  # reached by large copies and additions"


def _level(level: Level, spans: str) -> Iterator[str]:
    yield from ("[[levels]]", f'name = "{level.name}"', f'spans = "{spans}"', *_link(level.link))
    for kind, link in level.overrides:
        yield from ("", f"[levels.{kind.value}]", *_link(link))


def _link(link: Link) -> list[str]:
    return [
        f"latency_us = {link.latency_us:.6g}",
        f"hop_us = {link.hop_us:.6g}",
        f"bandwidth_gbps = {link.bandwidth_gbps:.6g}",
    ]


def _table(line: FittedLine, levels: set[str]) -> Iterator[str]:
    parts = line.group.size if line.kind is Kind.ALL_GATHER else 1  # a file counts the bytes that one rank passes in
    by_input = {-(-size // parts): us for size, us in line.table.points}
    points = sorted(by_input.items())
    if len(points) > MAX_POINTS:
        points = [points[i * (len(points) - 1) // (MAX_POINTS - 1)] for i in range(MAX_POINTS)]
    yield "[[tables]]"
    yield f'kind = "{line.kind.value}"'
    yield f"num_ranks = {line.group.size}"
    yield f"input_bytes = {[size for size, _ in points]}"
    yield f"us = [{', '.join(f'{us:.6g}' for _, us in points)}]  # {_about(line)}"
    if line.level in levels:
        yield f'level = "{line.level}"'


def _about(line: FittedLine) -> str:
    what = f"{line.num_samples} samples"
    if line.latency_us is None:
        return what
    bandwidth = f"{line.bandwidth_gbps:.4g}e9 bytes/s" if line.bandwidth_gbps is not None else "no bandwidth"
    worst = max(abs(residual.error) for residual in line.residuals)
    return f"{what}; fitted {line.latency_us:.4g} us and {bandwidth}, at most {worst * 100:.1f} % off"
