"""Step time against peak memory: a line for the plans under memory limits, a point for each policy made by hand.

Contract: both scales are linear and begin at the smallest value. A limit that no plan meets is a cross at the foot. The
dashed line is a proved lower bound for every order of the operations of each plan. The dotted line is one for every
choice of what to keep within the limit, as far as it is known. Names are untrusted text: they are escaped, and
characters that XML forbids are removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from weft.quantities import duration_text, exact_size_text, size_text
from weft.report.plain_text import plain_line
from weft.report.summary import Totals
from weft.report.sweep import Cell
from weft.report.sweep_panels import COLORS, FOOT, LEFT, LEGEND, draw_cross, draw_text

WIDTH, HEIGHT = 480, 230
"""Of the area between the scales, in pixels."""
HEAD = 34
"""Height of the title above that area, in pixels."""
NUM_TICKS = 5
PLANNED, BOUND = COLORS[0], "#7b52cc"
BY_HAND = COLORS[1:2] + COLORS[3:]


@dataclass(frozen=True)
class MemoryCurve:
    """The cells of one source, cluster, pipeline and bucket size."""

    cells: Sequence[Cell]

    height = HEAD + HEIGHT + FOOT
    width = LEFT + WIDTH + LEGEND

    @property
    def title(self) -> str:
        first = self.cells[0]
        bucket = "" if first.max_bucket_bytes is None else f", buckets of {exact_size_text(first.max_bucket_bytes)}"
        source = "" if first.source is None else f", {first.source}"
        return f"step by peak memory, {first.cluster}, {first.pipeline}{bucket}{source}"

    @cached_property
    def planned(self) -> list[tuple[Cell, Totals, int]]:
        """The plans under limits, by their peak."""
        found = [(cell, *figures) for cell in self.cells if not cell.policy and (figures := _figures(cell))]
        return sorted(found, key=lambda each: (each[2], each[0].index))

    @cached_property
    def by_hand(self) -> list[tuple[Cell, Totals, int]]:
        """The policies, in the order of the cells."""
        return [(cell, *figures) for cell in self.cells if cell.policy and (figures := _figures(cell))]

    @cached_property
    def refused(self) -> list[Cell]:
        """The cells whose limit no plan meets."""
        return [cell for cell in self.cells if cell.fitting_bytes is not None]

    @cached_property
    def steps_us(self) -> tuple[float, float]:
        """The ends of the vertical scale."""
        shown = [*self.planned, *self.by_hand]
        steps = [totals.step_us for _, totals, _ in shown]
        bounds = [each for _, totals, _ in self.planned for each in (totals.lower_bound_us, totals.choices_bound_us)]
        steps += [bound for bound in bounds if bound is not None]
        return min(steps, default=0.0), max(steps, default=1.0)

    @cached_property
    def peaks(self) -> tuple[int, int]:
        """The ends of the horizontal scale, in bytes."""
        peaks = [peak for _, _, peak in (*self.planned, *self.by_hand)]
        peaks += [cell.memory_limit_bytes for cell in self.refused if cell.memory_limit_bytes is not None]
        return min(peaks, default=0), max(peaks, default=1)


def memory_curves(cells: Sequence[Cell]) -> list[MemoryCurve]:
    """The curves of a sweep with policies."""
    found: dict[tuple[str | None, str, str, int | None], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.source, cell.cluster, cell.pipeline, cell.max_bucket_bytes), []).append(cell)
    return [MemoryCurve(members) for members in found.values() if any(cell.policy for cell in members)]


def _figures(cell: Cell) -> tuple[Totals, int] | None:
    if cell.after is None or cell.after.peak_bytes is None:
        return None
    return cell.after, cell.after.peak_bytes


def draw_curve(curve: MemoryCurve, top: int, margin: int) -> Iterator[str]:
    """The curve as SVG, with its upper edge at `top`."""
    left, foot = margin + LEFT, top + HEAD + HEIGHT
    yield draw_text(margin, top, curve.title, "head")
    yield from _scales(curve, left, foot, margin)

    def place(step_us: float, peak: int) -> tuple[float, float]:
        across = _share(peak, *curve.peaks) * WIDTH
        return left + across, foot - _share(step_us, *curve.steps_us) * HEIGHT

    bounds = [(totals.lower_bound_us, peak) for _, totals, peak in curve.planned if totals.lower_bound_us is not None]
    yield _line([place(bound, peak) for bound, peak in bounds], BOUND, dashes="5 4")
    chosen = [(t.choices_bound_us, peak) for _, t, peak in curve.planned if t.choices_bound_us is not None]
    if chosen:
        yield _line([place(bound, peak) for bound, peak in chosen], BOUND, dashes="2 3")
    yield _line([place(totals.step_us, peak) for _, totals, peak in curve.planned], PLANNED)
    for cell, totals, peak in curve.planned:
        limit = "no limit" if cell.memory_limit_bytes is None else exact_size_text(cell.memory_limit_bytes)
        x, y = place(totals.step_us, peak)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{PLANNED}">{_tooltip(limit, totals, peak)}</circle>'
    for k, (cell, totals, peak) in enumerate(curve.by_hand):
        x, y = place(totals.step_us, peak)
        square = f'x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" fill="{BY_HAND[k % len(BY_HAND)]}"'
        yield f"<rect {square}>{_tooltip(cell.policy or '', totals, peak)}</rect>"
    for cell in curve.refused:
        limit = cell.memory_limit_bytes or 0
        told = f"{exact_size_text(limit)}: does not fit, needs {size_text(cell.fitting_bytes or 0)}"
        yield draw_cross(round(left + _share(limit, *curve.peaks) * WIDTH), foot - 8, PLANNED, told)
    yield from _legend(curve, left + WIDTH + 16, top + HEAD)


def _scales(curve: MemoryCurve, left: int, foot: int, margin: int) -> Iterator[str]:
    yield f'<line class="scale" x1="{left}" x2="{left + WIDTH}" y1="{foot}" y2="{foot}"/>'
    yield f'<line class="scale" x1="{left}" x2="{left}" y1="{foot - HEIGHT}" y2="{foot}"/>'
    for k in range(NUM_TICKS):
        share = k / (NUM_TICKS - 1)
        peak, step = (low + (high - low) * share for low, high in (curve.peaks, curve.steps_us))
        yield draw_text(left + WIDTH * share - 24, foot + 6, size_text(round(peak)), "time")
        yield draw_text(margin, foot - HEIGHT * share - 8, duration_text(step), "time")


def _legend(curve: MemoryCurve, x: int, top: int) -> Iterator[str]:
    named = [("planned within a limit", PLANNED), ("bound of these operations", BOUND)]
    if any(totals.choices_bound_us is not None for _, totals, _ in curve.planned):
        named.append(("bound of all choices", BOUND))
    named += [(cell.policy or "", BY_HAND[k % len(BY_HAND)]) for k, (cell, _, _) in enumerate(curve.by_hand)]
    for k, (told, color) in enumerate(named):
        yield draw_text(x, top + 18 * k, told, "name", color)


def _line(points: list[tuple[float, float]], color: str, dashes: str = "") -> str:
    pattern = f' stroke-dasharray="{dashes}"' if dashes else ""
    shown = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{shown}" fill="none" stroke="{color}" stroke-width="2"{pattern}/>'


def _tooltip(name: str, totals: Totals, peak: int) -> str:
    return f"<title>{escape(plain_line(f'{name}: {duration_text(totals.step_us)} at {size_text(peak)}'))}</title>"


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5
