"""A sweep as one self-contained SVG: a bar for each cell next to that of the original graph, then a panel per axis.

A sweep with policies made by hand also has a curve of step time against peak memory.

Contract: names of clusters and pipelines are untrusted text: they are escaped, and characters that XML forbids are
removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from weft.quantities import duration_text, size_text
from weft.report.memory_curve import draw_curve, memory_curves
from weft.report.plain_text import plain_line
from weft.report.sweep import Cell
from weft.report.sweep_panels import FOOT, HEIGHT, draw, panels
from weft.report.sweep_table import place_texts, with_different_sources

LABEL_WIDTH, BAR_WIDTH, TIME_WIDTH, MARGIN = 310, 480, 190, 16
LINE = 22
MAX_LABEL, MAX_HEAD = 46, 120
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1d242c}.head{font-weight:650}.time{fill:#66717d}"
    ".was{fill:#d3dae2}.covered{fill:#2f9e8f}.exposed{fill:#e2672f}.bound{stroke:#7b52cc;stroke-width:2}"
    ".scale{stroke:#d3dae2}"
)
LEGEND = (("was", "before"), ("covered", "compute and hidden"), ("exposed", "exposed"))


def plot(cells: Sequence[Cell]) -> str:
    """The chart: bars by source and cluster on one scale, marked with the proved bounds, and step time by axis."""
    cells = with_different_sources(cells)
    steps = [totals.step_us for cell in cells for totals in (cell.before, cell.after) if totals]
    longest = max([1e-9, *steps, *(cell.runtime_us or 0.0 for cell in cells)])
    drawn: list[str] = list(_legend())
    y = MARGIN + 2 * LINE
    for (source, cluster), group in groupby(cells, key=lambda cell: (cell.source, cell.cluster)):
        members = list(group)
        head = cluster if source is None else f"{cluster}: {source}"
        drawn.append(_text(MARGIN, y, head, "head", MAX_HEAD))
        y += LINE
        before = next((cell.before for cell in members if cell.before), None)
        if before is not None:
            width = before.step_us / longest * BAR_WIDTH
            drawn += _row(y, "before", duration_text(before.step_us))
            drawn.append(_bar(y, 0, width, "was"))
            y += LINE
        usual = next((cell for cell in members if cell.runtime_us is not None and cell.policy is None), None)
        if usual is not None:
            runtime_us = usual.runtime_us or 0.0
            drawn += _row(y, f"run today: {usual.runtime}", duration_text(runtime_us))
            drawn.append(_bar(y, 0, runtime_us / longest * BAR_WIDTH, "was"))
            y += LINE
        for cell in members:
            drawn += _cell(y, cell, longest)
            y += LINE
        y += LINE // 2
    found = panels(cells)
    for panel in found:
        drawn += draw(panel, y, MARGIN)
        y += HEIGHT + FOOT
    curves = memory_curves(cells)
    for curve in curves:
        drawn += draw_curve(curve, y, MARGIN)
        y += curve.height
    widest = max((each.width for each in (*found, *curves)), default=0)
    width = MARGIN * 2 + max(LABEL_WIDTH + BAR_WIDTH + TIME_WIDTH, widest)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}" role="img">'
    title = "<title>Step times of a sweep</title>"
    ground = f'<rect width="{width}" height="{y}" fill="#fff"/>'
    text = "\n".join([head, title, f"<style>{STYLE}</style>", ground, *drawn, "</svg>", ""])
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _legend() -> Iterator[str]:
    x = MARGIN
    for name, told in LEGEND:
        yield f'<rect class="{name}" x="{x}" y="{MARGIN + 2}" width="11" height="11"/>'
        yield _text(x + 17, MARGIN, told, "time")
        x += 40 + 7 * len(told)
    yield f'<line class="bound" x1="{x}" x2="{x}" y1="{MARGIN}" y2="{MARGIN + 15}"/>'
    yield _text(x + 8, MARGIN, "lower bound", "time")


def _cell(y: int, cell: Cell, longest: float) -> Iterator[str]:
    if cell.after is None:
        needs = "failed" if cell.fitting_bytes is None else f"does not fit, needs {size_text(cell.fitting_bytes)}"
        yield from _row(y, _label(cell), needs)
        return
    step = cell.after.step_us / longest * BAR_WIDTH
    exposed = min(cell.after.exposed_us / longest * BAR_WIDTH, step)
    gap = "" if cell.after.gap is None else f", gap {cell.after.gap * 100:.1f} %"
    yield from _row(y, _label(cell), duration_text(cell.after.step_us) + gap)
    yield _bar(y, 0, step - exposed, "covered")
    yield _bar(y, step - exposed, exposed, "exposed")
    if cell.after.lower_bound_us is not None:
        x = MARGIN + LABEL_WIDTH + min(cell.after.lower_bound_us / longest * BAR_WIDTH, BAR_WIDTH)
        yield f'<line class="bound" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 1}" y2="{y + 17}"/>'


def _label(cell: Cell) -> str:
    """The place of a cell on all axes but the source and the cluster."""
    return ", ".join(text for text in place_texts(cell)[2:] if text != "-")


def _row(y: int, label: str, told: str) -> Iterator[str]:
    yield _text(MARGIN + 12, y, label, "name")
    yield _text(MARGIN + LABEL_WIDTH + BAR_WIDTH + 10, y, told, "time")


def _bar(y: int, start: float, width: float, name: str) -> str:
    x = MARGIN + LABEL_WIDTH + start
    return f'<rect class="{name}" x="{x:.1f}" y="{y}" width="{max(width, 0):.1f}" height="16"/>'


def _text(x: int, y: int, text: str, name: str, limit: int = MAX_LABEL) -> str:
    """One line of text; a long line is truncated, and its tooltip has the whole."""
    whole = plain_line(text)
    shown = whole if len(whole) <= limit else f"{whole[: limit - 1]}…"
    tooltip = f"<title>{escape(whole)}</title>" if shown != whole else ""
    return f'<text class="{name}" x="{x}" y="{y + 13}">{tooltip}{escape(shown)}</text>'
