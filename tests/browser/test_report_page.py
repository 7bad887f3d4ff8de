"""The page of a report in a real Chromium: no errors, hover, zoom, filter, hostile names, ten thousand bars."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.browser.runs import make_page
from weft.plan.plan import Retention
from weft.prediction.memory_by_owner import OwnedMemory
from weft.report.html import ReportPage

pytestmark = [pytest.mark.needs_browser, pytest.mark.xdist_group("browser")]

HOSTILE = "<img src=x onerror=alert(1)>\"'`${1}</script><script>alert(2)</script>\u2028{{ 7 * 7 }}"
FIRST_PAINT_MS, ZOOM_MS = 3000, 200
LANE_OF_AFTER_GATHERS = 26 + (30 + 8 + 3 * 24 + 8) + 30 + 24 + 8 + 9
"""Height of the middle of the lane in the drawing: axis, the run before, head, compute stream, half a bar."""
ZOOM_STEP = """async () => {
    const canvas = document.getElementById("timeline"), box = canvas.getBoundingClientRect(), steps = [];
    for (let i = 0; i < 8; i++) {
        const began = performance.now();
        const where = { clientX: box.left + box.width / 2, clientY: box.top + 100, deltaY: i < 4 ? -300 : 300 };
        canvas.dispatchEvent(new WheelEvent("wheel", { ...where, bubbles: true, cancelable: true }));
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        steps.push(performance.now() - began);
    }
    return steps;
}"""


@pytest.fixture
def show(open_page: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Opens the page of a report."""

    def show_page(report: ReportPage, **options: Any) -> Any:
        path = tmp_path / "report.html"
        report.save_html(path)
        return open_page(path, **options)

    return show_page


def hover_first_gather(page: Any) -> None:
    page.locator("#timeline").hover(position={"x": 103, "y": LANE_OF_AFTER_GATHERS})


