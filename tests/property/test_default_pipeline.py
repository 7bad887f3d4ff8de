"""Random graphs through whole presets: `auto` as the graph asks for it, `exact`, and every other by name.

Three sorts of programs: of all sorts of operators, with much to rewrite around few collectives, and with many
collectives. What is checked of each is in `checks.py`; `exact` is also proved to be so, bit by bit, wherever the proof
follows all operators. `make test` runs 60 graphs for `auto` and `exact`; `make test-full` (WEFT_FUZZ=full) 3 000.
"""

from __future__ import annotations

import os
from random import Random

import pytest
from torch.fx import GraphModule

from tests.property.checks import check_sound, check_types, is_exact
from tests.property.strategies.listings import BUCKET_STEPS, REWRITE_STEPS, STEPS, random_listing
from weft.graph.groups import read_groups
from weft.graph.listings.text import parse, render
from weft.passes.pipeline import Pipeline
from weft.passes.presets import PRESETS
from weft.verification.symbolic.equivalence import prove

FULL = os.environ.get("WEFT_FUZZ") == "full"
NUM_SEEDS = 3000 if FULL else 60
CHUNK = 20
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_SEEDS, CHUNK)]
SORTS = (STEPS, REWRITE_STEPS, BUCKET_STEPS)
seeds_of = pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")


def seeded(seed: int) -> GraphModule:
    return parse(random_listing(Random(seed), 24, SORTS[seed % len(SORTS)]))


def spelled(spec: str, module: GraphModule) -> str:
    """A pipeline with the passes that the graph asks for written out."""
    return str(Pipeline.parse(spec).chosen(module.graph, read_groups(module)))


@seeds_of
@pytest.mark.parametrize("spec", ["auto", "exact"])
def test_a_whole_preset_keeps_values_as_its_numerics_demand(spec: str, seeds: range) -> None:
    for seed in seeds:
        before = seeded(seed)
        run = check_sound(before, spelled(spec, before), seed, max_runs=0)
        check_types(run.module, seed)


@pytest.mark.parametrize("spec", [name for name in PRESETS if name != "exact"])
def test_every_preset_keeps_values_of_graphs_that_it_was_not_made_for(spec: str) -> None:
    for seed in range(3000, 3300 if FULL else 3012):
        check_sound(seeded(seed), spelled(spec, seeded(seed)), seed, max_runs=0)


def test_presets_rewrite_merge_and_order_these_graphs() -> None:
    """What keeps values since it does nothing would prove nothing."""
    changed = {
        step.spec.partition("{")[0]
        for seed in range(40)
        for step in Pipeline.parse("fsdp").run(seeded(seed), effort="fast").plan.steps
        if step.actions
    }
    assert changed >= {"remove-noops", "cancel-views", "simplify-arithmetic", "remove-dead-code", "schedule-overlap"}
    assert changed >= {"cancel-splits-and-cats", "dedupe-collectives"}


def test_exact_is_exact_and_mostly_proved() -> None:
    proved = 0
    for seed in range(30):
        before = seeded(seed)
        pipeline = Pipeline.parse("exact")
        assert is_exact(pipeline)
        after = pipeline.run(before, effort="fast").module
        proof = prove(before, after)
        proved += bool(proof)
        if not proof:
            print(f"seed {seed}: {proof}")
    assert proved >= 27


@pytest.mark.parametrize("seed", range(6))
def test_passes_before_and_behind_auto_keep_values(seed: int) -> None:
    before = seeded(seed)
    spec = spelled("fuse-addmms,auto,sink-waits", before)
    assert spec.startswith("fuse-addmms,remove-noops") or "schedule-overlap" not in spec
    check_sound(before, spec, seed, max_runs=0)
    assert render(seeded(seed)) == render(before)
