"""Without a memory limit, a step that does not fit the device is planned within the device's memory."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.fx import GraphModule

import weft
from weft.cost.cluster import Cluster
from weft.passes.pipeline import Pipeline
from weft.plan import cache
from weft.report.simulated import SimulatedReport

CLUSTER = Cluster.load("h100-1x8")
STEP = """
def graph(x: f32[1024, 1024], v: f32[1024, 1024], shard: f32[128, 1024]):
    a: f32[1024, 1024] = relu(x)
    b: f32[1024, 1024] = mm(a, v)
    c: f32[1024, 1024] = mm(b, v)
    d: f32[1024, 1024] = mm(c, b)
    e: f32[1024, 1024] = mm(d, a)
    ag: f32[1024, 1024] = all_gather(shard, 8, 'dp')
    w: f32[1024, 1024] = wait(ag)
    f: f32[1024, 1024] = mm(e, w)
    return [f]
"""
SHORT_BYTES = 2 << 20
"""Half of a matrix."""


@functools.cache
def module() -> GraphModule:
    return weft.parse(STEP)


def planned(memory_bytes: int | None, pipeline: str | Pipeline = "auto", **options: Any) -> SimulatedReport:
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=memory_bytes))
    report = weft.optimize(module(), cluster, pipeline=pipeline, groups={"dp": 8}, **options).report
    assert isinstance(report, SimulatedReport)
    return report


@functools.cache
def free() -> SimulatedReport:
    return planned(None, cache=False)


def missing(num_bytes: int) -> int:
    """The memory of a device that lacks so many bytes for the step planned without a limit."""
    return free().graphs[1].memory.least_bytes - num_bytes


def test_a_step_that_fits_only_with_a_limit_is_planned_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    report = planned(missing(SHORT_BYTES), cache=tmp_path)
    assert report.does_not_fit is None
    limit = report.device_limit_bytes
    assert limit is not None
    assert report.graphs[1].timeline.peak_bytes <= limit < free().graphs[1].timeline.peak_bytes
    assert {row.choice for row in report.memory} == {"recomputed"}
    assert report.device_limit in report.notes
    told = json.loads(report.to_json())["simulated"]
    assert (told["fits"], told["memory_limit_bytes"], told["device_limit_bytes"]) == (True, limit, limit)
    assert report.bare_plan.steps == planned(None, cache=False, memory_limit_bytes=limit).bare_plan.steps

    again = planned(missing(SHORT_BYTES), cache=tmp_path)
    assert again.from_cache
    assert (again.plan_digest, again.device_limit_bytes) == (report.plan_digest, limit)


def test_a_step_that_just_fits_is_planned_as_before():
    report = planned(missing(0), cache=False)
    assert report.plan_digest == free().plan_digest
    assert report.does_not_fit is None
    assert report.device_limit_bytes is None


def test_a_step_that_cannot_fit_keeps_its_plan_and_the_first_line_says_so(tmp_path: Path):
    report = planned(1 << 20, cache=False)
    assert report.plan_digest == free().plan_digest
    assert report.device_limit_bytes is None
    assert report.does_not_fit is not None
    assert str(report).splitlines()[0] == report.does_not_fit
    assert json.loads(report.to_json())["simulated"]["fits"] is False
    report.save_html(tmp_path / "report.html")
    assert f'<p class="warning">{report.does_not_fit}</p>' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "pipeline", ["clean,schedule-overlap", Pipeline.parse("auto").without(["decide-memory"])], ids=["named", "without"]
)
def test_a_pipeline_that_does_not_decide_about_memory_is_left_alone(pipeline: str | Pipeline):
    report = planned(missing(SHORT_BYTES), pipeline, cache=False)
    assert report.plan_digest == planned(None, pipeline, cache=False).plan_digest
    assert report.device_limit_bytes is None
    assert report.does_not_fit is not None


def test_a_limit_that_was_given_is_kept_as_it_is():
    limit = free().graphs[1].timeline.peak_bytes
    report = planned(missing(SHORT_BYTES), cache=False, memory_limit_bytes=limit)
    assert report.device_limit_bytes is None
    assert report.plan_digest == planned(None, cache=False, memory_limit_bytes=limit).plan_digest
