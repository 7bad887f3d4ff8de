"""`weft calibrate`: fit a cluster description to measurements."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import usage
from weft.errors import compose

if TYPE_CHECKING:
    from weft.cost.calibration.compute_trace import ComputeTrace
    from weft.cost.calibration.fit import Fit, FittedLine
    from weft.cost.device import Device

MAX_KERNELS = 10
MAX_NAME = 70
"""Number of kernels that the text lists, and characters of a name."""


class KindOption(StrEnum):
    """Kinds that nccl-tests measures and Weft prices."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"


Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...", help="Chrome traces of torch.profiler, one per rank of a run, and nccl-tests tables."
    ),
]
PerNode = Annotated[
    int | None,
    typer.Option(
        "--ranks-per-node", min=1, max=1_000_000, help="Number of ranks in a node; determines which groups cross nodes."
    ),
]
NameOption = Annotated[str, typer.Option("--name", help="Name of the cluster.")]
BaseOption = Annotated[
    str | None,
    typer.Option("--base", metavar="PRESET", help="The preset that describes everything that was not measured."),
]
Kinds = Annotated[KindOption | None, typer.Option("--kind", help="Kind of collective in tables that do not name it.")]


def calibrate(
    files: Files,
    output: usage.OutputOption = None,
    ranks_per_node: PerNode = None,
    base: BaseOption = None,
    name: NameOption = "calibrated",
    kind: Kinds = None,
    as_json: usage.JsonOption = False,
) -> None:
    """Fit a cluster to measured collectives: its TOML goes to stdout, the fit and its residuals to stderr.

    With --json, stdout gets one object: the fit, and the TOML unless -o is given.
    """
    usage.check_files((output,), files)
    if missing := [path for path in files if not path.is_file()]:
        where = [f"{path}: {'it is a folder' if path.is_dir() else 'there is no such file'}" for path in missing]
        raise usage.UsageError(compose("calibrate", "nothing can be fitted", where=where))
    with usage.progress("importing torch"):
        from weft.cost.calibration.cluster_writer import cluster_text
        from weft.cost.calibration.fit import fit, read_measurements
        from weft.cost.calibration.over_base import read_base, text_over_base
        from weft.cost.device import UNDESCRIBED
        from weft.graph.ops import Kind

    with usage.progress(f"reading {', '.join(path.name for path in files)}"):
        found = read_measurements(files, Kind(kind.value) if kind is not None else None)
    with usage.progress(f"fitting {len(found.samples)} samples"):
        device = found.compute.device() or UNDESCRIBED
        symmetric = found.compute.peer_copies.transport()
        per_node, sources = ranks_per_node or found.ranks_per_node, [path.name for path in files]
        below = read_base(base, per_node) if base is not None else None
        if below is not None:
            fitted = fit(found.samples, below.ranks_per_node, name, device, symmetric, base)
            text = text_over_base(fitted, below, found.compute, sources)
        else:
            fitted = fit(found.samples, per_node, name, device, symmetric)
            text = cluster_text(fitted, sources)
    notes = [*found.notes, *fitted.notes]
    if output is not None or not as_json:
        usage.write(text, output)
    if not as_json:
        usage.show("\n".join([*_table(fitted), *_compute_lines(found.compute, device), *notes]), err=True)
        return
    told = (
        _record(fitted, notes)
        | {"compute": _compute(found.compute, device)}
        | ({"toml": text} if output is None else {})
    )
    usage.write(json.dumps(told, indent=1) + "\n", None)


def _record(fitted: Fit, notes: list[str]) -> dict[str, Any]:
    cluster = fitted.cluster
    return {
        "name": cluster.name,
        "num_nodes": cluster.num_nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "lines": [_line(line) for line in fitted.lines],
        "notes": notes,
    }


def _line(line: FittedLine) -> dict[str, Any]:
    return {
        "kind": line.kind.value,
        "num_ranks": line.group.size,
        "level": line.level,
        "latency_us": line.latency_us,
        "bandwidth_gbps": line.bandwidth_gbps,
        "num_samples": line.num_samples,
        "min_bytes": line.min_bytes,
        "max_bytes": line.max_bytes,
        "residuals": [
            {
                "num_bytes": each.num_bytes,
                "measured_us": each.measured_us,
                "fitted_us": each.fitted_us,
                "error": each.error,
            }
            for each in line.residuals
        ],
    }


