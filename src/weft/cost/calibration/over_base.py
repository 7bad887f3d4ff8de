"""Write a fit as a file that states only what was measured, and takes the rest from a preset.

A measured rate of products is written as the efficiency of the preset's peak, so that MFU keeps its meaning. The levels
of a fit are called by their place; the file calls them as the preset does.

Contract: the text is read back before it is returned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median

from weft.cost import cluster_file
from weft.cost.calibration.attention_trace import fitted_attention
from weft.cost.calibration.cluster_writer import by_ranks_text, key_line, key_lines, link_lines, table_lines
from weft.cost.calibration.compute_trace import ComputeTrace
from weft.cost.calibration.fit import NODE, Fit
from weft.cost.cluster import Cluster
from weft.cost.device import Device
from weft.cost.levels import Level
from weft.errors import ClusterError, compose


def read_base(name: str, ranks_per_node: int | None) -> Cluster:
    """The preset of a name; raises if it is a file, or has nodes of another size than the caller says."""
    if cluster_file.file_of(name) is not None:
        what = f"{name!r} is not a preset"
        raise ClusterError(compose("calibrate", what, do="name a preset such as h100-8x8: `weft cluster list`"))
    found = Cluster.load(name)
    if ranks_per_node is not None and ranks_per_node != found.ranks_per_node:
        what = f"nodes of {name} have {found.ranks_per_node} ranks, and the measurements {ranks_per_node}"
        raise ClusterError(compose("calibrate", what, do="name a preset with such nodes"))
    return found


def text_over_base(fit: Fit, base: Cluster, compute: ComputeTrace, sources: Iterable[str] = ()) -> str:
    """The TOML of what was measured, over a preset."""
    if fit.cluster.num_ranks > base.num_ranks:
        what = f"{fit.cluster.num_ranks} ranks were measured, and {base.name} has {base.num_ranks}"
        raise ClusterError(compose("calibrate", what, do="name a preset with as many nodes"))
    lines = [
        f"# Fitted by `weft calibrate` to {', '.join(map(json.dumps, sources)) or 'samples'}.",
        "# Everything that is not stated here is as in the base.",
        f"base = {json.dumps(base.name)}",
        f"name = {json.dumps(fit.cluster.name)}",
    ]
    if device := list(_device(base.device, compute)):
        lines += ["", "[device]", *device]
    names: dict[str, str] = {}
    for level in fit.cluster.levels:
        names[level.name] = base.levels[0 if level.name == NODE else -1].name
        lines += ["", *_level(level, names[level.name])]
    for line in fit.lines:
        named = replace(line, level=names.get(line.level, line.level))
        lines += ["", *table_lines(named, set(names.values()))]
    text = "\n".join(lines) + "\n"
    cluster_file.read(fit.cluster.name, text.encode())
    return text


def _device(base: Device, found: ComputeTrace) -> Iterator[str]:
    rates = {key: median(values) for key, values in found.rates(base).items()}
    memory = rates.pop("memory", None)
    known = dict(base.peak_tflops)
    main = max(
        (key for key in rates if key in known),
        key=lambda key: sum(each.amount for each in found.work if each.key == key),
        default=None,
    )
    share = base.matmul_efficiency if main is None else rates[main] / 1e12 / known[main]
    if main is not None:
        yield f"matmul_efficiency = {share!r}"
    if peaks := {key: rate / 1e12 / share for key, rate in sorted(rates.items()) if key != main}:
        yield f"peak_tflops = {{ {', '.join(f'{key} = {peak!r}' for key, peak in peaks.items())} }}"
    if memory is not None and base.memory_gbps is not None:
        yield f"memory_efficiency = {memory / 1e9 / base.memory_gbps!r}"
    elif memory is not None:
        yield key_line("memory_gbps", memory / 1e9)
    for name in ("launch_gap_us", "overlap_slowdown"):
        if (value := getattr(found.overheads, name)) is not None:
            yield key_line(name, value)
    if found.kernel_us is not None:
        yield f"kernel_us = {found.kernel_us!r}"
    for kernel in fitted_attention(found.attention, base):
        yield from ("", f"[device.attention.{json.dumps(kernel.name)}]")
        for direction, rate in (("forward", kernel.forward), ("backward", kernel.backward)):
            yield f"{direction} = {{ {', '.join(key_lines(rate))} }}"
    if host := found.host.medians:
        yield from ("", "[device.host]", *(f"{name} = {us!r}" for name, us in host.items()))


def _level(level: Level, name: str) -> Iterator[str]:
    yield from ("[[levels]]", f"name = {json.dumps(name)}", *link_lines(level.link), by_ranks_text(level.link))
    for kind, link in level.overrides:
        yield from ("", f"[levels.{kind.value}]", *link_lines(link), by_ranks_text(link))
    if level.symmetric is not None:
        link = level.symmetric.link
        yield from ("", "[levels.symmetric]", *link_lines(link), by_ranks_text(link))
