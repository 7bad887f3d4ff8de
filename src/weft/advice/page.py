"""The page of an advice: throughput against memory, the table, timelines of the best, and the lines to paste.

Contract: one file that loads nothing and runs no script. All names are untrusted text: they are escaped, and characters
that are not printable are removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from weft.advice.ranking import HEAD, Advice, Ranked, row_texts
from weft.advice.recipe import recipe_lines
from weft.advice.sketch import BLOCKED_LANE, COMPUTE_LANE, PARTS
from weft.quantities import count_text, duration_text, size_text
from weft.report.plain_text import plain, plain_line
from weft.report.sweep_panels import COLORS

WIDTH, HEIGHT, LEFT, FOOT, MARGIN = 760, 340, 90, 50, 24
"""In pixels: the plot, the width of its scale, the height of its foot, and the space around the points."""
NUM_TIMELINES = 3
"""Layouts whose steps are drawn."""
LANE_HEIGHT, LANE_LEFT = 22, 110
"""In pixels: one row of a timeline, and the width of its name."""
COMPUTE_COLOR, BLOCKED_COLOR, GROUP_COLOR = "#2e6fb7", "#d64545", "#2f9e8f"
STYLE = (
    "body{font:14px/1.45 system-ui,sans-serif;color:#1d242c;margin:24px;max-width:1280px}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:4px 12px 4px 0;text-align:left}"
    "tr.front td{font-weight:650}pre{background:#eef1f4;padding:12px;overflow:auto}"
    "text{font:13px system-ui,sans-serif;fill:#1d242c}.axis{stroke:#d3dae2}.front{stroke:#7b52cc;fill:none}"
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page_of(advice: Advice) -> str:
    """The page as text."""
    front = advice.front()
    rows = [
        f"<tr{' class=front' if each in front else ''}>"
        + "".join(f"<td>{_told(text)}</td>" for text in texts)
        + "</tr>"
        for each, texts in ((each, row_texts(number, each)) for number, each in enumerate(advice.ranked, 1))
    ]
    left_out = [f"<li>{_told(each.layout.text)}: {_told(each.reason)}</li>" for each in advice.left_out]
    title = _told(f"{advice.model} on {advice.cluster}")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{title}</title><style>{STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        f"<p>{_told(f'{advice.num_ranks} ranks, {count_text(advice.num_tokens)} tokens a step')}</p>",
        *(f"<p>{_told(line)}</p>" for line in advice.reasons()),
        "<h2>Throughput against memory</h2>",
        *_plot(advice, front),
        "<h2>Layouts</h2>",
        "<p>No other layout beats the bold ones in both throughput and memory.</p>",
        f"<table><tr>{''.join(f'<th>{name}</th>' for name in HEAD)}</tr>{''.join(rows)}</table>",
        *_timelines(advice),
        "<h2>To use the first one</h2>",
        f"<pre>{escape(plain(chr(10).join(recipe_lines(advice, advice.best))))}</pre>",
        *([f"<h2>Left out</h2><ul>{''.join(left_out)}</ul>"] if left_out else []),
        *(f"<p>Note: {_told(note)}</p>" for note in advice.notes),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _told(text: str) -> str:
    return escape(plain_line(text))


def _plot(advice: Advice, front: list[Ranked]) -> Iterator[str]:
    """One point for each layout; a line joins those that no other one beats in both."""
    rates = [each.tokens_per_second_per_gpu for each in advice.ranked]
    peaks = [each.found.peak_bytes for each in advice.ranked]

    def place(each: Ranked) -> tuple[float, float]:
        x = _share(each.found.peak_bytes, min(peaks), max(peaks)) * (WIDTH - LEFT - 2 * MARGIN)
        y = _share(each.tokens_per_second_per_gpu, min(rates), max(rates)) * (HEIGHT - FOOT - 2 * MARGIN)
        return LEFT + MARGIN + x, HEIGHT - FOOT - MARGIN - y

    shapes = [*dict.fromkeys(each.layout.shape for each in advice.ranked)]
    height = HEIGHT + 20 * len(shapes)
    yield f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
    yield "<title>Tokens per second and GPU against peak memory</title>"
    yield f'<path class="axis" fill="none" d="M{LEFT} {MARGIN}V{HEIGHT - FOOT}H{WIDTH - MARGIN}"/>'
    yield _label(0, MARGIN + 26, f"{count_text(max(rates))}/s")
    yield _label(0, HEIGHT - FOOT - MARGIN, f"{count_text(min(rates))}/s")
    yield _label(LEFT, HEIGHT - FOOT + 20, size_text(min(peaks)))
    yield _label(WIDTH - 80, HEIGHT - FOOT + 20, size_text(max(peaks)))
    points = " ".join("{:.1f},{:.1f}".format(*place(each)) for each in front)
    yield f'<polyline class="front" points="{points}"/>'
    for each in advice.ranked:
        x, y = place(each)
        color = COLORS[shapes.index(each.layout.shape) % len(COLORS)]
        tooltip = f"{each.layout.text}: {count_text(each.tokens_per_second_per_gpu)} tokens/s, "
        tooltip += size_text(each.found.peak_bytes)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{color}"><title>{_told(tooltip)}</title></circle>'
    for number, shape in enumerate(shapes):
        y = HEIGHT + 20 * number
        yield f'<circle cx="{LEFT}" cy="{y}" r="6" fill="{COLORS[number % len(COLORS)]}"/>'
        yield _label(LEFT + 14, y + 4, shape)
    yield "</svg>"


def _timelines(advice: Advice) -> Iterator[str]:
    """The steps of the best layouts, each on a scale of its own."""
    drawn = [(number, each) for number, each in enumerate(advice.ranked[:NUM_TIMELINES], 1) if each.found.lanes]
    if not drawn:
        return
    yield "<h2>Timelines</h2>"
    yield (
        "<p>The planned step of one microbatch and the optimizer: compute, the time during which communication blocks "
        "it, and the collectives of each group. Each picture has the width of its own step.</p>"
    )
    colors = {COMPUTE_LANE: COMPUTE_COLOR, BLOCKED_LANE: BLOCKED_COLOR}
    for number, each in drawn:
        yield f"<h3>{_told(f'{number}. {each.layout.text}: {duration_text(each.found.step_us)}')}</h3>"
        height = LANE_HEIGHT * len(each.found.lanes)
        yield f'<svg class="lanes" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
        yield f"<title>{_told(f'Timeline of {each.layout.text}')}</title>"
        scale = (WIDTH - LANE_LEFT) / PARTS
        for row, lane in enumerate(each.found.lanes):
            y = row * LANE_HEIGHT
            yield _label(0, y + 15, lane.name)
            bars = "".join(
                f"M{LANE_LEFT + start * scale:.1f} {y + 2}h{(end - start) * scale:.1f}v{LANE_HEIGHT - 4}"
                f"h{-(end - start) * scale:.1f}z"
                for start, end in lane.bars
            )
            yield f'<path fill="{colors.get(lane.name, GROUP_COLOR)}" d="{bars}"/>'
        yield "</svg>"


def _share(value: float, least: float, most: float) -> float:
    """The place of a value between the least and the most; the middle if these are equal."""
    return (value - least) / (most - least) if most > least else 0.5


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y}">{_told(text)}</text>'
