"""Random graphs through the planner: equal values, a proof, a plan that replays, and all that the model promises.

Clusters are so slow that operators on tiny tensors take as long as collectives. `make test` runs a few hundred graphs;
`make test-full` (WEFT_FUZZ=full) runs thousands.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from random import Random
from typing import Literal

import pytest
from torch.fx import GraphModule

import weft
from tests.property.strategies.listings import BUCKET_STEPS, STEPS, random_listing
from weft.cost.cluster import Cluster
from weft.cost.device import Device
from weft.cost.kernels import HostTimes
from weft.cost.levels import Level, Link
from weft.errors import RefusedError
from weft.graph.groups import read_groups
from weft.graph.listings.text import parse, render
from weft.passes.communication import schedule_overlap
from weft.passes.pipeline import Pipeline, Run, replay
from weft.scheduling.search import SPARE, SPARE_BYTES, Outcome
from weft.simulation.build import program_of
from weft.simulation.simulator import simulate
from weft.simulation.timeline import Timeline
from weft.verification.symbolic.equivalence import prove

FULL = os.environ.get("WEFT_FUZZ") == "full"
NUM_SEEDS = 5000 if FULL else 120
CHUNK = 10
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_SEEDS, CHUNK)]
NUM_RANKS = 4
MERGES = ("all", "gathers", "none")


@dataclass(frozen=True)
class Case:
    """A random graph, and how it is planned."""

    seed: int
    module: GraphModule
    cluster: Cluster
    pipeline: Pipeline
    effort: Literal["fast", "default", "best"]

    def __str__(self) -> str:
        device = self.cluster.device
        overlap = f"gap {device.launch_gap_us}, slowdown {device.overlap_slowdown}"
        levels = [(level.name, level.num_ranks, level.link) for level in self.cluster.levels]
        return f"seed {self.seed}, {self.pipeline}, {self.effort}, {levels}, {overlap}\n{render(self.module)}"


def random_cluster(rng: Random) -> Cluster:
    """Four ranks that compute a few flops in a microsecond, on one link for all groups or on two."""
    latency = rng.choice((0.5, 2.0, 10.0))
    outer = Link(latency, rng.choice((0.0, 0.3)), rng.choice((0.02, 0.1, 1.0)))
    inner = Link(latency / 2, 0.0, outer.bandwidth_gbps * rng.choice((1, 4)))
    levels = (Level("wire", 4, outer),) if rng.random() < 0.5 else (Level("node", 2, inner), Level("wire", 4, outer))
    device = Device(
        peak_tflops=tuple((dtype, 0.0002) for dtype in ("bf16", "f32", "f64")),
        memory_gbps=rng.choice((0.1, 0.5)),
        launch_gap_us=rng.choice((0.0, 0.0, 0.2)),
        overlap_slowdown=rng.choice((0.0, 0.0, 0.189, 1.0)),
        collective_slowdown=rng.choice((0.0, 0.0, 0.15, 1.0)),
        matmul_efficiency=1.0,
        host=HostTimes(operator_us=1.0, view_us=0.3, launch_us=0.8, collective_us=4.0),
        execution=rng.choice(("", "", "", "eager", "compiled")),
    )
    return Cluster("slow", 2, 2, levels, device) if len(levels) == 2 else Cluster("slow", 1, 4, levels, device)


def random_case(seed: int) -> Case:
    rng = Random(seed)
    dtypes = rng.choice([("f32",), ("f32", "bf16", "f64")])
    module = parse(random_listing(rng, rng.randint(10, 60), rng.choice((STEPS, BUCKET_STEPS)), dtypes))
    merge = rng.choice(MERGES)
    pipeline = Pipeline.parse("schedule-overlap" + ("" if merge == "all" else f"{{merge={merge}}}"))
    return Case(seed, module, random_cluster(rng), pipeline, "default" if rng.random() < 0.05 else "fast")


def timeline(module: GraphModule, cluster: Cluster) -> Timeline:
    return simulate(program_of(module, read_groups(module), cluster))


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """What the pass chose, one for each run."""
    found: list[Outcome] = []
    plan = schedule_overlap.Planner.best

    def spy(planner: schedule_overlap.Planner) -> schedule_overlap.Candidate:
        best = plan(planner)
        found.append(best.outcome)
        return best

    monkeypatch.setattr(schedule_overlap.Planner, "best", spy)
    return found


def check_values(case: Case, run: Run) -> None:
    verdict = weft.verify(case.module, run.module, ranks=NUM_RANKS, seed=case.seed)
    assert verdict.bitwise, f"{verdict}\n{case}\n{run.after}"
    proof = prove(case.module, run.module)
    assert proof, f"{proof}\n{case}\n{run.after}"


def check_text(case: Case, run: Run) -> None:
    after = render(run.module)
    assert render(parse(after)) == after, f"the listing does not round trip: {case}"
    replayed = replay(case.module, weft.Plan.from_json(run.plan.to_json()))
    assert render(replayed.module) == after, f"replays otherwise: {case}"


def check_promises(case: Case, run: Run, outcome: Outcome, limit: int | None = None) -> tuple[Timeline, Timeline]:
    """Never longer, as long as predicted, and within the memory."""
    before, after = timeline(case.module, case.cluster), timeline(run.module, case.cluster)
    told = f"{case}\n{run.after}"
    assert after.step_ns == outcome.step_ns, f"{outcome.step_ns} ns predicted, {after.step_ns} found: {told}"
    allowed = before.peak_bytes + max(int(before.peak_bytes * SPARE), SPARE_BYTES) if limit is None else limit
    assert after.peak_bytes <= allowed, f"{after.peak_bytes} bytes, {allowed} allowed: {told}"
    assert after.peak_bytes <= outcome.peak_bytes, f"{outcome.peak_bytes} bytes predicted, {after.peak_bytes}: {told}"
    if before.peak_bytes <= allowed:
        assert after.step_ns <= before.step_ns, f"{before.step_ns} ns before, {after.step_ns} after: {told}"
    return before, after


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
def test_a_planned_graph_computes_the_same_and_is_what_the_search_promised(seeds: range, outcomes: list[Outcome]):
    gained = 0
    for seed in seeds:
        case = random_case(seed)
        run = case.pipeline.run(case.module, cluster=case.cluster, effort=case.effort)
        check_values(case, run)
        check_text(case, run)
        before, after = check_promises(case, run, outcomes[-1])
        gained += after.step_ns < before.step_ns
        again = case.pipeline.run(run.module, cluster=case.cluster, effort=case.effort)
        twice = timeline(again.module, case.cluster)
        assert twice.step_ns <= after.step_ns, f"a second run makes it slower: {case}"
    assert gained > len(seeds) // 2


@pytest.mark.parametrize("seeds", CHUNKS[::2], ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
def test_a_limit_of_memory_is_kept_or_refused_with_one_that_can_be_kept(seeds: range, outcomes: list[Outcome]):
    for seed in seeds:
        case = random_case(seed)
        peak = timeline(case.module, case.cluster).peak_bytes
        limit = int(peak * Random(seed).choice((0.0, 0.8, 0.95, 1.0, 1.1)))
        run = planned(case, limit)
        if not isinstance(run, Run):
            assert limit < run <= peak, f"{limit} refused, {run} advised, {peak} before: {case}"
            limit = run
            run = planned(case, limit)
        assert isinstance(run, Run), f"refused with the limit that was advised: {case}"
        check_values(case, run)
        check_promises(case, run, outcomes[-1], limit)


def planned(case: Case, limit: int) -> Run | int:
    """The run under a limit of memory, or the least that would fit."""
    try:
        return case.pipeline.run(case.module, cluster=case.cluster, effort=case.effort, memory_limit_bytes=limit)
    except RefusedError as error:
        told = re.search(r"fits in (\d+) bytes; the smallest peak found is (\d+)\nallow (\d+) bytes$", str(error))
        if told is None or (int(told[1]), told[2]) != (limit, told[3]):
            raise
        return int(told[2])
