"""Logs written while programs compile: what is read from them is what the compiler had in hand, line for line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from weft.frontends.trace_log import read_log

PROGRAM = Path(__file__).with_name("trace_programs.py")
GROUPS = {"3": 2}
"""What launches of `all_reduce` do not say."""


def compiled(folder: Path, names: str, backend: str) -> tuple[dict[str, list[str]], Path]:
    """The listings of a run by the kind of event, and the folder of its logs."""
    (folder / "log").mkdir()
    (folder / "listings").mkdir()
    environment = os.environ | {
        "TORCH_TRACE": str(folder / "log"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }
    command = [sys.executable, str(PROGRAM), names, backend, str(folder / "listings")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = {}
    for file in sorted((folder / "listings").iterdir()):
        found.setdefault(file.stem[4:], []).append(canonical(file.read_text()))
    return found, folder / "log"


def canonical(listing: str) -> str:
    """The listing as it reads where no process group is there to ask: groups by number, constants without values."""
    for number, name in enumerate(re.findall(r"^group\('(\w+)'", listing, re.MULTILINE)):
        listing = listing.replace(f"'{name}'", f"'g{number}'")
    listing = re.sub(r"^(group\(.*), stride=\d+", r"\1", listing, flags=re.MULTILINE)
    return re.sub(r"^(tensor\([^\[]*\[[^\]]*\]).*$", r"\1)", listing, flags=re.MULTILINE)


def assert_read_back(expected: dict[str, list[str]], log: Path) -> None:
    graphs = read_log(log)
    for kind, listings in expected.items():
        read = [weft.listing(graph.load(groups=GROUPS)) for graph in graphs if graph.kind == kind]
        # A backward graph is logged with its forward and compiled later, so the order differs.
        assert sorted(read) == sorted(listings)


@pytest.mark.slow
def test_forward_backward_joint_and_inference_graphs_read_as_they_were(tmp_path: Path):
    expected, log = compiled(tmp_path, "train,train_dynamic,branches,numbers,kinds", "eager")
    assert {kind: len(listings) for kind, listings in expected.items()} == {
        "aot_joint_graph": 4,
        "aot_forward_graph": 4,
        "aot_backward_graph": 4,
        "aot_inference_graph": 3,
    }
    assert_read_back(expected, log)


@pytest.mark.slow
def test_graphs_of_a_mixture_of_experts_read_as_they_were_and_are_planned(tmp_path: Path):
    expected, log = compiled(tmp_path, "experts", "eager")
    graphs = {graph.kind: graph.load() for graph in read_log(log) if graph.kind in expected}
    assert list(graphs) == ["aot_joint_graph", "aot_forward_graph", "aot_backward_graph"]
    for kind, module in graphs.items():
        text = weft.listing(module)
        assert text.count("all_to_all(") == {"aot_joint_graph": 5, "aot_forward_graph": 3}.get(kind, 2)
        assert weft.listing(weft.parse(text)) == text
        if kind != "aot_backward_graph":  # a log does not say which saved values share memory
            assert canonical(text) == re.sub(", id='dp#1'", "", *expected[kind])
        report = weft.optimize(module, "h100-8x8", verify="equivalence").report
        assert "proved equal" in report.witnesses[1]


NEEDS_CPP = [pytest.mark.needs_cpp, pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")]
LONG = pytest.mark.skipif(os.environ.get("WEFT_FUZZ") != "full", reason="compiles C++ for minutes: WEFT_FUZZ=full")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "num_graphs"),
    [("linear,linear_dynamic", 4), pytest.param("train,train_dynamic,kinds", 9, marks=[*NEEDS_CPP, LONG])],
)
def test_post_grad_graphs_and_runnables_of_inductor_read_as_they_were(names: str, num_graphs: int, tmp_path: Path):
    expected, log = compiled(tmp_path, names, "inductor")
    assert {kind: len(listings) for kind, listings in expected.items()} == {"inductor_post_grad_graph": num_graphs}
    assert_read_back(expected, log)
    graphs = read_log(log)
    runnables = [graph.load(groups=GROUPS) for graph in graphs if graph.kind == "fx_graph_runnable"]
    printed = [graph.load(groups=GROUPS) for graph in graphs if graph.kind == "before_post_grad_graph"]
    assert list(map(weft.listing, runnables)) == list(map(weft.listing, printed))
