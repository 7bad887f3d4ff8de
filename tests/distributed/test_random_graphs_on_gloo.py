"""A seeded sample of random graphs, through every pass, on real gloo ranks.

`make test` runs 36 seeds (printed); `make test-full` (WEFT_FUZZ=full) runs 400.
"""

from __future__ import annotations

import os
from random import Random

import pytest
from torch.fx import GraphModule

import weft
from tests.property import test_planner
from tests.property.strategies.listings import random_listing
from tests.property.test_buckets import random_case
from weft.graph.groups import read_groups
from weft.graph.listings.text import parse, render
from weft.passes.base import Numerics, all_passes, parse_pass
from weft.passes.bucket_pass import BucketPass
from weft.passes.communication.schedule_overlap import ScheduleOverlap
from weft.verification.comparison import compare, example_inputs
from weft.verification.real_ranks.world import RealRanks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

NUM_SEEDS = 400 if os.environ.get("WEFT_FUZZ") == "full" else 36
FIRST = 100_000
"""Seeds that the tests on the virtual cluster do not use."""
PIPELINES = [
    *(
        name
        for name, cls in all_passes().items()
        if not name.startswith("test-") and not issubclass(cls, BucketPass | ScheduleOverlap)
    ),
    "auto",
]


def num_ranks_of(module: GraphModule, seed: int) -> int:
    return 4 if any(g.size * g.stride > 2 for g in read_groups(module)) else (2, 4)[seed % 2]


@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUM_SEEDS))
def test_passes_keep_values_on_real_ranks(ranks: RealRanks, seed: int) -> None:
    before = parse(random_listing(Random(seed)))
    table = read_groups(before)
    num_ranks = num_ranks_of(before, seed)
    print(f"seed {seed}: {len(before.graph.nodes)} nodes on {num_ranks} ranks")
    inputs = example_inputs(before, num_ranks, seed=seed)
    expected = ranks.run(before, inputs, table, seed=seed)
    seen = {render(before): expected}  # most passes leave most graphs as they were, and that one has run
    for pipeline in PIPELINES:
        done = weft.optimize(before, pipeline=pipeline, effort="fast")
        after = done.module
        text = render(after)
        if text not in seen:
            seen[text] = ranks.run(after, inputs, table, seed=seed)
        verdict = compare(expected, seen[text], num_terms=num_ranks, backend="gloo")
        exact = all(parse_pass(step.spec).numerics is Numerics.EXACT for step in done.plan.steps)
        assert verdict.bitwise if exact else verdict.equal, (
            f"seed {seed}, {pipeline}: {verdict}\n{render(before)}\n{text}"
        )
    assert len(seen) > 1, f"seed {seed}: no pass changes this graph"


@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUM_SEEDS))
def test_merged_collectives_keep_values_on_real_ranks(ranks: RealRanks, seed: int) -> None:
    """Bitwise where nothing but exact passes changed the graph or there are two ranks, whose sums have one order."""
    before, pipeline = random_case(seed)
    num_ranks = num_ranks_of(before, seed)
    print(f"seed {seed}: {len(before.graph.nodes)} nodes on {num_ranks} ranks, {pipeline}")
    inputs = example_inputs(before, num_ranks, seed=seed)
    run = pipeline.run(before)
    sides = [ranks.run(module, inputs, read_groups(before), seed=seed) for module in (before, run.module)]
    verdict = compare(*sides, num_terms=num_ranks, backend="gloo")
    changed = [p.numerics for p, entry in zip(pipeline.passes, run.log, strict=True) if entry.changed]
    exact = num_ranks == 2 or all(numerics is Numerics.EXACT for numerics in changed)
    assert verdict.bitwise if exact else verdict.equal, (
        f"seed {seed}: {verdict}\n{render(before)}\n{render(run.module)}"
    )


@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUM_SEEDS))
def test_planned_graphs_keep_values_on_real_ranks(ranks: RealRanks, seed: int) -> None:
    """Bitwise where no reductions merge or there are two ranks, whose sums have one order."""
    case = test_planner.random_case(seed)
    num_ranks = num_ranks_of(case.module, seed)
    print(f"seed {seed}: {len(case.module.graph.nodes)} nodes on {num_ranks} ranks, {case.pipeline}")
    inputs = example_inputs(case.module, num_ranks, seed=seed)
    run = case.pipeline.run(case.module, cluster=case.cluster, effort=case.effort)
    sides = [ranks.run(module, inputs, read_groups(case.module), seed=seed) for module in (case.module, run.module)]
    verdict = compare(*sides, num_terms=num_ranks, backend="gloo")
    exact = num_ranks == 2 or case.pipeline.passes[0].numerics is Numerics.EXACT
    assert verdict.bitwise if exact else verdict.equal, f"{verdict}\n{case}\n{run.after}"
