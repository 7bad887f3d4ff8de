"""The steps of `train.py` as a picture for docs/gpu.md: a bar for the measured time, a line for the prediction."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import Any

LABEL, BAR, TOLD, LINE, MARGIN = 210, 470, 200, 22, 16
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1d242c}.head{font-weight:650}.told{fill:#66717d}.step{fill:#a9b8cc}"
    ".exposed{fill:#e2672f}.predicted{stroke:#7b52cc;stroke-width:2}"
    ".nodes{stroke:#1d242c;stroke-width:2;stroke-dasharray:3 2}"
)
LEGEND = (
    ("step", "measured step"),
    ("exposed", "of it exposed communication"),
    ("predicted", "predicted"),
    ("nodes", "with measured nodes"),
)
NUMBERS = {"step_ms": 3, "exposed_ms": 5, "predicted_ms": 7, "predicted_measured_ms": 9}
"""The columns of the table that are drawn."""


def rows_of(page: str) -> list[dict[str, Any]]:
    """The rows of the table that a page shows."""
    found: list[dict[str, Any]] = []
    for line in page.split("\n"):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 14 and re.fullmatch(r"[\d.]+", cells[3]):
            numbers = {name: float(cells[i]) if cells[i] else None for name, i in NUMBERS.items()}
            found.append({"parallel": cells[0], "ranks": cells[1], "variant": cells[2], **numbers})
    return found


def draw(rows: list[dict[str, Any]]) -> str:
    """The picture of the rows that have a step."""
    drawn_ms = ("step_ms", "predicted_ms", "predicted_measured_ms")
    longest = max((row[key] or 0.0 for row in rows for key in drawn_ms), default=1.0)
    drawn, y = list(_legend()), MARGIN + 2 * LINE
    for (parallel, ranks), members in groupby(rows, key=lambda row: (row["parallel"], row["ranks"])):
        drawn.append(_text(MARGIN, y, f"{parallel}, {ranks} ranks", "head"))
        for row in members:
            y += LINE
            drawn += _row(row, y, BAR / longest)
        y += LINE + LINE // 2
    width = LABEL + BAR + TOLD + 2 * MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}" role="img">'
    ground = f'<rect width="{width}" height="{y}" fill="#fff"/>'
    title = "<title>Steps on one GPU, measured and predicted</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", ground, *drawn, "</svg>", ""])


def _row(row: dict[str, Any], y: int, scale: float) -> Iterator[str]:
    x, step = MARGIN + LABEL, row["step_ms"]
    told = f"{step:.1f} ms"
    yield _text(MARGIN + 12, y, row["variant"], "name")
    yield f'<rect class="step" x="{x}" y="{y}" width="{step * scale:.1f}" height="16"/>'
    exposed = min(row["exposed_ms"] or 0.0, step) * scale
    yield f'<rect class="exposed" x="{x + step * scale - exposed:.1f}" y="{y}" width="{exposed:.1f}" height="16"/>'
    for name, key in (("predicted", "predicted_ms"), ("nodes", "predicted_measured_ms")):
        if row[key] is not None:
            at = x + row[key] * scale
            yield f'<line class="{name}" x1="{at:.1f}" x2="{at:.1f}" y1="{y - 2}" y2="{y + 18}"/>'
    if row["predicted_ms"] is not None:
        told += f", predicted {(row['predicted_ms'] / step - 1) * 100:+.0f} %"
    yield _text(x + BAR + 10, y, told, "told")


def _legend() -> Iterator[str]:
    x = MARGIN
    for name, told in LEGEND:
        if name in ("step", "exposed"):
            yield f'<rect class="{name}" x="{x}" y="{MARGIN + 2}" width="11" height="11"/>'
        else:
            yield f'<line class="{name}" x1="{x + 5}" x2="{x + 5}" y1="{MARGIN}" y2="{MARGIN + 15}"/>'
        yield _text(x + 17, MARGIN, told, "told")
        x += 42 + 7 * len(told)


def _text(x: int, y: int, text: str, name: str) -> str:
    return f'<text class="{name}" x="{x}" y="{y + 13}">{escape(text)}</text>'
