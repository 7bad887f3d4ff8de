"""Planned steps whose collectives take other times than the planner was told.

They are held against launching early and waiting late, which asks for no times.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from torch.fx import GraphModule

import weft
from tests.tiers import quick_only
from weft.cost.cluster import Cluster
from weft.graph.groups import read_groups
from weft.passes.pipeline import Pipeline
from weft.simulation.build import program_of
from weft.simulation.program import OpKind
from weft.simulation.simulator import run

pytestmark = pytest.mark.timeout(600)

MESHES = {"ddp": {"dp": 8}, "fsdp": {"dp": 64}, "tp": {"tp": 8}, "fsdp-tp": {"dp": 64, "tp": 8}}
CLUSTER = Cluster.load("h100-64x8")
LAYERS = 3


@cache
def steps(parallel: str) -> tuple[GraphModule, GraphModule]:
    """A step as it is planned, and with launches early and waits late."""
    module = weft.zoo.load("llama-8b", parallel=parallel, mesh=MESHES[parallel], layers=LAYERS, part="joint")
    planned = Pipeline.parse("schedule-overlap").run(module, cluster=CLUSTER).module
    return planned, Pipeline.parse("hoist-launches,sink-waits").run(module, cluster=CLUSTER).module


def step_ns(module: GraphModule, percent: int) -> int:
    """What a step takes if every collective takes so many hundredths of its time."""
    program = program_of(module, read_groups(module), CLUSTER)
    times = zip(program.duration_ns, program.kinds, strict=True)
    durations = tuple(ns * percent // 100 if kind is OpKind.LAUNCH else ns for ns, kind in times)
    return run(replace(program, duration_ns=durations)).step_ns


@pytest.mark.parametrize("percent", [70, 100, 130])
@pytest.mark.parametrize("parallel", quick_only(MESHES, "fsdp"))
def test_a_planned_step_is_no_longer_than_a_naive_one_if_collectives_take_other_times(parallel: str, percent: int):
    planned, naive = steps(parallel)
    # The planner keeps launches early, but nothing bounds what it loses to wrong prices: DDP at 130 % is 0.35 % longer.
    assert step_ns(planned, percent) <= step_ns(naive, percent) * (1.005 if percent > 100 else 1)
