"""A seeded sample of random graphs, through every pass, on real gloo ranks.

`make test` runs 36 seeds (printed); `make test-full` (WEFT_FUZZ=full) runs 400.
"""

from __future__ import annotations

import os
from random import Random

import pytest

import weft
from tests.property.strategies import random_listing
from weft.graph.groups import read_groups
from weft.graph.text import parse, render
from weft.passes.base import all_passes
from weft.verification.comparison import compare, example_inputs
from weft.verification.real_ranks import RealRanks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

NUM_SEEDS = 400 if os.environ.get("WEFT_FUZZ") == "full" else 36
FIRST = 100_000
"""Seeds that the tests on the virtual cluster do not use."""
PIPELINES = [*(name for name in all_passes() if not name.startswith("test-")), "auto"]


@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUM_SEEDS))
def test_passes_keep_values_on_real_ranks(ranks: RealRanks, seed: int) -> None:
    before = parse(random_listing(Random(seed)))
    table = read_groups(before)
    num_ranks = 4 if any(g.size * g.stride > 2 for g in table) else (2, 4)[seed % 2]
    print(f"seed {seed}: {len(before.graph.nodes)} nodes on {num_ranks} ranks")
    inputs = example_inputs(before, num_ranks, seed=seed)
    expected = ranks.run(before, inputs, table, seed=seed)
    for pipeline in PIPELINES:
        after = weft.optimize(before, pipeline=pipeline).module
        found = ranks.run(after, inputs, table, seed=seed)
        verdict = compare(expected, found, num_terms=num_ranks, backend="gloo")
        assert verdict.bitwise, f"seed {seed}, {pipeline}: {verdict}\n{render(before)}\n{render(after)}"
