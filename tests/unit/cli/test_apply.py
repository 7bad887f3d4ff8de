"""`weft apply`: saved plans and folders of plans on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.unit.cli.conftest import LISTING

Command = Callable[..., Result]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_saved_plan_gives_the_same_graph(weft: Command, listing: Path, tmp_path: Path, kind: str):
    plan = tmp_path / "plans"
    if kind == "folder":
        plan.mkdir()
    optimized = weft("optimize", listing, "--cluster", "h100-8", "--plan", plan)
    applied = weft("apply", listing, plan, "--verify", "equivalence")
    assert (optimized.exit_code, applied.exit_code) == (0, 0)
    assert applied.stdout == optimized.stdout != LISTING
    told = json.loads(weft("apply", listing, plan, "--json").stdout)
    assert told["listing"] == applied.stdout
    assert told["report"]["before"]["digest"] != told["report"]["after"]["digest"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_plan_for_another_graph_is_refused_with_the_first_node_that_differs(
    weft: Command, listing: Path, tmp_path: Path, kind: str
):
    plan = tmp_path / "plans"
    if kind == "folder":
        plan.mkdir()
    weft("optimize", listing, "--plan", plan)
    listing.write_text(LISTING.replace("relu(", "neg("))
    done = weft("apply", listing, plan)
    assert done.exit_code == 1
    assert "neg(" in done.stderr
    assert "relu(" in done.stderr


def test_the_output_does_not_overwrite_the_plan(weft: Command, listing: Path, tmp_path: Path):
    plan = tmp_path / "plan.json"
    weft("optimize", listing, "--plan", plan)
    done = weft("apply", listing, plan, "-o", plan)
    assert done.exit_code == 2
    assert "it is an input" in done.stderr
