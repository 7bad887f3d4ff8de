"""The site builds without a warning, loads nothing from the network, and has a page for whatever there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY
from weft.passes.base import all_passes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]

LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"(https?:)?//[^\"]*\"")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_a_page_for_every_pass_and_command(site: Path):
    own = {name for name, cls in all_passes().items() if cls.__module__.startswith("weft.")}
    assert {path.stem for path in (site / "passes").glob("*.html")} == own | {"index"}
    names = ("cli", "api", "keywords", "constants", "errors", "tutorial", "contributing", "changelog", "index")
    assert [name for name in names if not (site / f"{name}.html").is_file()] == []


def test_nothing_is_loaded_from_the_network(site: Path):
    loaded = [
        f"{path.name}: {found[0]}" for path in site.rglob("*.html") for found in LOADED.finditer(path.read_text())
    ]
    assert loaded == []
    sheets = [path.name for path in site.rglob("*.css") if re.search(r"url\([\"']?(https?:)?//", path.read_text())]
    assert sheets == []


def test_names_of_pages_in_the_text_are_links(site: Path):
    assert 'href="simulation.html"><code>simulation.md</code>' in (site / "planning.html").read_text()
