"""The baseline of a report: the captured step as its runtime executes it."""

from __future__ import annotations

from pathlib import Path

import pytest

import weft
from tests.tiers import quick_first
from weft.cost.cluster import Cluster
from weft.passes.runtimes import run_as
from weft.report.baseline import baseline_of

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
    assert f"{-50:+.1f} %" in found.lines(found.step_us / 2)[0]


def test_no_baseline_where_the_runtime_is_the_captured_order_or_has_run_already():
    cluster = Cluster.load("h100-8")
    assert baseline_of(weft.parse((GRAPHS / "llama-debug-tp.txt").read_text()), cluster) is None
    module = weft.parse((GRAPHS / "llama-debug-ddp.txt").read_text())
    assert baseline_of(run_as(module, "ddp").module, cluster) is None
