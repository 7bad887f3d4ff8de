"""Collectives streamed through their products on real gloo ranks: every dim and kind of product, and a whole step."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

import weft
from tests.tiers import quick_first, quick_only
from tests.unit.streaming.streams import Case, cases, gather, quick_cases, reduce, scatter
from weft.graph.groups import read_groups
from weft.passes.pipeline import Pipeline
from weft.verification.comparison import Verdict, compare, example_inputs
from weft.verification.real_ranks.world import RealRanks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

CLUSTER = "h100-1x8"
"""Its nodes share memory, so operators can be fused; gloo runs them written out."""
GATHER, SCATTER = "fuse-all-gather-matmuls{chunks=2}", "fuse-matmul-reduce-scatters{chunks=2}"
CASES = [*cases(2), *cases(4)]
RING_CASES = [*cases(2, ("plain", "fp8-rows")), *cases(4, ("bmm",))]


def verdict(ranks: RealRanks, before: GraphModule, spec: str, num_ranks: int) -> Verdict:
    run = Pipeline.parse(spec).run(before, cluster=CLUSTER)
    assert all(entry.step.applied for entry in run.log)
    inputs = example_inputs(before, num_ranks, integers=True)
    table = read_groups(before)
    sides = [ranks.run(module, inputs, table) for module in (before, run.module)]
    return compare(*sides, num_terms=num_ranks, backend="gloo")


@pytest.mark.parametrize("case", quick_only(CASES, *quick_cases(CASES)), ids=str)
def test_chunks_compute_the_same(ranks: RealRanks, case: Case):
    listings = [(gather(case), GATHER), (scatter(case), SCATTER), *([(reduce(case), SCATTER)] if not case.dim else [])]
    for listing, spec in listings:
        found = verdict(ranks, weft.parse(listing), spec, case.num_ranks)
        assert found.bitwise, str(found)


@pytest.mark.parametrize("case", quick_only(RING_CASES, *RING_CASES[::4]), ids=str)
def test_rings_compute_the_same(ranks: RealRanks, case: Case):
    for listing, spec in ((gather(case), GATHER), (scatter(case), SCATTER)):
        before = weft.parse(listing)
        specs = [spec.replace("}", f" kernel=ring rank={rank}}}") for rank in range(case.num_ranks)]
        after = [Pipeline.parse(each).run(before).module for each in specs]
        inputs, table = example_inputs(before, case.num_ranks, integers=True), read_groups(before)
        sides = [ranks.run(side, inputs, tables) for side, tables in ((before, table), (after, [table] * len(after)))]
        found = compare(*sides, num_terms=case.num_ranks, backend="gloo")
        assert found.bitwise, str(found)


@pytest.mark.parametrize("kernel", ["portable", "symmetric-memory"])
@pytest.mark.parametrize("num_ranks", quick_first([2, 4]))
def test_forward_and_backward_of_a_tensor_parallel_decoder_compute_the_same(
    ranks: RealRanks, num_ranks: int, kernel: str
):
    # f64, because a fused sum of products adds in another order, and the decoder amplifies rounding.
    dtype = torch.float64 if kernel == "symmetric-memory" else torch.float32
    step = weft.zoo.load("llama-debug", parallel="tp", ranks=num_ranks, batch=2, compute_dtype=dtype)
    found = verdict(ranks, step, f"{GATHER},{SCATTER}".replace("}", f" kernel={kernel}}}"), num_ranks)
    assert found.equal, str(found)
