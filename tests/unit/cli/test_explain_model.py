"""`weft explain` of a whole model: names of layers and parameters, alike layers folded, all on one screen."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from weft.cli.main import app

SOURCE = "zoo:llama-debug/fsdp?layers=6&ranks=8"


def explain(*arguments: str, source: str = SOURCE) -> str:
    result = CliRunner().invoke(app, ["explain", source, *arguments, "--cluster", "h100-8"])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def text() -> str:
    return explain()


def test_a_whole_model_fits_a_screen(text: str):
    assert len(text.splitlines()) <= 60
    assert "layers.0-5, forward: 54 all-gathers over dp (8 ranks)" in text
    assert "layers.0-5, backward: 54 reduce-scatters over dp (8 ranks)" in text
    assert "attention.query" in text


@pytest.mark.slow
def test_thirty_two_layers_fit_a_screen():
    lines = explain(source="zoo:llama-8b/fsdp?ranks=8").splitlines()
    assert len(lines) <= 60
    assert any(line.startswith("layers.0-31, forward: 288 all-gathers over dp (8 ranks)") for line in lines)


def test_the_first_line_says_why_the_step_is_slow_and_the_table_follows(text: str):
    first, head, row, *_ = text.splitlines()
    assert first.startswith("Of the ")
    assert "exposed communication" in first
    assert head.split("  ")[0] == "exposed by layer"
    assert row.split("  ")[0] in first


def test_a_layer_is_told_collective_by_collective():
    found = explain("layers.3")
    assert ": all-gather of layers.3.feed_forward.up (" in found
    assert "layers.3.attention.query" in found
    heads = [line for line in found.splitlines() if not line.startswith(" ")]
    assert heads
    assert all(" of layers.3." in line for line in heads)


def test_of_an_exposed_collective_the_cause_comes_first():
    data = json.loads(explain("--json"))
    exposed = [each for each in data["collectives"] if any(d["exposed_us"] > 0 for d in each["outcomes"])]
    assert exposed
    assert all(each["outcomes"][0]["reason"].startswith("exposed-by-") for each in exposed)
    assert data["exposed"][0]["layers"]
    assert {origin["phase"] for each in data["collectives"] for origin in each["origins"]} == {"forward", "backward"}
    assert "llama.py" in data["collectives"][5]["origins"][0]["source"]
