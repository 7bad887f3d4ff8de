"""The results of `train.py` as a table, to print or to write into docs/gpu.md with a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from train_plot import draw, rows_of

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
LISTED_BEGIN, LISTED_END = "<!-- predictions: begin -->", "<!-- predictions: end -->"
LISTED = (
    "run",
    "parallelism",
    "ranks",
    "variant",
    "step ms",
    "predicted ms",
    "off by",
    "exposed ms",
    "predicted exposed ms",
    "in the run, ms",
    "off by",
)
HEAD = (
    "parallelism",
    "ranks",
    "variant",
    "step ms",
    "spread",
    "exposed ms",
    "communication ms",
    "predicted ms",
    "off by",
    "with measured nodes",
    "off by",
    "collectives",
    "GiB",
    "values",
)
SHOWN = 160
PARALLEL = ("fsdp", "ddp", "tp", "fsdp-tp")
WORK = ("graph", "step", "cudagraphs")
Run = tuple[str, dict[str, Any]]
"""Name and results of one call of `train.py`."""


def table(rows: list[dict[str, Any]]) -> str:
    """An aligned Markdown table, with failures listed below it."""
    lines = _aligned([HEAD, *(_cells(row) for row in rows if "error" not in row)])
    failed = [row for row in rows if "error" in row]
    if failed:
        lines.append("")
    for row in failed:
        lines.append(f"- {row['parallel']}, {row['ranks']} ranks, {row['variant']}: {one_line(row['error'])}")
    return "\n".join(lines)


def _aligned(cells: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a Markdown table whose first row is its head."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def listed(runs: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """Every row of named runs that was predicted again, the worst first."""
    rows = [(name, row) for name, found in runs for row in found["rows"] if "again_ms" in row]
    rows.sort(key=lambda pair: -abs(pair[1]["again_ms"] / pair[1]["step_ms"] - 1))
    return "\n".join(_aligned([LISTED, *(_listed_cells(name, row) for name, row in rows)]))


def _listed_cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    step, told = row["step_ms"], row.get("predicted_ms")
    return (
        name,
        row["parallel"],
        str(row["ranks"]),
        row["variant"],
        _ms(step),
        _ms(row["again_ms"]),
        _off(row["again_ms"], step),
        _ms(row.get("exposed_ms")),
        _ms(row["again_exposed_ms"]),
        _ms(told),
        _off(told, step),
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    before_after = row.get("collectives")
    predicted = row.get("again_ms", row.get("predicted_ms"))
    return (
        row["parallel"],
        str(row["ranks"]),
        row["variant"],
        _ms(row["step_ms"]),
        _ms(row["spread_ms"]),
        _ms(row.get("exposed_ms")),
        _ms(row.get("communication_ms")),
        _ms(predicted),
        _off(predicted, row["step_ms"]),
        _ms(row.get("predicted_measured_ms")),
        _off(row.get("predicted_measured_ms"), row["step_ms"]),
        f"{before_after[0]} to {before_after[1]}" if before_after else "",
        f"{row['peak_gib']:.1f}" if row.get("peak_gib") is not None else "",
        f"{'agree' if row['values_agree'] else 'DIFFER'} ({_error(row['gradient_error'])})",
    )


def _error(number: float | None) -> str:
    return "not a number" if number is None else f"{number:.0e}"


def _ms(number: float | None) -> str:
    return "" if number is None else f"{number:.1f}"


def _off(predicted: float | None, measured: float) -> str:
    return "" if predicted is None else f"{(predicted / measured - 1) * 100:+.0f} %"


def one_line(text: str) -> str:
    line = " ".join(text.split()).replace("|", "/").replace("<", "(").replace(">", ")")
    return line if len(line) <= SHOWN else line[: SHOWN - 3] + "..."


def document(runs: Sequence[Run]) -> str:
    """The rows of the latest run of each job, and the cluster that each job measured; `runs` start with the latest."""
    newest = runs[0][1]
    rows: dict[str, list[dict[str, Any]]] = {}
    run_of: dict[str, str] = {}
    for name, found in runs:
        for job, group in groupby(found["rows"], key=job_of):
            members = list(group)
            if job not in rows or (not _has_steps(rows[job]) and _has_steps(members)):
                rows[job], run_of[job] = members, name
    order = [f"{parallel}:{ranks}" for ranks in (2, 4) for parallel in PARALLEL]
    shown = sorted(rows, key=lambda job: (order.index(job.rpartition(":")[0]), WORK.index(job.rpartition(":")[2])))
    clusters = [
        (name, each, cluster)
        for name, found in runs
        for each, cluster in found["clusters"].items()
        if _measured_for(each, [job for job in shown if run_of[job] == name])
    ]
    versions = ", ".join(f"{key} {newest[key]}" for key in ("torch", "cuda", "nccl", "python") if newest.get(key))
    lines = [f"{newest['machine']}, {versions}.", "", table([row for job in shown for row in rows[job]]), ""]
    for run, name, cluster in clusters:
        if "error" in cluster:
            lines.append(f"- {run}, {name}: the cluster was not measured: {one_line(cluster['error'])}")
            continue
        # Older files state the measured rates as those of the device.
        older = {"tflops": cluster["peak_tflops"]["bf16"], "memory_gbps": cluster["memory_gbps"]}
        rates = cluster.get("rates", older)
        reached = f"{rates['tflops']:.0f} TFLOP/s and {rates['memory_gbps']:.0f} GB/s, "
        lines.append(
            f"- {run}, {name}: each rank reaches {reached}compute is "
            f"{cluster['overlap_slowdown'] * 100:.0f} % slower during a collective, a collective "
            f"{cluster['collective_slowdown'] * 100:.0f} % slower during compute"
            + (f"; {cluster['connections']} hardware queues" if "connections" in cluster else "")
        )
    return "\n".join(lines)


def job_of(row: dict[str, Any]) -> str:
    """The job that measured a row, such as `fsdp:2:step`."""
    variant = row["variant"]
    what = "graph" if variant.startswith("graph") else "cudagraphs" if variant.endswith("cudagraphs") else "step"
    return f"{row['parallel']}:{row['ranks']}:{what}"


def _has_steps(rows: Iterable[dict[str, Any]]) -> bool:
    return any("step_ms" in row for row in rows)


def _measured_for(name: str, jobs: Iterable[str]) -> bool:
    """Whether the ranks of one of these jobs measured the cluster; older runs measured one for several jobs."""
    if ":" in name:
        return name in jobs
    ranks, _, what = name.partition(", ")
    return any(job.split(":")[1] == ranks and (not what or what.startswith(job.split(":")[2])) for job in jobs)


def fill(results: Sequence[Path], page: Path) -> None:
    """Write results and predictions of runs, the latest first, between the marks of a page, and draw the results."""
    runs = [(file.stem.removeprefix("train-h200-"), json.loads(file.read_text())) for file in results]
    _replace(page, BEGIN, END, document(runs))
    _replace(page, LISTED_BEGIN, LISTED_END, listed(runs))
    (page.parent / "images").mkdir(exist_ok=True)
    (page.parent / "images" / "gpu.svg").write_text(draw(rows_of(page.read_text())))


def _replace(page: Path, begin: str, end: str, text: str) -> None:
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{page} has no marks {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
