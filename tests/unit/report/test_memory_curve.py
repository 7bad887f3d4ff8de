"""The plot of step time against peak memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

from weft.report.summary import Totals
from weft.report.sweep import Cell
from weft.report.sweep_plot import plot

TOTALS = Totals(10.0, 4.0, 5.0, 1.0, 6.0, 0.25, 1024, 2, 128)
CHOICES: dict[str, Any] = {"choices_bound_us": 5.0}
SVG = "{http://www.w3.org/2000/svg}"


def cell(step_us: float, peak: int, **rest: Any) -> Cell:
    figures = replace(TOTALS, step_us=step_us, peak_bytes=peak)
    named: dict[str, Any] = {"before": TOTALS, "after": figures, "pass_seconds": 0.5}
    return Cell("digest", 0, 1, "c", "p", **(named | rest))


REFUSED = Cell("digest", 0, 1, "c", "p", 1024, error="e", fitting_bytes=3000)
CELLS = [
    REFUSED,
    cell(8.0, 4096, memory_limit_bytes=4096),
    cell(10.0, 3072, memory_limit_bytes=3072),
    cell(9.0, 5120, policy="by hand"),
    cell(11.0, 2048, policy="<b>other</b>"),
]


def drawn(cells: list[Cell], tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(plot(cells)).iter(f"{SVG}{tag}"))


def points(line: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in line.get("points", "").split())
    return [(float(x), float(y)) for x, y in pairs]


def test_plans_are_a_line_by_peak_above_their_bound():
    bound, line = drawn(CELLS, "polyline")
    assert bound.get("stroke-dasharray")
    (left, low), (right, high) = points(line)
    assert left < right
    assert low < high  # the step of 10 us is higher up, at the smaller peak
    assert [x for x, _ in points(bound)] == [left, right]
    assert all(y > high for _, y in points(bound))


def test_the_bound_of_all_choices_is_a_line_of_its_own():
    def known(each: Cell) -> Cell:
        return each if each.policy or each.after is None else replace(each, after=replace(each.after, **CHOICES))

    chosen, orders = sorted(drawn(list(map(known, CELLS)), "polyline")[:2], key=lambda line: points(line)[0][1])[::-1]
    assert chosen.get("stroke-dasharray") != orders.get("stroke-dasharray")
    assert len(drawn(list(map(known, CELLS)), "polyline")) == 1 + len(drawn(CELLS, "polyline"))
    assert all(y > other for (_, y), (_, other) in zip(points(chosen), points(orders), strict=True))
    legend = [each.text for each in drawn(list(map(known, CELLS)), "text") if each.get("style")]
    assert "bound of all choices" in legend


def test_policies_are_points_with_names():
    squares = [each for each in drawn(CELLS, "rect") if each.get("height") == "10"]
    assert [each[0].text for each in squares] == ["by hand: 9.00 us at 5.00 KiB", "<b>other</b>: 11.0 us at 2.00 KiB"]
    legend = [each.text for each in drawn(CELLS, "text") if each.get("style")]
    assert legend == ["planned within a limit", "bound of these operations", "by hand", "<b>other</b>"]
    (x, y), (other_x, other_y) = ((float(each.get("x", "")), float(each.get("y", ""))) for each in squares)
    assert x > other_x
    assert y > other_y


def test_a_limit_that_nothing_meets_is_a_cross():
    assert [each[0].text for each in drawn(CELLS, "path")] == ["1 KiB: does not fit, needs 2.93 KiB"]


def test_only_a_sweep_with_policies_has_a_curve_and_it_replaces_the_panel_of_limits():
    def titles(cells: list[Cell]) -> list[str | None]:
        return [each.text for each in drawn(cells, "text") if each.get("class") == "head"]

    assert titles(CELLS) == ["c", "step by peak memory, c, p"]
    assert titles(CELLS[:3]) == ["c", "step by memory limit, c"]


def test_a_curve_without_any_plan_is_drawn():
    assert drawn([REFUSED, replace(REFUSED, policy="by hand", fitting_bytes=None)], "path")
