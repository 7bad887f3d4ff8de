"""`weft explain SOURCE COLLECTIVE`: one collective, its decisions, and its figures before and after."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Weft = Callable[..., Result]

TWO = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4], q: f32[2, 4]):
    a: f32[4, 4] = mm(x, x)
    ag0: f32[4, 4] = all_gather(p, 2, 'dp')
    w0: f32[4, 4] = wait(ag0)
    ag1: f32[4, 4] = all_gather(q, 2, 'dp')
    w1: f32[4, 4] = wait(ag1)
    b: f32[4, 4] = relu(a)
    r: f32[4, 4] = add(b, w0)
    s: f32[4, 4] = add(r, w1)
    return [s]
"""
FIGURES = {"name", "launched_us", "start_us", "end_us", "exposed_us", "hidden_us", "hidden_by", "is_critical"}


@pytest.fixture
def two(tmp_path: Path) -> Path:
    path = tmp_path / "two.txt"
    path.write_text(TWO)
    return path


@pytest.mark.parametrize("name", ["ag1", "w1"])
def test_one_collective_is_told_by_its_launch_or_its_wait(weft: Weft, two: Path, name: str):
    done = weft("explain", two, name, "--pipeline", "bucket-all-gathers,hoist-launches")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "ag1: all-gather of q (64 B) over dp (2 ranks)",
        "  + bucket-all-gathers: merged 2 all-gathers of group 'dp' into one of 128 B: ag0 [p] to ag1",
        "  + hoist-launches: moved ag0_bucket up to just after p",
    ]


def test_with_a_cluster_its_figures_follow_into_the_bucket(weft: Weft, two: Path):
    done = weft("explain", two, "ag1", "--cluster", "h100-8")
    assert (done.exit_code, done.stderr) == (0, "")
    table = done.stdout.partition("\n\n")[2].splitlines()
    assert table[0].split() == ["on", "h100-1x8", "before", "after"]
    assert table[1].split() == ["launch", "ag1", "ag0_bucket"]
    assert [line.split("  ")[0] for line in table[2:]] == [
        "launched",
        "start",
        "end",
        "exposed",
        "hidden",
        "hidden by",
        "critical path",
    ]
    assert table[-2].split(maxsplit=3)[2:] == ["nothing", "a, b"]


def test_as_json_it_is_data(weft: Weft, two: Path):
    found = json.loads(weft("explain", two, "w1", "--cluster", "h100-8", "--json").stdout)
    assert found["collective"]["name"] == "ag1"
    assert found["collective"]["outcomes"][0]["pass_name"] == "schedule-overlap"
    simulated = found["simulated"]
    assert simulated["cluster"] == "h100-1x8"
    (before,), (after,) = simulated["before"], simulated["after"]
    assert set(before) == set(after) == FIGURES
    assert (before["name"], after["name"]) == ("ag1", "ag0_bucket")
    assert before["launched_us"] <= before["start_us"] < before["end_us"]
    assert before["exposed_us"] > 0
    assert before["is_critical"] is True
    assert json.loads(weft("explain", two, "w1", "--json").stdout)["simulated"] is None


def test_a_collective_that_keeps_its_name_is_itself(weft: Weft, two: Path):
    passes = ("--pipeline", "hoist-launches", "--cluster", "h100-8")
    simulated = json.loads(weft("explain", two, "ag1", *passes, "--json").stdout)["simulated"]
    assert [each["name"] for each in simulated["after"]] == ["ag1"]


def test_a_collective_that_is_removed_is_gone(weft: Weft, tmp_path: Path):
    source = tmp_path / "dead.txt"
    source.write_text(TWO.replace("add(r, w1)", "add(r, r)"))
    arguments = ("explain", source, "ag1", "--pipeline", "remove-dead-code", "--cluster", "h100-8")
    done = weft(*arguments)
    assert done.exit_code == 0
    assert [line.split()[-1] for line in done.stdout.partition("\n\n")[2].splitlines()[:3]] == ["after", "gone", "-"]
    assert json.loads(weft(*arguments, "--json").stdout)["simulated"]["after"] == []


def test_a_duplicate_is_followed_to_the_one_that_stays(weft: Weft, tmp_path: Path):
    source = tmp_path / "twice.txt"
    source.write_text(TWO.replace("all_gather(q", "all_gather(p"))
    arguments = ("explain", source, "ag1", "--pipeline", "dedupe-collectives", "--cluster", "h100-8", "--json")
    simulated = json.loads(weft(*arguments).stdout)["simulated"]
    assert [each["name"] for each in simulated["after"]] == ["ag0"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ag9", "explain: no collective is called 'ag9'\ndid you mean 'ag1'?\n"),
        ("relu", "explain: no collective is called 'relu'\n`weft explain SOURCE` lists the collectives\n"),
        (
            "\x1b[2J<b>",
            "explain: no collective is called '\\x1b[2J<b>'\n`weft explain SOURCE` lists the collectives\n",
        ),
    ],
)
def test_an_unknown_name_ends_with_2_and_the_nearest_one(
    weft: Weft, two: Path, tmp_path: Path, name: str, message: str
):
    out = tmp_path / "out.txt"
    done = weft("explain", two, name, "-o", out)
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", message)
    assert not out.exists()


def test_a_hostile_group_stays_one_line_of_text(weft: Weft, tmp_path: Path):
    source = tmp_path / "hostile.txt"
    source.write_text(TWO.replace("'dp'", "'d\\x1b[2J\\n<b>p'"))
    done = weft("explain", source, "ag1", "--cluster", "h100-8")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == "ag1: all-gather of q (64 B) over d[2J<b>p (2 ranks)"
    assert all(line.isprintable() for line in done.stdout.splitlines())
