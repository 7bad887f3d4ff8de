"""Panels of a sweep: step time against each axis that has several values, with one line per choice of the others.

The source axis has one panel, the cluster axis one per source, and every other axis one per source and cluster. A sweep
with policies has a curve instead of a panel for its memory limits (`memory_curve.py`).

Contract: values are equally spaced. Sizes are in ascending order, with "not given" last. The scale does not begin at
zero, so both ends are labelled. A failed cell is a cross at the foot; its tooltip gives the limit that would fit, if
known. Names are untrusted text: they are escaped, and characters that XML forbids are removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from weft.quantities import duration_text, size_text
from weft.report.plain_text import plain_line
from weft.report.sweep import Cell
from weft.report.sweep_table import place_texts

AXES = ("source", "cluster", "pipeline", "memory limit", "bucket size")
HEIGHT, FOOT, LEFT, GAP = 150, 44, 90, 110
"""In pixels: height of a panel, height of the names under it, width of its scale, distance between two values."""
LEGEND, MAX_LEGEND = 260, 6
"""Width of the legend in pixels, and the most lines that it names; tooltips of the points name the others."""
COLORS = ("#2f9e8f", "#e2672f", "#7b52cc", "#2e6fb7", "#b8860b", "#c2407f", "#5b6770", "#4c8a2b")
MAX_NAME, MAX_TEXT = 16, 40
"""Longest name under a panel, and longest other text, in characters."""
UNLIMITED = 1 << 70
"""Sorts after every size."""


@dataclass(frozen=True)
class Panel:
    """The plot of one axis."""

    number: int
    """Index of the axis in `AXES`."""
    values: tuple[str, ...]
    cells: Sequence[Cell]

    @property
    def title(self) -> str:
        first = self.cells[0]
        of_axis = (None if self.number < 2 else first.cluster, None if self.number < 1 else first.source)
        return ", ".join([f"step by {AXES[self.number]}", *filter(None, of_axis)])

    @property
    def width(self) -> int:
        return LEFT + GAP * len(self.values) + LEGEND

    def lines(self) -> dict[tuple[str, ...], list[tuple[int, Cell]]]:
        """The lines, by their values on the other axes: cells, each with its index on this axis."""
        found: dict[tuple[str, ...], list[tuple[int, Cell]]] = {}
        for cell in self.cells:
            place = place_texts(cell)
            others = tuple(text for i, text in enumerate(place) if i != self.number)
            found.setdefault(others, []).append((self.values.index(place[self.number]), cell))
        return {others: sorted(line, key=lambda point: point[0]) for others, line in found.items()}


def panels(cells: Sequence[Cell]) -> list[Panel]:
    """The panels of all axes on which the cells differ."""
    found: list[Panel] = []
    for number in range(len(AXES)):
        together: dict[tuple[str, ...], list[Cell]] = {}
        for cell in cells:
            together.setdefault(place_texts(cell)[: min(number, 2)], []).append(cell)
        for members in together.values():
            has_curve = AXES[number] == "memory limit" and any(cell.policy for cell in members)
            values = {place_texts(cell)[number]: _size(cell, number) for cell in members}
            if len(values) > 1 and not has_curve:
                found.append(Panel(number, tuple(sorted(values, key=lambda text: values[text])), members))
    return found


def _size(cell: Cell, number: int) -> int:
    """The sort key of a cell on an axis; names keep their order."""
    sizes = {3: cell.memory_limit_bytes, 4: cell.max_bucket_bytes}
    if number not in sizes:
        return 0
    size = sizes[number]
    return UNLIMITED if size is None else size


def draw(panel: Panel, top: int, margin: int) -> Iterator[str]:
    """The panel as SVG, with its upper edge at `top`; it is `HEIGHT + FOOT` high."""
    steps = [cell.after.step_us for cell in panel.cells if cell.after is not None]
    low, high = min(steps, default=0.0), max(steps, default=1.0)
    left, foot = margin + LEFT, top + HEIGHT
    yield draw_text(margin, top, panel.title, "head")
    yield f'<line class="scale" x1="{left}" x2="{left + GAP * len(panel.values)}" y1="{foot}" y2="{foot}"/>'
    for step in dict.fromkeys((low, high)) if steps else ():
        yield draw_text(margin, round(_y(step, low, high, top)) - 8, duration_text(step), "time")
    for i, value in enumerate(panel.values):
        name = "not given" if value == "-" else value
        yield draw_text(left + i * GAP + 8, foot + 6, name, "name")
    skipped = min(panel.number, 2)  # the source and the cluster are in the title
    for k, (others, line) in enumerate(panel.lines().items()):
        told = ", ".join(text for text in others[skipped:] if text != "-") or panel.title
        if k < MAX_LEGEND:
            yield draw_text(
                left + GAP * len(panel.values) + 8, top + 18 + 18 * k, told, "name", COLORS[k % len(COLORS)]
            )
        yield from _line(line, told, COLORS[k % len(COLORS)], (low, high), left, top)


def _line(
    line: list[tuple[int, Cell]], told: str, color: str, scale: tuple[float, float], left: int, top: int
) -> Iterator[str]:
    points: list[str] = []
    for i, cell in line:
        x = left + i * GAP + GAP // 2
        if cell.after is None:
            needs = "" if cell.fitting_bytes is None else f", needs {size_text(cell.fitting_bytes)}"
            yield draw_cross(x, top + HEIGHT - 8, color, f"{told}: failed{needs}")
            continue
        y = _y(cell.after.step_us, *scale, top)
        points.append(f"{x},{y:.1f}")
        yield (
            f'<circle cx="{x}" cy="{y:.1f}" r="4" fill="{color}">'
            f"<title>{escape(plain_line(f'{told}: {duration_text(cell.after.step_us)}'))}</title></circle>"
        )
    if len(points) > 1:
        yield f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2"/>'


def draw_cross(x: float, y: float, color: str, told: str) -> str:
    """A cross with a tooltip."""
    shape = f"M{x - 4} {y - 4}L{x + 4} {y + 4}M{x - 4} {y + 4}L{x + 4} {y - 4}"
    tooltip = f"<title>{escape(plain_line(told))}</title>"
    return f'<path class="failed" d="{shape}" stroke="{color}" stroke-width="2">{tooltip}</path>'


def _y(step: float, low: float, high: float, top: int) -> float:
    """The vertical position of a step time in a panel: the longest is at the top."""
    share = (step - low) / (high - low) if high > low else 0.5
    return top + HEIGHT - 24 - share * (HEIGHT - 60)


def draw_text(x: float, y: float, text: str, name: str, color: str | None = None) -> str:
    """One line of text; a long line is truncated, and its tooltip has the whole."""
    whole = plain_line(text)
    limit = MAX_TEXT if color or name != "name" else MAX_NAME
    shown = whole if len(whole) <= limit else f"{whole[: limit - 1]}…"
    tooltip = f"<title>{escape(whole)}</title>" if shown != whole else ""
    style = f' style="fill:{color}"' if color else ""
    return f'<text class="{name}" x="{x}" y="{y + 13}"{style}>{tooltip}{escape(shown)}</text>'
