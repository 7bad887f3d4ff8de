"""The figures of `bench.py` as two pictures: excess of steps over their bounds, and pass time by graph size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from bench_table import NAMES, best, inductor_seconds, name_of, rows_of
from bench_table import seconds as seconds_of

Figures = dict[str, Any]
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1d242c}.head{font-weight:650}.small{fill:#66717d}"
    ".naive{fill:#c3ccd6}.inductor{fill:#e2672f}.weft{fill:#2f9e8f}.grid{stroke:#e3e8ee}"
    "polyline{fill:none;stroke-width:1.6}.line-inductor{stroke:#e2672f}.line-weft{stroke:#2f9e8f}"
)
LEGEND = (("naive", "naive: launches hoisted, waits sunk"), ("inductor", "Inductor's best"), ("weft", "Weft's planner"))
MARGIN, LABEL, BARS, TOLD = 16, 220, 440, 120
BAR, ROW = 9, 36
WIDTH, HEIGHT = 640, 380


def steps(found: Figures) -> str:
    """Three bars for each step: the share that it is above its bound."""
    rows = rows_of(found, "steps")
    drawn = list(legend(LEGEND))
    sets = [(row, [_gap(best(row, start)) for start in ("naive", "inductor", "weft planner")]) for row in rows]
    widest = max([1e-9, *(gap for _, gaps in sets for gap in gaps if gap is not None)])
    y = MARGIN + 30
    for row, gaps in sets:
        drawn.append(text_at(MARGIN, y + 18, f"{name_of(row)}, {row['layers']} layers"))
        for i, (gap, (name, _)) in enumerate(zip(gaps, LEGEND, strict=True)):
            top, x = y + i * (BAR + 1), MARGIN + LABEL
            if gap is None:
                drawn.append(text_at(x + 4, top + BAR, "fails", "small"))
                continue
            width = max(gap, 0) / widest * BARS
            drawn.append(f'<rect class="{name}" x="{x}" y="{top}" width="{width:.1f}" height="{BAR}"/>')
            drawn.append(text_at(int(x + width) + 4, top + BAR, f"{gap * 100:.2f} %", "small"))
        y += ROW
    return svg(MARGIN * 2 + LABEL + BARS + TOLD, y + MARGIN, "Steps above their bounds", drawn)


def seconds(found: Figures) -> str:
    """Pass time against nodes, both in powers of ten: a line for each parallelism."""
    lines: list[tuple[str, str, list[tuple[int, float]]]] = []
    for parallel in NAMES:
        rows = [row for row in rows_of(found, "steps") if row["timed"] and row["parallel"] == parallel]
        rows.sort(key=lambda row: row["nodes"])
        for name in ("inductor", "weft"):
            times = [
                (row["nodes"], inductor_seconds(row) if name == "inductor" else _planner_seconds(row)) for row in rows
            ]
            lines.append((name, parallel, [(nodes, time) for nodes, time in times if time]))
    points = [point for _, _, each in lines for point in each]
    if not points:
        return svg(WIDTH, HEIGHT, "Pass time", [text_at(MARGIN, MARGIN + 12, "no pass was timed")])
    across, up = axis_of([x for x, _ in points]), axis_of([y for _, y in points])
    drawn = [*legend((("inductor", "Inductor, as it is switched on"), LEGEND[2])), *_grid(across, up)]
    for name, parallel, each in lines:
        places = [(place(x, across, 60, WIDTH - 130), place(y, up, HEIGHT - 40, 50)) for x, y in each]
        if not places:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn.append(f'<polyline class="line-{name}" points="{path}"/>')
        drawn += [f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
        x, y = places[-1]
        drawn.append(text_at(int(x) + 7, int(y) + 4, NAMES[parallel], "small"))
    return svg(WIDTH, HEIGHT, "Pass time by graph size", drawn)


def _gap(run: tuple[str, Figures] | None) -> float | None:
    return run[1]["gap"] if run else None


def _planner_seconds(row: Figures) -> float | None:
    return seconds_of(row["results"].get("weft planner"))


def axis_of(values: Sequence[float]) -> tuple[float, float]:
    """The logarithms of the ends, with a little room."""
    return math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1


def place(value: float, axis: tuple[float, float], start: float, end: float) -> float:
    return start + (math.log10(value) - axis[0]) / (axis[1] - axis[0]) * (end - start)


def _grid(across: tuple[float, float], up: tuple[float, float]) -> Iterator[str]:
    for value in marks(across):
        x = place(value, across, 60, WIDTH - 130)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="50" y2="{HEIGHT - 40}"/>'
        yield text_at(int(x) - 14, HEIGHT - 24, f"{value:g}", "small")
    for value in marks(up):
        y = place(value, up, HEIGHT - 40, 50)
        yield f'<line class="grid" x1="60" x2="{WIDTH - 130}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield text_at(MARGIN, int(y) + 4, f"{value:g} s", "small")
    yield text_at(WIDTH // 2 - 60, HEIGHT - 6, "nodes of the graph", "small")


def marks(axis: tuple[float, float]) -> list[float]:
    """1, 2, 5, 10 and so on, between the ends."""
    powers = range(math.floor(axis[0]), math.ceil(axis[1]) + 1)
    values = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [value for value in values if axis[0] <= math.log10(value) <= axis[1]]


def legend(names: Sequence[tuple[str, str]]) -> Iterator[str]:
    x = MARGIN
    for name, told in names:
        yield f'<rect class="{name}" x="{x}" y="{MARGIN}" width="11" height="11"/>'
        yield text_at(x + 17, MARGIN + 10, told, "small")
        x += 44 + 6 * len(told)


def text_at(x: int, y: int, text: str, name: str = "name") -> str:
    return f'<text class="{name}" x="{x}" y="{y}">{escape(text)}</text>'


def svg(width: int, height: int, title: str, drawn: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' role="img">'
    )
    ground = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}</style>", ground, *drawn, "</svg>", ""])