def _compute(found: ComputeTrace, device: Device) -> dict[str, Any]:
    rates, symmetric = _rates(device), found.peer_copies.transport()
    return {
        "peak_tflops": dict(device.peak_tflops),
        "memory_gbps": device.memory_gbps,
        "launch_gap_us": found.overheads.launch_gap_us,
        "host_kernel_us": found.overheads.host_kernel_us,
        "overlap_slowdown": found.overheads.overlap_slowdown,
        "peer_copies": None if symmetric is None else asdict(symmetric),
        "kernels": [asdict(kernel) for kernel in found.kernels],
        "residuals": [asdict(each) | {"fitted_us": each.amount / rates[each.key] * 1e6} for each in found.work],
    }


def _rates(device: Device) -> dict[str, float]:
    """Flops or bytes per second."""
    peaks = {key: peak * 1e12 for key, peak in device.peak_tflops}
    return peaks | ({} if device.memory_gbps is None else {"memory": device.memory_gbps * 1e9})


def _compute_lines(found: ComputeTrace, device: Device) -> list[str]:
    """Measured matrix products and copies against the fitted device, and the slowest kernels."""
    from weft.report.plain_text import plain_line, table

    lines: list[str] = []
    for key, rate in _rates(device).items():
        unit = "bytes" if key == "memory" else "flops"
        rows: list[tuple[str, ...]] = [(unit, "measured us", "fitted us", "off by")]
        for each in (each for each in found.work if each.key == key):
            fitted_us = each.amount / rate * 1e6
            rows.append((str(each.amount), _us(each.us), _us(fitted_us), f"{(fitted_us / each.us - 1) * 100:+.1f} %"))
        reached = f"{rate / 1e9:.4g} GB/s" if key == "memory" else f"{rate / 1e12:.4g} TFLOP/s"
        lines += [f"{key}: {reached}", *(f"  {row}" for row in table(rows)), ""]
    symmetric = found.peer_copies.transport()
    if symmetric is not None:
        link = symmetric.link
        parts = f"barrier {_us(link.latency_us)} us, copy {_us(link.hop_us)} us + {link.bandwidth_gbps:.4g} GB/s"
        lines += [f"copies between GPUs: {parts}, from {len(found.peer_copies.copies)} copies", ""]
    overheads = found.overheads
    for what, value, unit in (
        ("gap between kernels", overheads.launch_gap_us, "us"),
        ("host time per kernel, where the host is slower", overheads.host_kernel_us, "us"),
        ("slowdown of products beside collectives", overheads.overlap_slowdown, "of their time"),
    ):
        lines += [] if value is None else [f"{what}: {value:.3g} {unit}", ""]
    if found.kernels:
        rows = [("compute kernel", "runs", "total us")]
        rows += [(_short(plain_line(k.name)), str(k.count), _us(k.total_us)) for k in found.kernels[:MAX_KERNELS]]
        rest = len(found.kernels) - MAX_KERNELS
        lines += [*table(rows), *([f"... and {rest} more"] if rest > 0 else []), ""]
    return lines


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}..."


def _table(fitted: Fit) -> list[str]:
    from weft.report.plain_text import table

    lines: list[str] = []
    for line in fitted.lines:
        lines += [_title(line), *(f"  {row}" for row in table(_rows(line))), ""]
    return lines


def _title(line: FittedLine) -> str:
    title = f"{line.kind.value} of {line.group.size} ranks, {line.level}"
    if line.latency_us is None:
        return f"{title}: no line"
    speed = "unknown bandwidth" if line.bandwidth_gbps is None else f"{line.bandwidth_gbps:.4g} GB/s on the wire"
    return f"{title}: {line.latency_us:.4g} us + {speed}, from {line.min_bytes} to {line.max_bytes} bytes"


def _rows(line: FittedLine) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("bytes", "measured us", "fitted us", "off by")]
    fitted = {each.num_bytes: each for each in line.residuals}
    for size, us in line.table.points:
        each = fitted.get(size)
        told = ("-", "-") if each is None else (_us(each.fitted_us), f"{each.error * 100:+.1f} %")
        rows.append((str(size), _us(us), *told))
    return rows


def _us(us: float) -> str:
    return f"{us:.0f}" if us >= 1000 else f"{us:.4g}"
