"""The pictures of the docs: all that are shown exist, none is large, and the tool still makes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.runs import make_page
from tools.screenshots import PICTURES, photograph

DOCS = Path(__file__).parents[2] / "docs"
PNG = b"\x89PNG\r\n\x1a\n"


def test_every_picture_that_a_page_shows_exists_and_is_shown():
    shown = {
        name for page in DOCS.glob("*.md") for name in re.findall(r"!\[[^]]+\]\(images/([^)]+)\)", page.read_text())
    }
    files = {path.name: path for path in (DOCS / "images").iterdir()}
    assert shown == set(files) >= set(PICTURES)
    for path in files.values():
        assert path.read_bytes().startswith(PNG if path.name in PICTURES else b"<svg")
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