def pixels(page: Any) -> str:
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate("document.getElementById('timeline').toDataURL()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_a_complaint_and_shows_the_headline(show: Callable[..., Any], scheme: str):
    report = make_page()
    page = show(report, color_scheme=scheme)
    assert page.title() == "llama-8b, FSDP, 64 ranks"
    cells = page.locator(".headline tbody tr").first.locator("th, td").all_inner_texts()
    step = report.summary.rows[0]
    assert cells == ["step", step.before, step.after, step.change]
    assert page.locator("#rows tr").count() == 64
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_headline_can_be_read_without_scripts(show: Callable[..., Any]):
    page = show(make_page(), java_script_enabled=False)
    assert page.locator(".headline tbody tr").count() == 10
    assert page.locator(".sentence").inner_text().startswith("Of the 73.2 ms step, compute takes 70.2 ms")
    assert "above the proved lower bound" in page.locator(".verdict").inner_text()
    assert page.locator(".layers tbody tr").all_inner_texts() == [
        "layers.0\tforward\t1\t1.70 ms\tinputs come too late, or the result is needed too soon"
    ]
    assert page.locator("noscript p").is_visible()
    assert page.locator(".passes tbody tr").all_inner_texts() == [
        "bucket-all-gathers{max-bytes=268435456}\t12\t3 dependency1 full\t12.0 ms",
        "hoist-launches\t0\t\t1.50 s",
    ]


def shares_of_memory(page: Any) -> dict[str, float]:
    """The share of each colour in the lower part of the drawing, where the memory is."""
    pixels(page)
    return page.evaluate("""() => {
        const canvas = document.getElementById("timeline"), found = {}, high = 92;
        const place = [96, canvas.height - high - 10, canvas.width - 112, high];
        const { data } = canvas.getContext("2d").getImageData(...place);
        for (let i = 0; i < data.length; i += 4) {
            const color = `${data[i]},${data[i + 1]},${data[i + 2]}`;
            found[color] = (found[color] ?? 0) + 4 / data.length;
        }
        return found;
    }""")


def test_memory_is_drawn_by_owner_in_the_colours_of_its_table(show: Callable[..., Any]):
    report = make_page()
    first, *rest = (num_bytes for _, num_bytes in report.after.timeline.memory)
    changes = tuple(((1, now - before),) for before, now in pairwise((first, *rest)))
    owned = OwnedMemory(("parameters", "activations"), (first // 2, first - first // 2), changes)
    page = show(replace(report, owned=(owned, owned)))
    assert page.locator(".owners tbody tr").count() == 2
    swatches = page.locator(".owners i").evaluate_all(
        "all => all.map((each) => getComputedStyle(each).backgroundColor)"
    )
    shown = {color.removeprefix("rgb(").removesuffix(")").replace(" ", "") for color in swatches}
    assert len(shown) == 2
    stacked, plain = shares_of_memory(page), shares_of_memory(show(report))
    assert all(stacked[color] > 0.2 for color in shown)
    assert all(plain.get(color, 0) < 0.1 for color in shown)  # the line of the curve


def test_the_memory_decisions_are_a_table_with_the_most_bytes_first(show: Callable[..., Any]):
    assert show(make_page()).locator(".retained").count() == 0
    retained = (
        Retention("layers.*.up mm", "kept", 2, 224 << 20, 0.0, "kept"),
        Retention(HOSTILE, "gathered again", 1, 1 << 30, 3240.0, "made again"),
    )
    page = show(replace(make_page(), retained=retained), java_script_enabled=False)
    rows = [row.locator("th, td").all_text_contents() for row in page.locator(".retained tbody tr").all()]
    assert rows == [
        [HOSTILE, "gathered again", "1", "1.00 GiB", "3.24 ms", "made again"],
        ["layers.*.up mm", "kept", "2", "224 MiB", "0 us", "kept"],
    ]
    assert page.locator("img").count() == 0


def test_hover_shows_what_is_known_of_a_collective(show: Callable[..., Any]):
    page = show(make_page())
    assert page.locator("#tip").is_hidden()
    before = pixels(page)
    hover_first_gather(page)
    assert page.locator("#tip strong").inner_text() == "all_gather_0"
    names, values = page.locator("#tip dt").all_inner_texts(), page.locator("#tip dd").all_inner_texts()
    facts = dict(zip(names, values, strict=True))
    assert facts == {
        "kind": "all_gather",
        "of": "layers.0.up",
        "phase": "forward",
        "source": "model.py:7 in forward: self.up(x)",
        "group": "fsdp, 64 ranks",
        "bytes": "218 MiB",
        "launched": "0.00 ms",
        "start": "0.00 ms",
        "end": "1.70 ms",
        "duration": "1.70 ms",
        "waited for": "0.00 ms",
        "hidden": "0",
        "exposed": "1.70 ms",
        "exposed-by-dependency": "schedule-overlap: the first layer needs it",
        "applied": "hoist-launches: it is launched one layer earlier",
    }
    assert pixels(page) != before
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()


def test_wheel_buttons_and_keys_change_the_range_and_fit_brings_it_back(show: Callable[..., Any]):
    page = show(make_page())
    label, canvas = page.locator("#range"), page.locator("#timeline")
    ranges = [label.inner_text()]

    def after(act: Callable[[], Any]) -> str:
        act()
        pixels(page)
        ranges.append(label.inner_text())
        return ranges[-1]

    canvas.hover(position={"x": 600, "y": 60})
    acts: list[Callable[[], Any]] = [
        lambda: page.mouse.wheel(0, -300),
        lambda: page.get_by_label("Zoom in").click(),
        lambda: canvas.press("+"),
        lambda: canvas.press("ArrowRight"),
    ]
    for act in acts:
        after(act)
    assert len(set(ranges)) == 5
    spans = [float(end.split()[0]) - float(start.split()[0]) for start, end in (r.split(" – ") for r in ranges)]
    assert spans[0] > spans[1] > spans[2] > spans[3] == pytest.approx(spans[4], rel=1e-3)
    assert after(lambda: page.get_by_role("button", name="Fit").click()) == ranges[0]


def test_dragging_moves_the_range_and_keeps_its_length(show: Callable[..., Any]):
    page = show(make_page())
    page.get_by_label("Zoom in").click()
    pixels(page)
    start, end = (float(text.split()[0]) for text in page.locator("#range").inner_text().split(" – "))
    box = page.locator("#timeline").bounding_box()
    page.mouse.move(box["x"] + 700, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 600, box["y"] + 60, steps=3)
    page.mouse.up()
    pixels(page)
    new_start, new_end = (float(text.split()[0]) for text in page.locator("#range").inner_text().split(" – "))
    assert new_start > start
    assert new_end - new_start == pytest.approx(end - start, rel=1e-2)


def test_the_filter_reduces_the_rows_and_dims_the_other_bars(show: Callable[..., Any]):
    page = show(make_page())
    before = pixels(page)
    page.locator("#filter").fill("reduce_scatter_1")
    names = page.locator("#rows .name").all_inner_texts()
    assert names == [f"reduce_scatter_{i}" for i in (1, *range(10, 20))]
    assert page.locator("#count").inner_text() == "11 of 128"
    assert pixels(page) != before
    page.locator("#filter").fill("dependency")
    assert page.locator("#rows tr").count() == 17
    page.locator("#filter").fill("")
    page.locator("#only").check()
    assert page.locator("#rows .name").all_inner_texts() == ["all_gather_0"]
    page.locator("#which").select_option("")
    assert page.locator("#rows tr").count() == 33


def test_columns_sort_both_ways_and_a_name_leads_to_its_bar(show: Callable[..., Any]):
    page = show(make_page())
    head = page.get_by_role("button", name="start")
    head.click()
    assert page.locator("#rows .name").first.inner_text() == "reduce_scatter_31"
    head.press("Enter")
    assert page.locator("#rows .name").first.inner_text() == "all_gather_0"
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    whole = page.locator("#range").inner_text()
    page.get_by_role("button", name="all_gather_7").press("Enter")
    pixels(page)
    assert page.locator("#range").inner_text() != whole
    assert page.locator("tr.selected .name").inner_text() == "all_gather_7"
    assert page.evaluate("document.getElementById('timeline').getBoundingClientRect().top") > -1


def test_rows_are_grouped_by_layer_in_the_order_of_their_numbers(show: Callable[..., Any]):
    page = show(make_page())
    page.get_by_role("button", name="layer", exact=True).click()
    layers = page.locator("#rows tr td:nth-child(3)").all_inner_texts()
    assert layers == [f"layers.{i}" for i in range(32) for _ in range(2)]
    headings = page.locator("#rows tr.group th")
    assert headings.count() == 32
    assert headings.first.inner_text().startswith("layers.0 · after 2, exposed ")
    page.locator("#filter").fill("layers.12")
    assert page.locator("#rows .name").all_inner_texts() == ["all_gather_12", "reduce_scatter_12"]
    page.locator("#filter").fill("")
    page.locator("#which").select_option("")
    assert re.match(r"layers\.0 · before 2, exposed .* · after 2, exposed ", headings.first.inner_text())


def test_of_an_exposed_row_the_cause_comes_first(show: Callable[..., Any]):
    row = show(make_page()).locator("#rows tr").first
    assert row.locator("td .muted").first.inner_text() == "all_gather of layers.0.up"
    assert row.locator(".why > div").inner_text() == "exposed-by-dependencyschedule-overlap: the first layer needs it"


def test_a_hostile_name_stays_text_everywhere(show: Callable[..., Any]):
    page = show(make_page(hostile=HOSTILE, title=HOSTILE))
    assert page.locator("h1").text_content() == HOSTILE
    assert page.locator("#rows .name").nth(1).text_content() == HOSTILE
    assert page.locator(".passes tbody th").nth(1).text_content() == HOSTILE
    page.locator("#timeline").hover(position={"x": 96 + 25, "y": LANE_OF_AFTER_GATHERS})
    assert page.locator("#tip strong").text_content() == HOSTILE
    page.locator("#filter").fill("<IMG SRC=X")
    assert page.locator("#rows tr").count() == 1
    assert page.locator("img, iframe, object").count() == 0
    assert page.locator("script").count() == 2


def test_a_script_that_got_in_would_not_run(browser: Any, tmp_path: Path):
    path = tmp_path / "report.html"
    injected = "<body><img src=x onerror='window.ran = 1'><script>window.ran = 2</script>"
    path.write_text(make_page().render().replace("<body>", injected))
    page = browser.new_page()
    page.goto(path.as_uri())
    assert page.locator("#rows tr").count() == 64
    assert page.evaluate("window.ran") is None
    page.close()


def test_ten_thousand_bars_stay_quick(show: Callable[..., Any]):
    report = make_page(layers=180, ops=26)
    runs = report.data()["runs"]
    assert sum(len(run["compute"]["name"]) + len(run["collectives"]) for run in runs) >= 10_000
    page = show(report)
    assert float(page.evaluate("document.documentElement.dataset.firstPaintMs")) < FIRST_PAINT_MS
    steps = page.evaluate(ZOOM_STEP)
    assert len(steps) == 8
    assert max(steps) < ZOOM_MS, steps
    assert page.locator("#rows tr").count() == 100
    page.get_by_role("button", name="Show more").click()
    assert page.locator("#rows tr").count() == 360
