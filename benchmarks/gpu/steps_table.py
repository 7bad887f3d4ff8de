"""Measured steps of `steps.py` beside Weft's predictions, to print or to write into docs/validation.md.

PYTHONPATH=src python benchmarks/gpu/steps_table.py steps.json [more.json ...] [--cluster h200-8] [--docs] [--record]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from train_table import one_line

import weft
from weft.cost.cluster import Cluster
from weft.prediction.error_bars import PLAIN, RESIDUALS, SINGLE, StepKind, is_host_bound, write_residuals
from weft.zoo import load

PAGE = Path(__file__).parents[2] / "docs" / "validation.md"
BEGIN, END = "<!-- single-gpu steps: begin -->", "<!-- single-gpu steps: end -->"
RECORDED = "single-gpu"
"""The name of this set among the recorded residuals."""
HEAD = ("shape", "recomputed", "mode", "AdamW", "step ms", "predicted ms", "off by", "GiB", "predicted GiB", "off by")


def rows_of(files: Iterable[Path]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of all files, the last one of each label that has a time, and the machine of the first file."""
    found = [json.loads(file.read_text()) for file in files]
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for each in found for row in each["rows"]):
        if "step_ms" in row or row["label"] not in rows:
            rows[row["label"]] = row
    return list(rows.values()), found[0]


EXECUTIONS = {"eager": "eager", "compiled": "compiled", "cudagraphs": "cuda-graphs"}
"""How Weft names the modes of `steps.py`."""


@cache
def predicted(
    fields: tuple[tuple[str, int], ...], optimizer: str, checkpointed: bool, mode: str, cluster: str
) -> tuple[Any, Any]:
    """The simulated timelines of a row: the graph as it ran, compiled or not; and without an execution."""
    shape: dict[str, Any] = dict(fields)
    batch, layers = shape.pop("batch"), shape.pop("num_layers")
    graph = load(
        "llama-8b",
        "none",
        part="step",
        layers=layers,
        batch=batch,
        optimizer="fused-adamw" if optimizer == "fused" else "adamw",
        checkpoint="full" if checkpointed else "none",
        partition="autograd" if mode == "eager" else "min-cut",
        **shape,
    )
    described = Cluster.load(cluster)
    return weft.simulate(graph, described.running(EXECUTIONS[mode])), weft.simulate(graph, described)


def compared(row: dict[str, Any], cluster: str) -> dict[str, float | None]:
    """Prediction and signed error of time and peak; an error is None without a measurement."""
    shape = tuple(row["shape_fields"].items())
    found, plain = predicted(shape, row["optimizer"], row["checkpointed"], row["mode"], cluster)
    # The allocator counts what a CUDA graph allocates only while it is recorded.
    peak = None if row["mode"] == "cudagraphs" else row.get("peak_allocated_bytes")
    return {
        "predicted_ms": found.step_us / 1e3,
        "host_ms": found.host_us / 1e3,
        "time_error": _error(found.step_us / 1e3, _step_ms(row)),
        "predicted_bytes": found.peak_bytes,
        "peak_error": _error(found.peak_bytes, peak),
        "plain_time_error": _error(plain.step_us / 1e3, _step_ms(row)),
        "plain_peak_error": _error(plain.peak_bytes, peak),
    }


def _step_ms(row: dict[str, Any]) -> float:
    steady = row["steady"]
    return (steady if isinstance(steady, dict) else row)["step_ms"]


def _error(predicted: float, measured: float | None) -> float | None:
    return predicted / measured - 1 if measured else None


def table(rows: list[dict[str, Any]], cluster: str) -> str:
    """An aligned Markdown table, the errors in short, and failures below it."""
    timed = [row for row in rows if "step_ms" in row]
    errors = [compared(row, cluster) for row in timed]
    cells = [HEAD, *(_cells(row, found) for row, found in zip(timed, errors, strict=True))]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    lines.append("")
    for name, key in (("Step time", "time_error"), ("Peak memory", "peak_error")):
        sizes = [abs(error) for each in errors if (error := each[key]) is not None]
        if sizes:
            middle, worst = statistics.median(sizes) * 100, max(sizes) * 100
            lines.append(f"- {name}, {len(sizes)} rows: median error {middle:.1f} %, worst {worst:.1f} %.")
    failed = [row for row in rows if "step_ms" not in row and not row["error"].startswith("not run")]
    lines += [f"- {row['label']}: {one_line(row['error'])}" for row in failed]
    return "\n".join(lines)


def _cells(row: dict[str, Any], found: dict[str, float | None]) -> tuple[str, ...]:
    peak = row.get("peak_allocated_bytes")
    return (
        row["shape"],
        "blocks" if row["checkpointed"] else "nothing",
        row["mode"] + (", steady" if row["steady"] else ""),
        row["optimizer"],
        f"{_step_ms(row):.1f}",
        f"{found['predicted_ms']:.1f}",
        _percent(found["time_error"]),
        f"{peak / 2**30:.1f}" if peak else "",
        f"{(found['predicted_bytes'] or 0) / 2**30:.1f}",
        _percent(found["peak_error"]),
    )


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error * 100:+.1f} %"


def document(rows: list[dict[str, Any]], machine: dict[str, Any], cluster: str) -> str:
    """The section of the page."""
    versions = ", ".join(f"{key} {machine[key]}" for key in ("torch", "cuda", "driver", "python") if machine.get(key))
    return f"{machine['machine']}, {versions}; {machine['date']}. Predicted for `{cluster}`.\n\n{table(rows, cluster)}"


def fill(page: Path, text: str) -> None:
    """Write a text between the marks of a page."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no marks {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def record(rows: list[dict[str, Any]], cluster: str) -> None:
    """Write the errors to the file that error bars come from."""
    device = Cluster.load(cluster).device.name
    made: list[dict[str, Any]] = []
    for row in rows:
        if "step_ms" not in row:
            continue
        found = compared(row, cluster)
        bound = is_host_bound(found["host_ms"] or 0.0, found["predicted_ms"] or 0.0)
        executed, plain = StepKind(device, SINGLE, EXECUTIONS[row["mode"]], bound), StepKind(device, SINGLE, PLAIN)
        for kind, prefix in ((executed, ""), (plain, "plain_")):
            step, peak = found[f"{prefix}time_error"], found[f"{prefix}peak_error"]
            told = {} if peak is None else {"peak": round(peak, 4)}
            told = {"step": round(step or 0.0, 4), **told}
            made.append({"set": RECORDED, "row": row["label"], **asdict(kind), **told})
    write_residuals(RESIDUALS, RECORDED, made)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="+", type=Path, help="results of steps.py; later files replace rows of earlier ones"
    )
    parser.add_argument("--cluster", default="h200-8", help="preset or TOML file")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/validation.md")
    parser.add_argument("--record", action="store_true", help="write the errors to the file that error bars come from")
    options = parser.parse_args(arguments)
    rows, machine = rows_of(options.files)
    if options.record:
        record(rows, options.cluster)
    if options.docs:
        fill(PAGE, document(rows, machine, options.cluster))
    else:
        print(document(rows, machine, options.cluster))


if __name__ == "__main__":
    main()
