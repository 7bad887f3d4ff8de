"""Random graphs through the passes that compress: valid, stable, replayable, and values of the right size on all ranks.

The limit on values is a sixteenth of the largest magnitude of a tensor: bf16 would not hide a wrong element.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
import torch

import weft
from tests.property.strategies.listings import random_listing
from weft.graph import check
from weft.graph.dag import Dag
from weft.graph.groups import read_groups
from weft.graph.listings.text import parse, render
from weft.passes.pipeline import Pipeline, replay
from weft.verification.comparison import compare, example_inputs
from weft.verification.virtual.cluster import VirtualCluster

NUM_SEEDS = 2000 if os.environ.get("WEFT_FUZZ") == "full" else 150
NUM_RANKS = 4
SPEC = "compress-all-gathers{always=true},compress-reduce-scatters{always=true}"


@pytest.mark.slow
def test_compressed_graphs_are_sound():
    pipeline = Pipeline.parse(SPEC)
    num_applied = Counter[str]()
    for seed in range(NUM_SEEDS):
        before = parse(random_listing(Random(seed)))
        run = pipeline.run(before)
        num_applied.update(decision.pass_name for entry in run.log for decision in entry.step.applied)
        if not any(entry.changed for entry in run.log):
            continue
        check.validate(Dag(run.module.graph))
        after = render(run.module)
        assert render(parse(after)) == after, f"seed {seed}"
        assert render(pipeline.run(run.module).module) == after, f"seed {seed} changes twice"
        replayed = replay(before, weft.Plan.from_json(run.plan.to_json()))
        assert render(replayed.module) == after, f"seed {seed} replays differently"
        inputs, groups = example_inputs(before, NUM_RANKS, seed=seed), read_groups(before)
        results = [VirtualCluster(NUM_RANKS).run(side, inputs, groups, seed=seed) for side in (before, run.module)]
        verdict = compare(*results, num_terms=16, compute_dtype=torch.bfloat16)
        assert verdict.equal, f"seed {seed}: {verdict}\n{render(before)}\n{after}"
    assert min(num_applied.values()) >= 20
    assert len(num_applied) == 2
