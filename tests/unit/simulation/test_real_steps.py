"""Steps of the zoo: the bound of a captured graph lies below whatever merging and moving make of it."""

from __future__ import annotations

import time

import pytest

import weft
from tests.tiers import quick_first
from weft.bounds.checker import check
from weft.bounds.lower_bound import lower_bound
from weft.cost.cluster import Cluster
from weft.graph.groups import read_groups
from weft.simulation.build import program_of
from weft.simulation.simulator import simulate

MERGED = "bucket-all-gathers,bucket-reduce-scatters,bucket-all-reduces,hoist-launches,sink-waits"


@pytest.mark.parametrize("cluster", quick_first(["ethernet-h100-8x8", "h100-8x8"]))
@pytest.mark.parametrize(
    ("parallel", "mesh"),
    quick_first([("fsdp-tp", {"dp": 8, "tp": 8}), ("ddp", {"dp": 64}), ("fsdp", {"dp": 64}), ("tp", {"tp": 8})], 2),
)
def test_the_bound_of_a_step_lies_below_what_merging_and_moving_reach(
    parallel: str, mesh: dict[str, int], cluster: str
):
    described = Cluster.load(cluster)
    before = weft.zoo.load("llama-8b", parallel, mesh=mesh, layers=1)
    program = program_of(before, read_groups(before), described)
    bound = lower_bound(program)
    assert check(program, bound.certificate) >= bound.bound_ns
    for pipeline in ("none", "exact", MERGED, f"bucket-all-gathers{{max-bytes=100000000000}},{MERGED}"):
        after = weft.optimize(before, pipeline=pipeline).module
        step_ns = simulate(program_of(after, read_groups(after), described)).step_ns
        assert bound.bound_ns <= step_ns, pipeline


@pytest.mark.slow
def test_a_step_of_8b_is_simulated_within_three_seconds():
    """Of processor time, without the capture."""
    step = weft.zoo.load("llama-8b", "fsdp", 64, part="step")
    start = time.process_time()
    timeline = weft.simulate(step, "h100-8x8")
    assert time.process_time() - start < 3
    assert timeline.step_us > 0
