"""The results of `train.py` as a table, to print or to write into docs/gpu.md with a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train_plot import draw, rows_of

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
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


def table(rows: list[dict[str, Any]]) -> str:
    """An aligned Markdown table, with failures listed below it."""
    cells = [HEAD, *(_cells(row) for row in rows if "error" not in row)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    failed = [row for row in rows if "error" in row]
    if failed:
        lines.append("")
    for row in failed:
        lines.append(f"- {row['parallel']}, {row['ranks']} ranks, {row['variant']}: {one_line(row['error'])}")
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    before_after = row.get("collectives")
    return (
        row["parallel"],
        str(row["ranks"]),
        row["variant"],
        _ms(row["step_ms"]),
        _ms(row["spread_ms"]),
        _ms(row.get("exposed_ms")),
        _ms(row.get("communication_ms")),
        _ms(row.get("predicted_ms")),
        _off(row.get("predicted_ms"), row["step_ms"]),
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


def document(found: dict[str, Any]) -> str:
    """The section of docs/gpu.md for a run."""
    versions = ", ".join(f"{key} {found[key]}" for key in ("torch", "cuda", "nccl", "python") if found.get(key))
    lines = [f"{found['machine']}, {versions}; {found['date']}.", "", table(found["rows"]), ""]
    for name, cluster in found["clusters"].items():
        if "error" in cluster:
            lines.append(f"The cluster of {cluster['ranks']} ranks was not measured: {one_line(cluster['error'])}")
            continue
        rates = cluster.get("rates")
        reached = f"{rates['tflops']:.0f} TFLOP/s and {rates['memory_gbps']:.0f} GB/s, " if rates else ""
        lines.append(
            f"Measured cluster of {name}: each rank reaches {reached}compute is "
            f"{cluster['overlap_slowdown'] * 100:.0f} % slower beside a collective, a collective "
            f"{cluster['collective_slowdown'] * 100:.0f} % slower beside compute."
        )
    return "\n".join(lines)


def fill(results: Path, page: Path) -> None:
    """Write the results of a run between the marks of a page."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or END not in rest:
        raise ValueError(f"{page} has no marks {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{document(json.loads(results.read_text()))}\n{END}{after}")
    (page.parent / "images").mkdir(exist_ok=True)
    (page.parent / "images" / "gpu.svg").write_text(draw(rows_of(page.read_text())))
