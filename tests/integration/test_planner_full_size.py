"""Planned steps of the 8b preset, proved to compute the same, with all that the model promises.

Two layers of some parallelisms in `make test`, of each in `make test-all`, which also plans all 32.
"""

from __future__ import annotations

import time
from typing import Literal

import pytest
from torch.fx import GraphModule

import weft
from tests.tiers import quick_only
from weft.bounds.lower_bound import lower_bound
from weft.cost.cluster import Cluster
from weft.graph.groups import read_groups
from weft.passes.pipeline import Pipeline
from weft.scheduling.search import SPARE, SPARE_BYTES
from weft.simulation.build import program_of
from weft.simulation.simulator import simulate
from weft.simulation.timeline import Timeline
from weft.verification.symbolic.equivalence import prove

pytestmark = pytest.mark.timeout(900)

MESHES = {
    "ddp": {"dp": 64},
    "fsdp": {"dp": 64},
    "tp": {"tp": 8},
    "fsdp-tp": {"dp": 8, "tp": 8},
    "hsdp": {"replicate": 8, "shard": 8},
}
CLUSTER = Cluster.load("h100-8x8")


def timeline(module: GraphModule) -> Timeline:
    return simulate(program_of(module, read_groups(module), CLUSTER))


def check(parallel: str, layers: int, effort: Literal["fast", "default"], spare: float | None = None) -> None:
    """Plan a step with so much more memory than it uses, or with as much as is left to the planner."""
    module = weft.zoo.load("llama-8b", parallel=parallel, mesh=MESHES[parallel], layers=layers, part="joint")
    before = timeline(module)
    limit = None if spare is None else int(before.peak_bytes * (1 + spare))
    run = Pipeline.parse("schedule-overlap").run(module, cluster=CLUSTER, effort=effort, memory_limit_bytes=limit)
    start = time.perf_counter()
    proof = prove(module, run.module)
    seconds = time.perf_counter() - start
    after = timeline(run.module)
    steps = f"{before.step_ns / 1e6:.1f} to {after.step_ns / 1e6:.1f} ms"
    print(f"{parallel}, {layers} layers: {steps}, pass {run.log[0].seconds:.1f} s, proof {seconds:.1f} s")
    assert proof, str(proof)
    assert after.step_ns < before.step_ns
    assert after.peak_bytes <= (limit or before.peak_bytes + max(int(before.peak_bytes * SPARE), SPARE_BYTES))


@pytest.mark.parametrize("parallel", quick_only(MESHES, "ddp", "fsdp-tp"))
def test_a_planned_step_of_two_layers_is_proved(parallel: str):
    check(parallel, 2, "fast", spare=0.25)  # of two layers the weights that are gathered are a large part


def test_what_an_optimizer_makes_waits_until_the_gradients_are_gone():
    module = weft.zoo.load("llama-8b", parallel="ddp", mesh={"dp": 8}, layers=2, part="step")
    before = timeline(module)
    limit = int(before.peak_bytes * 1.05)
    run = Pipeline.parse("schedule-overlap").run(module, cluster=CLUSTER, effort="fast", memory_limit_bytes=limit)
    after = timeline(run.module)
    assert after.peak_bytes <= limit
    optimizer_ns = sum(span.alone_ns for span in before.compute if "foreach" in span.name)
    # All gradients are waited for at once where its roots come first.
    assert after.step_ns - optimizer_ns < (before.step_ns - optimizer_ns) * 0.85


@pytest.mark.long
@pytest.mark.parametrize("parallel", MESHES)
def test_a_planned_step_of_full_size_is_proved(parallel: str):
    check(parallel, 32, "default")


SIMPLE = (
    "hoist-launches,sink-waits",
    "bucket-all-reduces,hoist-launches,sink-waits",
    "bucket-all-reduces{strategy=coalesced},hoist-launches,sink-waits",
    "fuse-ddp-all-reduces{max-bytes=1048576/26214400},hoist-launches,sink-waits",
)


@pytest.mark.long
def test_gradients_of_a_step_with_its_optimizer_are_summed_in_few_large_all_reduces():
    """147 all-reduces on 256 ranks: each has its latency, and compute is slower while one of them is on the wire."""
    cluster = Cluster.load("h100-32x8")
    module = weft.zoo.load("llama-1b", parallel="ddp", ranks=256, part="step")
    planned = weft.optimize(module, cluster=cluster, verify="equivalence")
    step = simulate(program_of(planned.module, read_groups(module), cluster))
    assert len(step.collectives) < 40
    assert planned.plan.evidence is not None
    assert planned.plan.evidence.gap < 0.035
    for spec in SIMPLE:
        made = Pipeline.parse(spec).run(module, cluster=cluster).module
        assert step.step_ns < simulate(program_of(made, read_groups(made), cluster)).step_ns, spec


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "mesh", "cluster", "most"),
    [
        ("ddp", {"dp": 256}, "h100-32x8", 1.01),
        ("fsdp", {"dp": 256}, "h100-32x8", 1.15),
        ("fsdp", {"dp": 64}, "h100-8x8", 1.10),
        ("hsdp", {"replicate": 32, "shard": 8}, "h100-32x8", 1.08),
        ("fsdp-tp", {"dp": 8, "tp": 8}, "h100-8x8", 1.26),
    ],
)
def test_a_step_with_its_optimizer_is_near_the_bound(parallel: str, mesh: dict[str, int], cluster: str, most: float):
    """Reductions leave while backward runs, and the rest of them go together before the optimizer."""
    described = Cluster.load(cluster)
    module = weft.zoo.load("llama-1b", parallel=parallel, mesh=mesh, part="step")
    given = program_of(module, read_groups(module), described)
    planned = Pipeline.parse("auto").run(module, cluster=described).module
    step = simulate(program_of(planned, read_groups(planned), described))
    assert step.step_ns <= most * lower_bound(given).bound_ns
