"""The page of a compiled run in a real Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.test_report_page import HOSTILE
from weft.frontends.run_report import GraphEntry, RunReport

pytestmark = [pytest.mark.needs_browser, pytest.mark.xdist_group("browser")]


def entry(role: str, compile_id: str, layer: str) -> GraphEntry:
    sizes = {"num_nodes": 40, "num_collectives": 6, "digest": role}
    report = {"before": sizes, "after": {**sizes, "num_collectives": 2}, "passes": [], "applied": [1], "declined": []}
    times = {"step_us": 2000.0, "exposed_us": 500.0, "lower_bound_us": 900.0, "peak_bytes": 1 << 30}
    figures = {
        "cluster": "h100-8",
        "before": times,
        "after": {**times, "step_us": 1000.0},
        "why": f"{role}: half of it waits for communication",
        "layers": [[layer, "forward", "2", "500 us", "its inputs are late"]],
    }
    return GraphEntry("x", "f", compile_id, role, report, role=role, figures=figures)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_a_run_shows_all_graphs_and_runs_nothing(
    open_page: Callable[..., Any], tmp_path: Path, scheme: str
):
    entries = (entry("forward", "0/0", "layers.0"), entry("backward", "0/0", HOSTILE), entry("forward", "0/1", "head"))
    after = {"step_us": 3000.0, "exposed_us": 700.0, "lower_bound_us": 1800.0, "peak_bytes": 1 << 31}
    whole = {"after": after, "why": f"{HOSTILE} is slow", "layers": [["norm", "backward", "1", "700 us", "late"]]}
    RunReport(entries, (HOSTILE,), whole).save_html(tmp_path / "run.html", title=HOSTILE)
    page = open_page(tmp_path / "run.html", color_scheme=scheme)
    assert page.locator("h1").text_content() == HOSTILE
    assert page.locator(".warning").text_content() == HOSTILE
    assert page.locator("header .sentence").text_content() == f"{HOSTILE} is slow"
    rows = page.locator(".graphs tbody tr")
    assert [row.split("\t")[0] for row in rows.all_inner_texts()] == [
        "forward 0/0",
        "backward 0/0",
        "forward 0/1",
        "whole step",
    ]
    assert "recompile 1" in rows.nth(2).inner_text()
    assert "2.00 ms -> 1.00 ms" in rows.first.inner_text()
    assert page.locator("h2").all_inner_texts() == [
        "Graphs",
        "whole step",
        "forward 0/0",
        "backward 0/0",
        "forward 0/1",
    ]
    assert page.locator(".layers tbody tr td:first-child").all_text_contents() == ["norm", "layers.0", HOSTILE, "head"]
    width = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert width == 0, "only tables scroll sideways"
