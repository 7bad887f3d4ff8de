"""The baseline of a report: the captured step as its runtime executes it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.tiers import quick_first
from weft.cost.cluster import Cluster
from weft.passes.runtimes import run_as
from weft.report import simulated
from weft.report.baseline import Baseline, baseline_of

GRAPHS = Path(__file__).parents[2] / "graphs"


@pytest.mark.parametrize(("name", "runtime"), quick_first([("fsdp", "fsdp2"), ("ddp", "ddp"), ("fsdp-tp", "fsdp2")]))
def test_a_captured_step_is_compared_with_the_runtime_of_its_parallelism(name: str, runtime: str):
    module = weft.parse((GRAPHS / f"llama-debug-{name}.txt").read_text())
    cluster = Cluster.load("h100-8")
    found = baseline_of(module, cluster)
    assert found is not None
    run = weft.simulate(run_as(module, runtime).module, cluster)
    assert (found.runtime, found.step_us, found.peak_bytes) == (runtime, run.step_us, run.peak_bytes)
    assert found.step_us < weft.simulate(module, cluster).step_us
    assert f"{-50:+.1f} %" in found.sentence(found.step_us / 2)


def test_a_report_compares_with_the_baseline_once_it_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    module = weft.parse((GRAPHS / "llama-debug-fsdp.txt").read_text())
    calls: list[Any] = []

    def counted(*given: Any) -> Baseline | None:
        calls.append(given)
        return baseline_of(*given)

    monkeypatch.setattr(simulated, "baseline_of", counted)
    report = weft.optimize(module, "h100-8", pipeline="hoist-launches,sink-waits").report
    assert not calls
    assert isinstance(report, simulated.SimulatedReport)
    assert report.baseline is not None
    sentence = report.baseline.sentence(report.summary.after.step_us)
    report.save_html(tmp_path / "page.html")
    assert sentence in str(report)
    assert sentence in report.summary_lines()
    assert sentence in (tmp_path / "page.html").read_text()
    assert json.loads(report.to_json())["baseline"] == json.loads(json.dumps(asdict(report.baseline)))
    assert json.loads(report.to_json(simulate=False))["baseline"] is None
    assert len(calls) == 1


def test_the_page_says_that_a_graph_sends_more_bytes_between_nodes_than_it_needs(tmp_path: Path):
    module = weft.parse(WHOLE_GRADIENTS)
    report = weft.optimize(module, "h100-2x8", pipeline="none").report
    report.save_html(tmp_path / "page.html")
    [note] = [each for each in report.notes if "between nodes" in each]
    assert note in (tmp_path / "page.html").read_text()


WHOLE_GRADIENTS = """group('replicate', size=2, stride=8)
group('shard', size=8)

def graph(g: f32[4194304]):
    ar = all_reduce(g, 'sum', 'replicate')
    w = wait(ar)
    rs = reduce_scatter(w, 'sum', 8, 'shard')
    v = wait(rs)
    return [v]
"""


def test_no_baseline_where_the_runtime_is_the_captured_order_or_has_run_already():
    cluster = Cluster.load("h100-8")
    assert baseline_of(weft.parse((GRAPHS / "llama-debug-tp.txt").read_text()), cluster) is None
    module = weft.parse((GRAPHS / "llama-debug-ddp.txt").read_text())
    assert baseline_of(run_as(module, "ddp").module, cluster) is None
