"""Random graphs through communication algebra, batching, placement and writes in place.

Values are compared on every rank: bitwise where a pass is exact, else within the tolerance of the dtype. `make test`
runs 50 graphs for each pass; `make test-full` (WEFT_FUZZ=full) runs 2 000.
"""

from __future__ import annotations

import os
from itertools import pairwise
from random import Random

import pytest
from torch.fx import GraphModule

import weft
from tests.property.strategies import (
    ALGEBRA_STEPS,
    BATCH_STEPS,
    MESHES,
    MUTATION_STEPS,
    ONE_RANK_MESHES,
    random_listing,
)
from weft.errors import WeftError
from weft.graph import check, metadata
from weft.graph.dag import Dag
from weft.graph.edit import Edit
from weft.graph.groups import read_groups
from weft.graph.text import parse, render
from weft.passes.base import Numerics
from weft.passes.pipeline import Pipeline, Run, replay
from weft.verification.comparison import compare, example_inputs
from weft.verification.virtual_cluster import VirtualCluster

NUM_SEEDS = 2000 if os.environ.get("WEFT_FUZZ") == "full" else 50
CHUNK = 25
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_SEEDS, CHUNK)]
NUM_RANKS = 4
NUM_TERMS = 1 << 14
"""Of the sums through which a difference in rounding may have gone: products of products, and sigmoids of them."""
CASES = {
    "remove-single-rank-collectives": (ALGEBRA_STEPS, ONE_RANK_MESHES),
    "fuse-scattered-gathers": (ALGEBRA_STEPS, MESHES),
    "decompose-all-reduces{always=true}": (ALGEBRA_STEPS, MESHES),
    "fuse-sliced-all-reduces": (ALGEBRA_STEPS, MESHES),
    "sink-gathers": (ALGEBRA_STEPS, MESHES),
    "batch-linears{min-size=2 always=true}": (BATCH_STEPS, MESHES),
    "fuse-linears{always=true}": (BATCH_STEPS, MESHES),
    "batch-pointwise-ops{min-size=2 max-size=3 always=true}": (BATCH_STEPS, MESHES),
    "sink-views": (BATCH_STEPS, MESHES),
    "split-scatters{min-rows=8}": (BATCH_STEPS, MESHES),
    "move-producers": (MUTATION_STEPS, MESHES),
    "reuse-buffers": (MUTATION_STEPS, MESHES),
    "reuse-buffers{pointwise=true}": (MUTATION_STEPS, MESHES),
}
"""Passes, and the programs in which they find something."""
NEEDS_MORE = {"fuse-sliced-all-reduces"}
"""Passes that find nothing without being told what a random graph does not say."""
SETTLES = {"sink-gathers", "fuse-linears", "batch-linears", "batch-pointwise-ops"}
"""Passes that may find more in what they made, in 1 of 100 graphs: a gather behind one that sank, calls that a batch
brought together. They settle after a few runs; all others after one."""
MAX_RUNS = 4
seeds_of = pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")


def seeded(spec: str, seed: int) -> GraphModule:
    steps, meshes = CASES[spec]
    rng = Random(seed)
    dtypes = rng.choice([("f32",), ("f64",), ("f32", "bf16")])
    return parse(random_listing(rng, rng.randint(12, 40), steps, dtypes, meshes))


def check_one(spec: str, seed: int) -> Run:
    before, pipeline = seeded(spec, seed), Pipeline.parse(spec)
    told = f"seed {seed}, {spec}\n{render(before)}"
    run = pipeline.run(before)
    check.validate(Dag(run.module.graph))
    after = render(run.module)
    inputs, groups = example_inputs(before, NUM_RANKS, seed=seed), read_groups(before)
    cluster = VirtualCluster(NUM_RANKS)
    verdict = compare(
        *(cluster.run(module, inputs, groups, seed=seed) for module in (before, run.module)), num_terms=NUM_TERMS
    )
    exact = pipeline.passes[0].numerics is Numerics.EXACT
    assert verdict.bitwise if exact else verdict.equal, f"{verdict}\n{told}\n{after}"
    assert render(parse(after)) == after, told
    settled = run.module
    for _ in range(MAX_RUNS if pipeline.passes[0].name() in SETTLES else 0):
        settled = pipeline.run(settled).module
    assert render(pipeline.run(settled).module) == render(settled), f"does not settle: {told}\n{after}"
    assert render(replay(before, weft.Plan.from_json(run.plan.to_json())).module) == after, f"replays otherwise: {told}"
    return run


@seeds_of
@pytest.mark.parametrize("spec", CASES)
def test_a_pass_keeps_values_and_acts_once(spec: str, seeds: range) -> None:
    for seed in seeds:
        check_one(spec, seed)


@pytest.mark.parametrize("spec", [spec for spec in CASES if spec not in NEEDS_MORE])
def test_every_pass_finds_something_in_these_graphs(spec: str) -> None:
    assert sum(Pipeline.parse(spec).run(seeded(spec, seed)).log[0].changed for seed in range(60)) >= 5


@pytest.mark.parametrize("spec", CASES)
def test_types_are_those_of_a_full_recomputation(spec: str) -> None:
    for seed in range(20):
        module = Pipeline.parse(spec).run(seeded(spec, seed)).module
        mode = metadata.mode_of(module.graph.nodes)
        for node in module.graph.nodes:
            if node.op == "call_function":
                assert metadata.same(node.meta["val"], metadata.of_node(node, mode)), f"seed {seed}: {node.name}"


def test_draws_keep_their_order_in_every_order_that_is_allowed() -> None:
    """Operators that draw from the generator form a chain, whatever they have to do with each other."""
    for seed in range(30):
        module = seeded("reuse-buffers", seed)
        dag = Dag(module.graph)
        draws = [i for i, profile in dag.effects.special if profile.random]
        dag = Dag(module.graph, register=[dag.nodes[i] for i in draws])
        assert all(dag.reaches(dag.nodes[a], dag.nodes[b]) for a, b in pairwise(draws)), f"seed {seed}"


def test_an_edit_that_swaps_two_draws_is_refused() -> None:
    module = parse("def graph(x: f32[4]):\n    a = rand_like(x)\n    b = rand_like(x)\n    return [a, b]\n")
    x, a, b, output = module.graph.nodes
    with pytest.raises(WeftError, match="b"), Edit(module.graph) as edit:
        edit.arrange([x, b, a, output])
