"""Pages that are made of code: the tutorial is as it would be made now, and nothing that has a name is left out."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.docs.pages import FOLDER, REPOSITORY
from tools import docs_api, docs_cli, docs_constants, docs_errors, docs_keywords, docs_passes, docs_tutorial
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


def test_every_reason_is_explained():
    rows = re.findall(r"^\| `([a-z-]+)` \| .+ \| (yes|no) \|$", (FOLDER / "debugging.md").read_text(), re.MULTILINE)
    assert dict(rows) == {reason.value: "yes" if reason.is_refusal else "no" for reason in Reason}


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
    assert "Wait for collectives as late as their first use allows." in page
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
    assert "| `blocking` | The node that stands in the way, where there is one. |" in page


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
    off = {tuple(row.values())[:3]: row["predicted_ms"] / row["step_ms"] - 1 for row in rows if row["predicted_ms"]}
    two, four = ([error for (_, ranks, _), error in off.items() if ranks == n] for n in ("2", "4"))
    told = "README, limits, cost-model and simulation.md say: up to 16 % short on two ranks, up to 42 % long on four"
    assert (round(min(two), 2), max(two) < 0.005, round(max(four), 2)) == (-0.16, True, 0.42), told
    assert min(four) > 0, told


def test_measured_steps_of_the_readme_are_those_of_the_docs(monkeypatch: pytest.MonkeyPatch):
    """Each number of README's table of measured steps is that of a variant, and Weft's is the shortest."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks" / "gpu"))
    rows = importlib.import_module("train_plot").rows_of((FOLDER / "gpu.md").read_text())
    measured = {(row["parallel"], row["variant"]): row["step_ms"] for row in rows}
    readme = (REPOSITORY / "README.md").read_text()
    shown = re.findall(r"^\| ([A-Zx ]+), \d ranks \| (.+) \| ([\d.]+) \|$", readme, re.MULTILINE)
    assert len(shown) == 4
    for name, cells, ratio in shown:
        parallel = name.lower().replace(" x ", "-")
        of = [measured.get((parallel, v)) for v in ("eager", "torch's own", "inductor", "inductor overlap", "weft")]
        told = [int(cell) if cell.strip().isdigit() else None for cell in cells.split("|")]
        assert told == [ms and round(ms) for ms in of], name
        assert of[4] == min(ms for (row, _), ms in measured.items() if row == parallel), name
        assert float(ratio) == round((of[4] or 0) / (of[2] or 1), 2), name


def test_the_sentence_on_compute_below_the_demo_follows_from_its_rows():
    """The demo itself is compared with README by `test_demo.py`; its machine has no gaps between kernels."""
    readme = (REPOSITORY / "README.md").read_text()
    rows = {
        name: re.findall(rf"^ +{name} +([\d.]+) ms +([\d.]+) ms", readme, re.MULTILINE)[0]
        for name in ("step", "exposed")
    }
    compute = [round(float(step) - float(exposed)) for step, exposed in zip(rows["step"], rows["exposed"], strict=True)]
    assert f"compute: {compute[0]} ms alone, {compute[1]} ms here" in readme


def test_figures_of_the_readme_are_those_of_the_docs():
    """Each row of README's table of steps is a row of the planner's page, with the same percents."""
    readme, planner = (REPOSITORY / "README.md").read_text(), (FOLDER / "planning.md").read_text()
    rows = re.findall(r"^\| ([A-Z][^|]*layers) \| \d+ % \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \|$", readme, re.M)
    assert len(rows) == 11
    ratios: list[float] = []
    for name, *percents in rows:
        row = next(line for line in planner.split("\n") if line.startswith(f"| {name} |"))
        assert re.findall(r"\(([\d.]+) %\)", row) == percents, name
        ratios.append(float(row.split("|")[-2]))
    assert f"| planning the steps above | {min(ratios)} to {max(ratios)} |" in readme


def test_ratios_of_the_readme_are_those_of_the_docs():
    """Each figure of README's table of pass times stands in the section that its row links to."""
    readme = (REPOSITORY / "README.md").read_text()
    rows = re.findall(r"^\| .+ \| ([\d. to]+) \| \[.+\]\(docs/([\w-]+\.md)#how-fast\) \|$", readme, re.MULTILINE)
    assert len(rows) == 3
    for figures, page in rows:
        told = (FOLDER / page).read_text().partition("## How fast")[2]
        assert [figure for figure in figures.split(" to ") if not re.search(rf"\b{re.escape(figure)}\b", told)] == []
