"""What takes minutes at full size: the demo as README shows it, and what the planner's page shows of `weft explain`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.docs.pages import Block, all_blocks, differs
from weft.cli.main import app


def shown(page: str, words: str) -> Block:
    """The block of a page that begins with these words."""
    return next(b for b in all_blocks("output") if b.page == page and b.text.lstrip().startswith(words))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_prints_what_the_readme_shows(tmp_path: Path):
    done = CliRunner().invoke(app, ["demo", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    block = shown("README.md", "llama-8b, 32 layers")
    assert "one step on" in block.text
    assert not differs(f"...\n{block.text}...\n", done.stdout), done.stdout


@pytest.mark.slow
def test_a_small_demo_prints_the_same_rows(tmp_path: Path):
    done = CliRunner().invoke(app, ["demo", "--layers", "1", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = re.findall(r"^ +(\w[\w/ ]*?)  ", shown("README.md", "llama-8b, 32 layers").text, re.MULTILINE)
    assert "step" in rows
    assert "peak memory" in rows
    for row in rows:
        assert re.search(rf"^ +{row} ", done.stdout, re.MULTILINE), row
    assert (tmp_path / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "words"),
    [(["layers.0"], "all_gather_into_tensor: all-gather of"), ([], "reason                 collectives")],
    ids=["one layer", "the whole step"],
)
def test_explain_prints_what_the_planner_page_shows(names: list[str], words: str):
    source = "zoo:llama-8b/tp?layers=4&ranks=8"
    done = CliRunner().invoke(app, ["explain", source, *names, "--cluster", "h100-8"])
    assert done.exit_code == 0, done.output
    block = re.sub(r"\n {4,}", " ", shown("docs/planning.md", words).text)
    lines = [line for line in without_line_numbers(block).split("\n") if line.strip() not in ("", "...")]
    assert len(lines) > 3
    assert [line for line in lines if line.rstrip() not in without_line_numbers(done.output)] == []


def without_line_numbers(text: str) -> str:
    """The text without the lines of `llama.py`, which change with every edit of that file."""
    return re.sub(r"(?<=llama\.py):\d+", "", text)
