"""The benchmark of everything: what it measures, how it survives failures, and that the docs show what it measured."""

from __future__ import annotations

import argparse
import importlib
import json
import operator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import weft
from benchmarks import scenarios
from tests.unit.benchmarks.steps import STEP

ROOT = scenarios.HERE.parent
RESULTS = sorted((scenarios.HERE / "results").glob("bench-*.json"))


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmarks, whose files find each other by being in one folder."""
    monkeypatch.syspath_prepend(str(scenarios.HERE))
    return importlib.import_module


def result(step_ms: float, seconds: list[float], error: str = "", launches: int = 10) -> dict[str, Any]:
    gap = step_ms / 100 - 1
    return {"step_ms": step_ms, "gap": gap, "peak": 0.01, "launches": launches, "seconds": seconds, "error": error}


def row(layers: int, nodes: int, weft_s: float, **results: Any) -> dict[str, Any]:
    found = {
        "no pass": result(150, []),
        "naive 64 MB": result(120, [0.1]),
        "inductor overlap": result(110, [4.0, 2.0, 3.0]),
        "inductor overlap + pre-bucketing": result(112, [6.0], launches=5),
        "weft planner": result(99, [weft_s], launches=4),
        "weft auto": result(98, [weft_s]),
    }
    return {
        "scenario": "fsdp-x8-nvlink",
        "parallel": "fsdp",
        "mesh": {"dp": 8},
        "layers": layers,
        "timed": True,
        "nodes": nodes,
        "bound_ms": 100.0,
        "bound": "compute",
        "results": found | results,
    }


def test_a_row_shows_gaps_ratios_launches_peaks_and_seconds(beside: Any) -> None:
    table = beside("bench_table")
    (line,) = table.steps([row(16, 1000, 0.5)]).splitlines()[2:]
    assert line == (
        "| FSDP, 8 | 16 | 100.00 | 50.00 % | 20.00 % | 12.00 % | 10.00 % (overlap) | -1.00 % | -2.00 % "
        "| 0.900 | 10 → 10 / 4 | +1.0% / +1.0% | 6.00 / 0.50 / 0.50 | 12.0 |"
    )


def test_where_the_default_fails_its_best_variant_that_runs_is_timed_and_the_failure_is_told(beside: Any) -> None:
    table = beside("bench_table")
    crashed = row(16, 1000, 0.5)
    crashed["results"]["inductor overlap + pre-bucketing"] = result(0, [9.0], "RuntimeError: a cycle")
    assert "| fails | 10.00 % (overlap) |" in table.steps([crashed])
    assert table.inductor_seconds(crashed) == 3.0
    assert table.failed_variants([crashed]) == ["FSDP, 8, 16 layers, overlap + pre-bucketing: `RuntimeError: a cycle`"]
    assert "in 1 of 1 rows" in table.summary([crashed])


def test_a_step_that_somebody_else_leaves_shorter_is_named(beside: Any) -> None:
    table = beside("bench_table")
    lost = row(16, 1000, 0.5)
    assert table.losses([lost]) == "The naive order never beats Weft's planner either."
    lost["results"]["weft planner"] = result(115.5, [0.5])
    assert table.summary([lost]).endswith(
        "**Where Weft's step is longer**: FSDP, 8, 16 layers: 1.050 of Inductor's best."
    )
    lost["results"]["weft planner"] = result(126, [0.5])
    assert "; FSDP, 8, 16 layers: 1.050 of the naive order." in table.summary([lost])


def test_growth_is_fitted_to_the_layers_of_one_parallelism(beside: Any) -> None:
    table = beside("bench_table")
    (line,) = table.growth([row(16, 1000, 0.5), row(32, 2000, 1.0)]).splitlines()[2:]
    assert line == "| FSDP | 1000 to 2000 | 6.00 / 0.50 | 6.00 / 1.00 | N^0.00 | N^1.00 |"


def test_pictures_are_well_formed_and_have_a_bar_for_each_contestant(beside: Any) -> None:
    plot = beside("bench_plot")
    found = {"steps": {"a": row(16, 1000, 0.5), "b": row(32, 2000, 1.0)}}
    for text in (plot.steps(found), plot.seconds(found), plot.steps({}), plot.seconds({})):
        ElementTree.fromstring(text)
    assert plot.steps(found).count('<rect class="inductor"') == 1 + 2
    assert plot.seconds(found).count('<polyline class="line-weft"') == 1


@pytest.mark.long
def test_every_contestant_runs_on_a_step(beside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = beside("bench")
    monkeypatch.setattr(bench, "capture", lambda scenario, layers: weft.parse(STEP))
    monkeypatch.setattr(bench, "warm_up", lambda: None)
    found = bench.step("fsdp-x8-nvlink", 16, 3, 5.0)
    names = list(found["results"])
    assert names[0] == "no pass"
    assert {name.partition(" ")[0] for name in names[1:]} == {"naive", "weft", "inductor"}
    assert {bench.ON_ITS_OWN, *bench.OFTEN} <= {*names}
    assert all(len(found["results"][name]["seconds"]) == (3 if name in bench.OFTEN else 1) for name in names[1:])
    assert json.loads(json.dumps(found)) == found
    assert bench.ON_ITS_OWN not in bench.step("fsdp-x8-nvlink", 32, 1, 5.0)["results"]
    assert {*bench.step("fsdp-x8-nvlink", 64, 1, 5.0)["results"]} == {"no pass", *bench.OFTEN}


def test_each_parallelism_is_timed_with_16_and_32_layers_and_each_step_once_more_in_full(beside: Any) -> None:
    bench = beside("bench")
    steps = [task.arguments[:2] for task in bench.tasks_of(full=False) if task.section == "steps"]
    assert {scenarios.SCENARIOS[name].parallel for name, layers in steps if layers == 32} == {
        scenario.parallel for scenario in scenarios.SCENARIOS.values()
    }
    assert {name for name, layers in steps if layers == 16} == {*bench.TIMED, *bench.OTHERS}
    full = [task.arguments[:2] for task in bench.tasks_of(full=True) if task.section == "steps"]
    assert {*full} - {*steps} == {(name, layers) for name in bench.TIMED for layers in (64, 128)}


@pytest.mark.slow
def test_what_fails_is_named_and_the_rest_is_kept(beside: Any) -> None:
    bench = beside("bench")
    tasks = [bench.Task("a", "bad", operator.truediv, (1, 0)), bench.Task("b", "good", operator.add, (1, 2))]
    found = {task.name: (outcome, wrong) for task, outcome, wrong in bench.run(tasks, 1)}
    assert found == {"bad": (None, "ZeroDivisionError: division by zero"), "good": (3, "")}


def test_a_run_that_was_cut_short_goes_on(beside: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = beside("bench")
    path = tmp_path / "bench.json"
    calls: list[str] = []

    def run(tasks: Any, jobs: int) -> Any:
        for task in tasks:
            calls.append(task.name)
            if task.name == "moe-x8, 16 layers" and len(calls) == 2:
                raise KeyboardInterrupt
            yield task, row(16, 1000, 0.5), ""

    monkeypatch.setattr(bench, "run", run)
    words = argparse.Namespace(
        only="ddp-x64,moe-x8", full=False, jobs=1, json=path, plots=tmp_path, resume=False, note=""
    )
    with pytest.raises(KeyboardInterrupt):
        bench.measure(words)
    assert list(json.loads(path.read_text())["steps"]) == ["ddp-x64-ib, 16 layers"]
    words.resume = True
    assert bench.measure(words) == 0
    assert calls == ["ddp-x64-ib, 16 layers", "moe-x8, 16 layers", "moe-x8, 16 layers"]
    assert list(json.loads(path.read_text())["steps"]) == ["ddp-x64-ib, 16 layers", "moe-x8, 16 layers"]


def test_a_part_is_chosen_by_words(beside: Any) -> None:
    bench = beside("bench")
    chosen = bench.selected(bench.tasks_of(full=False), "rewrites,moe-x8")
    assert {task.section for task in chosen} == {"rewrites", "steps"}
    assert [task.name for task in chosen if task.section == "steps"] == ["moe-x8, 16 layers"]


def test_the_docs_show_the_latest_figures(beside: Any, tmp_path: Path) -> None:
    table, plot = beside("bench_table"), beside("bench_plot")
    found = json.loads(RESULTS[-1].read_text())
    page = ROOT / "docs" / "benchmarks.md"
    copy = tmp_path / "benchmarks.md"
    copy.write_text(page.read_text())
    table.fill(copy, table.page(found))
    assert copy.read_text() == page.read_text(), f"run: python benchmarks/bench.py --docs {RESULTS[-1]}"
    assert found["date"] in page.read_text()
    assert (ROOT / "docs" / "images" / "bench-steps.svg").read_text() == plot.steps(found)
    assert (ROOT / "docs" / "images" / "bench-seconds.svg").read_text() == plot.seconds(found)


def test_a_page_without_marks_is_refused(beside: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(SystemExit, match="has no <!-- bench: begin -->"):
        beside("bench_table").fill(page, "")


def test_the_whole_call_is_shown_with_its_evidence_beside_the_pass_of_inductor(beside: Any) -> None:
    table = beside("bench_table")
    timed = row(32, 2000, 0.5) | {
        "whole": {
            "schedule-overlap": {"call_s": 0.4, "evidence_s": 0.2},
            "auto": {"call_s": 1.0, "evidence_s": 0.5},
        }
    }
    (line,) = table.whole([row(16, 1000, 0.5), timed]).splitlines()[2:]
    assert line == "| FSDP, 8 | 32 | 2000 | 6.00 | 0.40 + 0.20 | 10.0 | 1.00 + 0.50 | 4.0 |"


def test_the_whole_call_is_timed_for_both_pipelines(beside: Any) -> None:
    found = beside("bench").whole_call(weft.parse(STEP), weft.Cluster.load("h100-8x8"))
    assert list(found) == ["schedule-overlap", "auto"]
    assert all(seconds > 0 for each in found.values() for seconds in each.values())
