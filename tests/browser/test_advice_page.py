"""The page of an advice in a real Chromium: no errors, the plot, the table, the timelines, hostile names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.advice.made_advice import FOUND, advice_of
from weft.advice.layout import TrainingLayout
from weft.advice.page import NUM_TIMELINES, page_of
from weft.advice.ranking import Advice
from weft.advice.sketch import Lane

pytestmark = [pytest.mark.needs_browser, pytest.mark.xdist_group("browser")]

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
LAYOUTS = (
    TrainingLayout("fsdp", (("dp", 16),)),
    TrainingLayout("hsdp", (("replicate", 2), ("shard", 8))),
    TrainingLayout("ddp", (("dp", 16),)),
    TrainingLayout("fsdp", (("dp", 16),), "never"),
)


def advice_with_lanes(model: str = "zoo:llama-debug") -> Advice:
    """Four layouts; each is slower than the one before and needs less memory."""
    made = advice_of(*LAYOUTS)
    lanes = (Lane("compute", ((0, 400), (500, 1000))), Lane("blocked", ((400, 500),)), Lane("dp", ((100, 500),)))
    found = [
        replace(FOUND, step_us=100.0 + 10 * number, peak_bytes=(4 - number) << 30, lanes=lanes) for number in range(4)
    ]
    ranked = tuple(
        replace(each, found=one, tokens_per_second_per_gpu=1e5 / one.step_us)
        for each, one in zip(made.ranked, found, strict=True)
    )
    return replace(made, model=model, ranked=ranked)


@pytest.fixture
def show(open_page: Callable[..., Any], tmp_path: Path) -> Callable[[Advice], Any]:
    def show_advice(advice: Advice) -> Any:
        path = tmp_path / "advice.html"
        path.write_text(page_of(advice))
        return open_page(path)

    return show_advice


def test_the_page_shows_a_row_and_a_point_for_each_layout(show: Callable[[Advice], Any]):
    page = show(advice_with_lanes())
    assert page.locator("tr.front").count() == len(LAYOUTS)
    points = page.locator("circle", has=page.locator("title"))
    assert points.count() == len(LAYOUTS)
    boxes = [points.nth(i).bounding_box() for i in range(len(LAYOUTS))]
    assert [box["x"] for box in boxes] == sorted((box["x"] for box in boxes), reverse=True)  # ever less memory
    assert [box["y"] for box in boxes] == sorted(box["y"] for box in boxes)  # ever slower


def test_the_best_layouts_have_timelines_to_scale(show: Callable[[Advice], Any]):
    page = show(advice_with_lanes())
    timelines = page.locator("svg.lanes")
    assert timelines.count() == NUM_TIMELINES
    compute, blocked, group = (timelines.first.locator("path").nth(i).bounding_box() for i in range(3))
    assert compute["y"] < blocked["y"] < group["y"]
    assert blocked["width"] == pytest.approx(compute["width"] / 10, rel=0.02)
    assert group["x"] + group["width"] == pytest.approx(blocked["x"] + blocked["width"], abs=1)


def test_hostile_names_are_only_text(show: Callable[[Advice], Any]):
    page = show(advice_with_lanes(HOSTILE))
    assert HOSTILE in page.locator("h1").inner_text()
    assert page.locator("img").count() == 0
