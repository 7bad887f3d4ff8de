"""Random graphs with much to rewrite, through every pass of rules and through all of them together.

What is checked of each is in `checks.py`; passes that are not exact are also bitwise so on small whole numbers, since
every order of sums is exact there. `make test` runs 40 graphs for each pass; `make test-full` (WEFT_FUZZ=full) 3 000.
"""

from __future__ import annotations

import os
from random import Random

import pytest
import torch
from torch.fx import GraphModule

import weft
from tests.property.checks import NUM_RANKS, check_sound, check_types, is_exact
from tests.property.strategies.listings import REWRITE_STEPS, random_listing
from weft.graph.listings.text import parse, render
from weft.passes.base import all_passes
from weft.passes.pipeline import Pipeline
from weft.passes.rewrite_pass import RewritePass
from weft.verification.symbolic.equivalence import prove

NUM_SEEDS = 3000 if os.environ.get("WEFT_FUZZ") == "full" else 40
CHUNK = 20
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_SEEDS, CHUNK)]
VARIANTS = {
    "decompose-addmms": "decompose-addmms{anywhere=true}",
    "decompose-matmuls": "decompose-matmuls{min-rows=1 max-terms=16 anywhere=true}",
    "pad-matmuls": "pad-matmuls{always=true}",
    "reuse-partial-reductions": "reuse-partial-reductions{min-numel=1}",
}
"""Options under which small graphs are rewritten."""
INT8 = "fuse-int8-matmuls"
"""Looks for weights that these programs have not; see `test_placement_and_mutation.py`."""
SPECS = [
    VARIANTS.get(name, name)
    for name, cls in all_passes().items()
    if issubclass(cls, RewritePass) and cls.__module__.startswith("weft.passes.rewrite.") and name != INT8
]
CLEANING = (
    "remove-assertions,remove-profiler-marks,remove-noops,remove-redundant-casts,cancel-views,simplify-arithmetic,"
    "cancel-splits-and-cats,fold-constant-cumsums,remove-dead-code"
)
ALGEBRA = "reuse-partial-reductions{min-numel=1},fuse-matmul-sums,fuse-addmms"
seeds_of = pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")


def seeded(seed: int) -> GraphModule:
    return parse(random_listing(Random(seed), 24, REWRITE_STEPS))


def check_one(seed: int, spec: str) -> None:
    check_sound(seeded(seed), spec, seed, max_runs=1 if "," not in spec else 0)


@seeds_of
@pytest.mark.parametrize("spec", SPECS)
def test_a_rewrite_keeps_values_and_is_made_once(spec: str, seeds: range) -> None:
    for seed in seeds:
        check_one(seed, spec)


@pytest.mark.parametrize("spec", SPECS)
def test_every_pass_finds_something_in_these_graphs(spec: str) -> None:
    assert any(Pipeline.parse(spec).run(seeded(seed)).log[0].changed for seed in range(60))


@seeds_of
@pytest.mark.parametrize("spec", [CLEANING, f"{CLEANING},{ALGEBRA}"], ids=["cleaning", "cleaning and algebra"])
def test_all_of_them_together_keep_values(spec: str, seeds: range) -> None:
    for seed in seeds:
        check_one(seed, spec)


@pytest.mark.parametrize("spec", SPECS)
def test_types_are_those_of_a_full_recomputation(spec: str) -> None:
    for seed in range(20):
        check_types(Pipeline.parse(spec).run(seeded(seed)).module, seed)


@pytest.mark.parametrize("spec", [*SPECS, CLEANING])
def test_the_proof_never_says_that_a_wrong_graph_is_right(spec: str) -> None:
    """What the proof proves of a rewritten graph it must not prove of one that computes something else."""
    proved = 0
    for seed in range(15):
        before = seeded(seed)
        pipeline = Pipeline.parse(spec)
        after = pipeline.run(before).module
        proved += bool(prove(before, after, reassociates=not is_exact(pipeline)))
        wrong = render(after).replace("mul(", "div(", 1)
        if wrong == render(after):
            continue
        changed = parse(wrong)
        verdict = weft.verify(before, changed, ranks=NUM_RANKS, seed=seed)
        if not verdict.equal:
            assert not prove(before, changed, reassociates=not is_exact(pipeline)), f"seed {seed}, {spec}"
    assert proved


def test_small_whole_numbers_are_bitwise_the_same_however_sums_are_ordered() -> None:
    pipeline = Pipeline.parse(ALGEBRA)
    listing = "def graph(x: f32[8, 4], w: f32[4, 6], y: f32[8, 4], v: f32[4, 6], b: f32[6]):\n"
    listing += "    m = mm(x, w)\n    n = mm(y, v)\n    s = add(m, n)\n    t = add(s, b)\n    return [t]\n"
    before = parse(listing)
    after = pipeline.run(before).module
    assert render(after) != render(before)
    rng = torch.Generator().manual_seed(0)
    shapes = [(8, 4), (4, 6), (8, 4), (4, 6), (6,)]
    inputs = [torch.randint(-3, 4, shape, generator=rng).float() for shape in shapes]
    assert weft.verify(before, after, ranks=1, inputs=[inputs]).bitwise
