"""Panels of a sweep: the step against each axis that has several values, one line for each choice of the others.

The axis of clusters has one panel, every other axis one for each cluster.

Contract: values stand side by side at equal distances, sizes by size, and what is not given behind them all; a scale
does not begin at zero, so its ends are written beside it. A cell that failed is a cross at the foot, with what would
fit where that is known. Names are untrusted text: escaped, and without what XML cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from weft.quantities import duration_text, size_text
from weft.report.plain_text import plain_line
from weft.report.sweep import Cell, place_texts

AXES = ("cluster", "pipeline", "memory limit", "size of buckets")
HEIGHT, FOOT, LEFT, GAP = 150, 44, 90, 110
"""Of a panel; of the names under it; of the scale beside it; between two values."""
LEGEND, MAX_LEGEND = 260, 6
"""The width of the names of lines, and how many are shown; the others are told by their points."""
COLORS = ("#2f9e8f", "#e2672f", "#7b52cc", "#2e6fb7", "#b8860b", "#c2407f", "#5b6770", "#4c8a2b")
MAX_NAME = 16
UNLIMITED = 1 << 70
"""Behind every size."""


@dataclass(frozen=True)
class Panel:
    """One axis."""

    number: int
    """Of the axis."""
    values: tuple[str, ...]
    cells: Sequence[Cell]

    @property
    def title(self) -> str:
        where = f", {self.cells[0].cluster}" if self.number else ""
        return f"step by {AXES[self.number]}{where}"

    @property
    def width(self) -> int:
        return LEFT + GAP * len(self.values) + LEGEND

    def lines(self) -> dict[tuple[str, ...], list[tuple[int, Cell]]]:
        """By what the other axes are: the cells with their places."""
        found: dict[tuple[str, ...], list[tuple[int, Cell]]] = {}
        for cell in self.cells:
            place = place_texts(cell)
            others = tuple(text for i, text in enumerate(place) if i != self.number)
            found.setdefault(others, []).append((self.values.index(place[self.number]), cell))
        return {others: sorted(line, key=lambda point: point[0]) for others, line in found.items()}


def panels(cells: Sequence[Cell]) -> list[Panel]:
    """A panel for each axis on which the cells differ; but for that of clusters, by cluster."""
    by_cluster: dict[str, list[Cell]] = {}
    for cell in cells:
        by_cluster.setdefault(cell.cluster, []).append(cell)
    found: list[Panel] = []
    for number in range(len(AXES)):
        for members in by_cluster.values() if number else [cells]:
            values = {place_texts(cell)[number]: _size(cell, number) for cell in members}
            if len(values) > 1:
                found.append(Panel(number, tuple(sorted(values, key=lambda text: values[text])), members))
    return found


def _size(cell: Cell, number: int) -> int:
    """What the values of an axis are ordered by; names stay as they come."""
    sizes = {2: cell.memory_limit_bytes, 3: cell.max_bucket_bytes}
    if number not in sizes:
        return 0
    size = sizes[number]
    return UNLIMITED if size is None else size


def draw(panel: Panel, top: int, margin: int) -> Iterator[str]:
    """The panel as SVG, from the height `top` on; it is `HEIGHT + FOOT` high."""
    steps = [cell.after.step_us for cell in panel.cells if cell.after is not None]
    low, high = min(steps, default=0.0), max(steps, default=1.0)
    left, foot = margin + LEFT, top + HEIGHT
    yield _text(margin, top, panel.title, "head")
    yield f'<line class="scale" x1="{left}" x2="{left + GAP * len(panel.values)}" y1="{foot}" y2="{foot}"/>'
    for step in dict.fromkeys((low, high)) if steps else ():
        yield _text(margin, round(_y(step, low, high, top)) - 8, duration_text(step), "time")
    for i, value in enumerate(panel.values):
        name = "not given" if value == "-" else value
        yield _text(left + i * GAP + 8, foot + 6, name, "name")
    skipped = 0 if panel.number == 0 else 1  # the cluster is in the title
    for k, (others, line) in enumerate(panel.lines().items()):
        told = ", ".join(text for text in others[skipped:] if text != "-") or panel.title
        if k < MAX_LEGEND:
            yield _text(left + GAP * len(panel.values) + 8, top + 18 + 18 * k, told, "name", COLORS[k % len(COLORS)])
        yield from _line(line, told, COLORS[k % len(COLORS)], (low, high), left, top)


def _line(
    line: list[tuple[int, Cell]], told: str, color: str, scale: tuple[float, float], left: int, top: int
) -> Iterator[str]:
    points: list[str] = []
    for i, cell in line:
        x = left + i * GAP + GAP // 2
        if cell.after is None:
            needs = "" if cell.fitting_bytes is None else f", needs {size_text(cell.fitting_bytes)}"
            yield _mark(x, top + HEIGHT - 8, color, f"{told}: failed{needs}")
            continue
        y = _y(cell.after.step_us, *scale, top)
        points.append(f"{x},{y:.1f}")
        yield (
            f'<circle cx="{x}" cy="{y:.1f}" r="4" fill="{color}">'
            f"<title>{escape(plain_line(f'{told}: {duration_text(cell.after.step_us)}'))}</title></circle>"
        )
    if len(points) > 1:
        yield f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2"/>'


def _mark(x: int, y: int, color: str, told: str) -> str:
    shape = f"M{x - 4} {y - 4}L{x + 4} {y + 4}M{x - 4} {y + 4}L{x + 4} {y - 4}"
    tooltip = f"<title>{escape(plain_line(told))}</title>"
    return f'<path class="failed" d="{shape}" stroke="{color}" stroke-width="2">{tooltip}</path>'


def _y(step: float, low: float, high: float, top: int) -> float:
    """Where a step is in a panel: the longest at the top."""
    share = (step - low) / (high - low) if high > low else 0.5
    return top + HEIGHT - 24 - share * (HEIGHT - 60)


def _text(x: int, y: int, text: str, name: str, color: str | None = None) -> str:
    """One line of text; one that is too long is cut, and whole in its tooltip."""
    whole = plain_line(text)
    limit = 2 * MAX_NAME if color or name != "name" else MAX_NAME
    shown = whole if len(whole) <= limit else f"{whole[: limit - 1]}…"
    tooltip = f"<title>{escape(whole)}</title>" if shown != whole else ""
    style = f' style="fill:{color}"' if color else ""
    return f'<text class="{name}" x="{x}" y="{y + 13}"{style}>{tooltip}{escape(shown)}</text>'
