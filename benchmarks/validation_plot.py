"""The figures of `validate.py` as a picture: predicted against published tokens/s, with error bars."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench_plot import axis_of, legend, marks, place, svg, text_at
from validation_table import throughput_error

Figures = dict[str, Any]
SIZE, LEFT, TOP, BOTTOM, RIGHT = 460, 66, 52, 46, 16
WIDTH, HEIGHT = LEFT + SIZE + RIGHT, TOP + SIZE + BOTTOM
CLASSES = {"H100": "inductor", "A100": "weft"}
"""Colour by device; other devices get the last one."""


def draw(found: Figures) -> str:
    """Points on logarithmic axes, and the diagonal."""
    rows = [row for row in found["rows"] if throughput_error(row) is not None]
    if not rows:
        return svg(WIDTH, HEIGHT, "Predicted against published", [text_at(16, 28, "no row was predicted")])
    pairs = [(row["tokens_per_second"], row["predicted"]["tokens_per_second_per_gpu"]) for row in rows]
    ends = axis_of([value for pair in pairs for value in pair])
    devices = dict.fromkeys(row["predicted"]["kind"]["device"] for row in rows)
    drawn = [*legend([(_class(device), device) for device in devices]), *_grid(ends)]
    for row, (published, predicted) in zip(rows, pairs, strict=True):
        drawn += _point(row, published, predicted, ends)
    return svg(WIDTH, HEIGHT, "Predicted against published tokens/s per GPU", drawn)


def _point(row: Figures, published: float, predicted: float, ends: tuple[float, float]) -> Iterator[str]:
    x, name = _across(published, ends), _class(row["predicted"]["kind"]["device"])
    share = row["predicted"]["step_error"]["share"]
    if share:
        low, high = (_up(predicted / (1 + each), ends) for each in (share, -min(share, 0.9)))
        yield f'<line class="line-{name}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
    hollow = ' fill-opacity="0" stroke="#1d242c"' if row["fit"] else ""
    told = f"<title>{row['page']}/{row['name']}: {throughput_error(row):+.1%}</title>"
    yield f'<circle class="{name}"{hollow} cx="{x:.1f}" cy="{_up(predicted, ends):.1f}" r="4">{told}</circle>'


def _grid(ends: tuple[float, float]) -> Iterator[str]:
    for value in marks(ends):
        x, y = _across(value, ends), _up(value, ends)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + SIZE}"/>'
        yield f'<line class="grid" x1="{LEFT}" x2="{LEFT + SIZE}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield text_at(int(x) - 14, TOP + SIZE + 16, f"{value:g}", "small")
        yield text_at(16, int(y) + 4, f"{value:g}", "small")
    yield f'<line stroke="#66717d" x1="{LEFT}" y1="{TOP + SIZE}" x2="{LEFT + SIZE}" y2="{TOP}"/>'
    yield text_at(LEFT + SIZE // 2 - 90, HEIGHT - 10, "published tokens/s per GPU", "small")
    yield text_at(16, TOP - 8, "predicted; hollow: fitted", "small")


def _across(value: float, ends: tuple[float, float]) -> float:
    return place(value, ends, LEFT, LEFT + SIZE)


def _up(value: float, ends: tuple[float, float]) -> float:
    return place(value, ends, TOP + SIZE, TOP)


def _class(device: str) -> str:
    return next((name for start, name in CLASSES.items() if device.startswith(start)), "naive")
