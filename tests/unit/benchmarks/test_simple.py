"""The planner against simple pipelines: every step of the docs is compared, and the docs show what was found."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scenarios

RESULTS = sorted((scenarios.HERE / "results").glob("simple-*.json"))


@pytest.fixture
def simple(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(scenarios.HERE))
    return importlib.import_module("simple")


def test_the_docs_show_the_latest_figures(simple: Any, tmp_path: Path):
    copy = tmp_path / "planner-figures.md"
    copy.write_text(simple.PAGE.read_text())
    simple.fill(copy, simple.page(json.loads(RESULTS[-1].read_text())), simple.BEGIN, simple.END)
    assert copy.read_text() == simple.PAGE.read_text(), f"run: python benchmarks/simple.py --docs {RESULTS[-1]}"


def test_no_step_of_the_docs_is_longer_than_a_simple_pipeline(simple: Any):
    rows = json.loads(RESULTS[-1].read_text())
    assert {(row["part"], row["layers"], row["scenario"]) for row in rows} <= {*simple.STEPS}
    for row in rows:
        fitting = [found["step_ms"] for found in row["simple"].values() if found["fits"]]
        assert row["planned_ms"] <= row["best_ms"] == min(fitting), row["scenario"]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("hoist-launches,sink-waits", "none"),
        (
            "hoist-launches{max-in-flight-bytes=1073741824},sink-waits{max-in-flight-bytes=none}",
            "none (1 GiB in flight)",
        ),
        ("bucket-all-gathers{strategy=pack},hoist-launches,sink-waits", "all-gathers: pack"),
        ("fuse-ddp-all-reduces{max-bytes=1048576/26214400},hoist-launches,sink-waits", "DDP's"),
        ("bucket-all-gathers{strategy=coalesced modules=*.[0-9] prefetch=1},sink-waits", "FSDP2's"),
    ],
)
def test_buckets_are_told_in_words(simple: Any, spec: str, told: str):
    assert simple._buckets(spec) == told


def test_a_longer_step_is_counted(simple: Any):
    row = {"scenario": "tp-x8-nvlink", "layers": 8, "part": "step", "nodes": 9, "captured_ms": 3.0, "planned_ms": 2.5}
    row |= {"best": "hoist-launches,sink-waits", "best_ms": 2.0, "is_shorter": False}
    table = simple.page([row])
    assert "| TP + SP, 8 ranks | step, 8 | 9 | 3.00 | 2.00 | none | 2.50 (+25.00 %) |" in table
    assert "Weft's step is longer in 1 of these 0 joint steps and 1 parts." in table
    assert "Not compared: DDP, 8 ranks (joint, 16); DDP, 64 ranks (joint, 16)" in table
    assert "TP + SP, 8 ranks (step, 8)" not in table
