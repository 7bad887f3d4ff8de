"""Random graphs through communication algebra, batching, quantised weights, placement, loops and writes in place.

What is checked of each is in `checks.py`. `make test` runs 50 graphs for each pass; `make test-full` (WEFT_FUZZ=full)
runs 2 000.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from itertools import islice, pairwise
from random import Random

import pytest
from torch.fx import GraphModule

from tests.property.checks import check_sound, check_types
from tests.property.strategies.constants import random_constants
from tests.property.strategies.listings import (
    ALGEBRA_STEPS,
    AXES_STEPS,
    BATCH_STEPS,
    MESHES,
    MUTATION_STEPS,
    ONE_RANK_MESHES,
    SCAN_STEPS,
    SCATTER_STEPS,
    WRAPPED_STEPS,
    random_listing,
)
from tests.property.strategies.products import random_quantised
from weft.errors import WeftError
from weft.graph.dag import Dag
from weft.graph.edit import Edit
from weft.graph.listings.text import parse
from weft.passes.base import parse_pass
from weft.passes.pipeline import Pipeline

NUM_SEEDS = 2000 if os.environ.get("WEFT_FUZZ") == "full" else 50
CHUNK = 25
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_SEEDS, CHUNK)]


def of_steps(
    rng: Random, steps: tuple[tuple[str, int], ...], meshes: tuple[dict[str, tuple[int, int]], ...] = MESHES
) -> str:
    dtypes = rng.choice([("f32",), ("f64",), ("f32", "bf16")])
    return random_listing(rng, rng.randint(12, 40), steps, dtypes, meshes)


algebra = functools.partial(of_steps, steps=ALGEBRA_STEPS)
batches = functools.partial(of_steps, steps=BATCH_STEPS)
mutations = functools.partial(of_steps, steps=MUTATION_STEPS)
CASES: dict[str, Callable[[Random], str]] = {
    "remove-single-rank-collectives": functools.partial(algebra, meshes=ONE_RANK_MESHES),
    "fuse-scattered-gathers": algebra,
    "sink-all-reduces": functools.partial(of_steps, steps=SCATTER_STEPS),
    "decompose-all-reduces{always=true}": algebra,
    "decompose-mesh-all-reduces{always=true}": functools.partial(of_steps, steps=AXES_STEPS),
    "fuse-sliced-all-reduces": algebra,
    "sink-gathers": algebra,
    "batch-linears{min-size=2 always=true}": batches,
    "fuse-linears{always=true}": batches,
    "batch-pointwise-ops{min-size=2 max-size=3 always=true}": batches,
    "sink-views": batches,
    "split-scatters{min-rows=8}": batches,
    "fuse-int8-matmuls": random_quantised,
    "fuse-int4-linears{always=true}": random_quantised,
    "move-producers": mutations,
    "move-constructors": random_constants,
    "decompose-functionalized-ops": functools.partial(of_steps, steps=WRAPPED_STEPS),
    "decompose-scans": functools.partial(of_steps, steps=SCAN_STEPS),
    "reuse-buffers": mutations,
    "reuse-buffers{pointwise=true}": mutations,
}
"""Passes, and the programs in which they find something."""
NEEDS_MORE = {"fuse-sliced-all-reduces"}
"""Passes that find nothing without being told what a random graph does not say."""
SETTLES = {"sink-gathers", "fuse-linears", "batch-linears", "batch-pointwise-ops"}
"""Passes that may find more in what they made, in 1 of 100 graphs, as they say themselves: a gather behind one that
sank, calls that a copy of what was written brought together. Their third run changes nothing; that of others, the
second."""
seeds_of = pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")


def seeded(spec: str, seed: int) -> GraphModule:
    return parse(CASES[spec](Random(seed)))


def check_one(spec: str, seed: int) -> None:
    check_sound(seeded(spec, seed), spec, seed, max_runs=2 if parse_pass(spec).name() in SETTLES else 1)


@seeds_of
@pytest.mark.parametrize("spec", CASES)
def test_a_pass_keeps_values_and_acts_once(spec: str, seeds: range) -> None:
    for seed in seeds:
        check_one(spec, seed)


@pytest.mark.parametrize("spec", [spec for spec in CASES if spec not in NEEDS_MORE])
def test_every_pass_finds_something_in_these_graphs(spec: str) -> None:
    changed = (seed for seed in range(60) if Pipeline.parse(spec).run(seeded(spec, seed)).log[0].changed)
    assert len(list(islice(changed, 5))) == 5


@pytest.mark.parametrize("spec", CASES)
def test_types_are_those_of_a_full_recomputation(spec: str) -> None:
    for seed in range(20):
        check_types(Pipeline.parse(spec).run(seeded(spec, seed)).module, seed)


@pytest.mark.parametrize(
    ("spec", "seed"), [("sink-gathers", 232), ("sink-gathers", 244), ("fuse-linears{always=true}", 303)]
)
def test_what_a_second_run_finds_is_all(spec: str, seed: int) -> None:
    first = Pipeline.parse(spec).run(seeded(spec, seed)).module
    assert Pipeline.parse(spec).run(first).log[0].changed
    check_one(spec, seed)


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
