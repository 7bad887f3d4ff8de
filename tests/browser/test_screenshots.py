"""The pictures of the docs: all that are shown exist, none is large, and the tool still makes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.runs import make_page
from tests.browser.test_advice_page import advice_with_lanes
from tests.browser.test_run_page import entry
from tools.screenshots import ADVICE_PICTURE, PICTURES, RUN_PICTURE, photograph, photograph_advice, photograph_run
from weft.advice.page import page_of
from weft.frontends.run_report import RunReport

DOCS = Path(__file__).parents[2] / "docs"
PNG = b"\x89PNG\r\n\x1a\n"


def test_every_picture_that_a_page_shows_exists_and_is_shown():
    shown = {
        name for page in DOCS.glob("*.md") for name in re.findall(r"!\[[^]]+\]\(images/([^)]+)\)", page.read_text())
    }
    files = {path.name: path for path in (DOCS / "images").iterdir()}
    made = {*PICTURES, ADVICE_PICTURE, RUN_PICTURE}
    assert shown == set(files) >= made
    for path in files.values():
        assert path.read_bytes().startswith(PNG if path.name in made else b"<svg")
        assert path.stat().st_size < 300_000


@pytest.mark.needs_browser
@pytest.mark.xdist_group("browser")
def test_the_tool_photographs_a_page(browser: Any, tmp_path: Path):
    make_page().save_html(tmp_path / "report.html")
    made = photograph(tmp_path / "report.html", browser, tmp_path)
    assert [name for name, _ in made] == list(PICTURES)
    pictures = [(tmp_path / name).read_bytes() for name, _ in made]
    assert all(picture.startswith(PNG) for picture in pictures)
    assert len(set(pictures)) == len(PICTURES)


@pytest.mark.needs_browser
@pytest.mark.xdist_group("browser")
def test_the_tool_photographs_an_advice(browser: Any, tmp_path: Path):
    (tmp_path / "advice.html").write_text(page_of(advice_with_lanes()))
    assert photograph_advice(tmp_path / "advice.html", browser, tmp_path) > 1000
    assert (tmp_path / ADVICE_PICTURE).read_bytes().startswith(PNG)


@pytest.mark.needs_browser
@pytest.mark.xdist_group("browser")
def test_the_tool_photographs_a_run(browser: Any, tmp_path: Path):
    RunReport((entry("forward", "0/0", "layers.0"),)).save_html(tmp_path / "run.html")
    assert photograph_run(tmp_path / "run.html", browser, tmp_path) > 1000
    assert (tmp_path / RUN_PICTURE).read_bytes().startswith(PNG)
