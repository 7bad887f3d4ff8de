"""Pages that are made of code: the tutorial is as it would be made now, and nothing that has a name is left out."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.docs.pages import FOLDER, REPOSITORY
from tools import docs_api, docs_cli, docs_constants, docs_errors, docs_keywords, docs_passes, docs_tutorial
from weft.passes.communication import sink_waits
from weft.plan.decision import Reason

UPDATE = "python tools/docs_tutorial.py writes it; read the diff"


@pytest.mark.timeout(240)
def test_the_tutorial_prints_what_its_page_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
):
    monkeypatch.chdir(tmp_path)
    made = docs_tutorial.page(docs_tutorial.SOURCE.read_text())
    if request.config.getoption("update"):
        docs_tutorial.PAGE.write_text(made)
    assert docs_tutorial.PAGE.read_text() == made, UPDATE


def test_pieces_of_a_program_are_text_and_code():
    page = docs_tutorial.page(
        '"""doc"""\n\n# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nx = 1\nprint(x)\n\n# %%\ny = x\n'
    )
    assert page == "# Title\n\nText.\n\n```python\nx = 1\nprint(x)\n```\n\n```text\n1\n```\n\n```python\ny = x\n```\n"


PAGE_OF_REASONS = FOLDER / "debugging.md"


def test_every_reason_is_explained():
    row = re.compile(r"^\| `([a-z-]+)` \| .+ \| (yes|no) \| (yes|no) \|$", re.MULTILINE)
    told = {
        name: (refusal == "yes", error == "yes") for name, refusal, error in row.findall(PAGE_OF_REASONS.read_text())
    }
    assert told == {reason.value: (reason.is_refusal, reason.is_obstacle) for reason in Reason}


def test_every_keyword_is_spoken_of_on_a_page_that_is_written():
    pages = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
    index = docs_keywords.page(pages)
    silent = re.findall(r"^\| \[`([^`]+)`\]\([^)]*\) \|  \|$", index, re.MULTILINE)
    assert silent == []
    assert "[`weft.optimize`](api.md#weftoptimize)" in index
    assert "[`sink-waits`](passes/sink-waits.md)" in index


def test_every_constant_of_a_cluster_has_a_source():
    found = {
        f"{path.stem}: {constant.name}": constant.source
        for path in (docs_constants.COST / "clusters").glob("*.toml")
        for constant in docs_constants.of_cluster(path.read_text())
    }
    assert len(found) > 80
    assert [name for name, source in found.items() if not source] == []


def test_a_page_of_a_pass_holds_docstring_options_and_behaviours():
    page = docs_passes.pages()["passes/sink-waits.md"]
    assert str(sink_waits.__doc__).splitlines()[0] in page
    assert "| `max-in-flight-bytes` | `int or None` | `268435456` |" in page
    assert "### a wait sinks to its first use with the view of its result" in page


def test_the_page_of_commands_holds_every_option():
    page = docs_cli.page()
    assert "## weft optimize" in page
    assert "| `--json` | Print JSON instead of text. |  |" in page
    assert "| `--cluster NAME or FILE` |" in page


def test_the_page_of_python_holds_every_public_name():
    page = docs_api.page()
    assert "weft.listing(module: GraphModule)" in page
    assert "| `blocking` |" in page


def test_error_texts_are_found_with_what_to_do():
    page = docs_errors.page()
    assert ": no pass is called ... |" in page
    assert "allow ... bytes" in page
    assert len(page.split("\n")) > 150


def test_the_picture_of_steps_on_a_gpu_is_that_of_the_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks" / "gpu"))
    plot = importlib.import_module("train_plot")
    rows = plot.rows_of((FOLDER / "gpu.md").read_text())
    assert len(rows) > 5
    assert (FOLDER / "images" / "gpu.svg").read_text() == plot.draw(rows), "train.py --docs FILE writes both"
