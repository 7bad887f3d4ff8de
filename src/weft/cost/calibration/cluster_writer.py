"""Write a fit as a file that `Cluster.load` reads.

Contract: the text is read back before it is returned, so it always describes a valid cluster. Its device, levels and
NCCL parameters read back as they were, except for a chosen attention kernel: it is written first, as the default.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields

from weft.cost import cluster_file
from weft.cost.calibration.fit import Fit, FittedLine
from weft.cost.cluster import Cluster
from weft.cost.communication import Nccl
from weft.cost.device import UNDESCRIBED, Device, HostMemory
from weft.cost.kernels import AttentionRate, HostTimes
from weft.cost.levels import Level, Link
from weft.cost.stated_quantities import STATED_AS, rate_text, stated
from weft.graph.ops import Kind

NO_DEVICE = "# Without [device], compute takes no time: the measurements contain no compute."
DEVICE_KEYS = (
    "memory_gbps",
    "memory_bytes",
    "launch_gap_us",
    "overlap_slowdown",
    "collective_slowdown",
    "matmul_efficiency",
    "fuses",
    "memory_efficiency",
    "kernel_us",
    "product_overhead_terms",
    "num_multiprocessors",
    "power_headroom",
)
"""Keys of a device with one value."""
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
        lines += ["", *_level(level, cluster)]
    if cluster.nccl is not None:
        lines += ["", "[nccl]", *key_lines(cluster.nccl)]
    known = {level.name for level in cluster.levels}
    for line in fit.lines:
        lines += ["", *table_lines(line, known)]
    text = "\n".join(lines) + "\n"
    cluster_file.read(cluster.name, text.encode())
    return text


def _device(device: Device) -> Iterator[str]:
    yield from ("[device]", f"name = {json.dumps(device.name)}")
    if device.peak_tflops:
        peaks = ", ".join(f"{key} = {peak!r}" for key, peak in device.peak_tflops)
        yield f"peak_tflops = {{ {peaks} }}"
    for name in DEVICE_KEYS:
        value = getattr(device, name)
        if value != getattr(UNDESCRIBED, name) or name == "matmul_efficiency":
            yield key_line(name, value)
    chosen = device.attention_kernel
    for kernel in sorted(device.attention, key=lambda kernel: kernel.name != chosen):  # the first is the default
        yield from ("", f"[device.attention.{json.dumps(kernel.name)}]")
        for direction, rate in (("forward", kernel.forward), ("backward", kernel.backward)):
            yield f"{direction} = {{ {', '.join(key_lines(rate))} }}"
    if device.host is not None:
        yield from ("", "[device.host]", *key_lines(device.host))
    if device.host_memory is not None:
        yield from ("", "[device.host_memory]", *key_lines(device.host_memory))


def _level(level: Level, cluster: Cluster) -> Iterator[str]:
    spans: str | int = "cluster" if level.num_ranks == cluster.num_ranks else level.num_ranks
    yield from ("[[levels]]", f"name = {json.dumps(level.name)}")
    yield f"spans = {json.dumps('node' if level.num_ranks == cluster.ranks_per_node else spans)}"
    for name in ("wire", "rails", "min_saturating_bytes"):
        value = getattr(level, name)
        if value or (
            name == "rails" and level.num_ranks > cluster.ranks_per_node
        ):  # between nodes it is never left to a guess
            yield f"{name} = {_value(value)}"
    yield from link_lines(level.link)
    if level.link.by_ranks:
        yield by_ranks_text(level.link)
    for kind, link in level.overrides:
        yield from ("", f"[levels.{kind.value}]", *link_lines(link))
        if link.by_ranks != level.link.by_ranks:
            yield by_ranks_text(link)
    if level.symmetric is not None:
        yield from ("", "[levels.symmetric]", *link_lines(level.symmetric.link))
        if level.symmetric.link.by_ranks != level.link.by_ranks:
            yield by_ranks_text(level.symmetric.link)
        yield f"sm_share = {level.symmetric.sm_share!r}"
        if level.symmetric.slowdown:
            yield f"slowdown = {level.symmetric.slowdown!r}"


def link_lines(link: Link) -> list[str]:
    """The keys of a link, without those of small groups."""
    return [stated(name, getattr(link, name)) for name in ("latency_us", "hop_us", "bandwidth_gbps")]


def by_ranks_text(link: Link) -> str:
    """The bandwidths of small groups."""
    return f"by_ranks = {{ {', '.join(f'{limit} = {rate_text(gbps)}' for limit, gbps in link.by_ranks)} }}"


def key_lines(described: AttentionRate | HostMemory | HostTimes | Nccl) -> Iterator[str]:
    """One line for each field of a dataclass whose fields are the keys of a table."""
    return (key_line(field.name, getattr(described, field.name)) for field in fields(described))


def key_line(name: str, value: bool | float | str | tuple[float, ...]) -> str:
    """A key with its value; numbers with a unit state it."""
    return stated(name, value) if name in STATED_AS and isinstance(value, int | float) else f"{name} = {_value(value)}"


def _value(value: bool | float | str | tuple[float, ...]) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def table_lines(line: FittedLine, levels: set[str]) -> Iterator[str]:
    """One measured table; it names its level if that is one of these."""
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
