"""Chunks as plain nodes: every dim of shards of two and three dims, every kind of product, 2 to 8 virtual ranks.

Data are small whole numbers, where every order of addition is exact: results must be the same bit by bit.
"""

from __future__ import annotations

import pytest

import weft
from tests.tiers import quick_only
from tests.unit.streaming.streams import Case, Form, cases, gather, quick_cases, reduce, scatter
from weft.graph import ops
from weft.passes.pipeline import Pipeline
from weft.verification.comparison import example_inputs
from weft.verification.symbolic.equivalence import prove

RANKS = (2, 3, 4, 8)


def check(listing: str, spec: str, num_ranks: int) -> int:
    """Raise unless the pass keeps every value, bit by bit and for all data; how many sites it streamed."""
    before = weft.parse(listing)
    run = Pipeline.parse(spec).run(before)
    inputs = example_inputs(before, num_ranks, integers=True)
    verdict = weft.verify(before, run.module, ranks=num_ranks, inputs=inputs)
    assert verdict.bitwise, f"{verdict}\n{run.before}\n{run.after}"
    proof = prove(before, run.module, reassociates=True)
    assert proof, f"{proof}\n{run.before}\n{run.after}"
    return len(run.plan.steps[0].applied)


CASES = [case for n in RANKS for case in cases(n)]
ALONG_ROWS = [case for case in CASES if case.dim == 0]


@pytest.mark.parametrize("case", quick_only(CASES, *quick_cases(CASES)), ids=str)
def test_a_gather_and_its_product_in_chunks_compute_the_same(case: Case):
    assert check(gather(case), "fuse-all-gather-matmuls{chunks=2}", case.num_ranks) == 1


@pytest.mark.parametrize("case", quick_only(CASES, *quick_cases(CASES)), ids=str)
def test_a_product_and_its_scatter_in_chunks_compute_the_same(case: Case):
    assert check(scatter(case), "fuse-matmul-reduce-scatters{chunks=2}", case.num_ranks) == 1


@pytest.mark.parametrize("case", quick_only(ALONG_ROWS, *quick_cases(ALONG_ROWS)), ids=str)
def test_a_product_that_is_summed_over_ranks_in_chunks_computes_the_same(case: Case):
    assert check(reduce(case), "fuse-matmul-reduce-scatters{chunks=2}", case.num_ranks) == 1


@pytest.mark.parametrize(("form", "num_streamed"), [("fp8", 1), ("fp8-rows", 0)])
def test_scales_of_rows_stay_aligned(form: Form, num_streamed: int):
    case = Case(2, (4, 16), 1, form, used=False)
    assert check(gather(case), "fuse-all-gather-matmuls{chunks=2}", 2) == num_streamed


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("case", cases(4, ("plain",)), ids=str)
def test_both_in_more_chunks(case: Case, chunks: int):
    first = check(gather(case), f"fuse-all-gather-matmuls{{chunks={chunks}}}", 4)
    second = check(scatter(case), f"fuse-matmul-reduce-scatters{{chunks={chunks}}}", 4)
    single_rows = chunks == 4 and str(case).startswith("4 ranks, 2 dims, dim 1")  # these are declined
    assert (first, second) == ((0, 0) if single_rows else (1, 1))


@pytest.mark.parametrize("site", ["gather", "scatter"])
def test_every_new_node_carries_the_annotations_of_what_it_was_cut_from(site: str):
    module = weft.parse((gather if site == "gather" else scatter)(cases(2, ("bias",))[0]))
    spec = "fuse-all-gather-matmuls{chunks=2}" if site == "gather" else "fuse-matmul-reduce-scatters{chunks=2}"
    for node in module.graph.nodes:
        node.meta |= {"custom": {"from": node.name}} if node.op == "call_function" else {}
    made = Pipeline.parse(spec).run(module).module
    calls = [n for n in made.graph.nodes if n.op == "call_function"]
    assert len(calls) > len([n for n in module.graph.nodes if n.op == "call_function"])
    assert [n.name for n in calls if "from" not in n.meta.get("custom", {})] == []
    waits = [n for n in calls if ops.is_wait(n.target)]
    assert {n.meta["custom"]["from"] for n in waits} == {"w"}
