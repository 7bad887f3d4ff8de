"""A ring of transfers: every rank has nodes of its own, and all of them together compute what the collective does.

Data are small whole numbers, where every order of addition is exact: results must be the same bit by bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.fx import GraphModule

import weft
from tests.tiers import quick_only
from tests.unit.streaming.streams import Case, cases, gather, scatter
from weft.cost.cluster import Cluster
from weft.graph import ops
from weft.graph.collective import collectives
from weft.graph.dag import Dag
from weft.graph.groups import read_groups
from weft.passes.pipeline import Pipeline
from weft.plan.decision import Refusal
from weft.simulation.build import program_of
from weft.simulation.simulator import run as simulated
from weft.streaming.chunking import Chunking
from weft.streaming.gather_sites import read_gather
from weft.streaming.scatter_sites import read_scatter
from weft.streaming.trial_program import ChunkCosts, TrialProgram
from weft.verification.agreement.agreement import check
from weft.verification.comparison import example_inputs

GATHER, SCATTER = "fuse-all-gather-matmuls", "fuse-matmul-reduce-scatters"
CASES = [*cases(2, ("plain",)), *cases(3), *cases(4, ("bias", "fp8-rows")), *cases(8, ("plain",))]
LISTING = """group('tp', size={ranks})

def graph(a: bf16[{rows}, 8192], b: bf16[8192, 8192]):
{lines}    return [w]
"""
GATHERED = "    ag = all_gather(a, {ranks}, 'tp')\n    g = wait(ag)\n    w = mm(g, b)\n"
SCATTERED = "    y = mm(a, b)\n    rs = reduce_scatter(y, 'sum', {ranks}, 'tp')\n    w = wait(rs)\n"


def rings(before: GraphModule, name: str, num_ranks: int, options: str = "chunks=2") -> list[GraphModule]:
    """The graph of each rank; none if it is declined."""
    specs = [f"{name}{{{options} kernel=ring rank={rank}}}" for rank in range(num_ranks)]
    runs = [Pipeline.parse(spec).run(before) for spec in specs]
    return [run.module for run in runs if run.plan.steps[0].applied]


@pytest.mark.parametrize("case", quick_only(CASES, *CASES[::5]), ids=str)
def test_a_ring_computes_what_the_collective_does(case: Case):
    for name, listing in ((GATHER, gather(case)), (SCATTER, scatter(case))):
        before = weft.parse(listing)
        after = rings(before, name, case.num_ranks)
        assert len(after) == (0 if case.dim == len(case.shape) - 1 else case.num_ranks)  # parts that are no rows
        if after:
            inputs = example_inputs(before, case.num_ranks, integers=True)
            verdict = weft.verify(before, after, ranks=case.num_ranks, inputs=inputs)
            assert verdict.bitwise, f"{verdict}\n{weft.listing(after[0])}"
            assert check(after).holds


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min"])
def test_every_way_to_reduce(reduce_op: str):
    before = weft.parse(scatter(cases(3, ("plain",))[0]).replace("'sum'", f"'{reduce_op}'"))
    verdict = weft.verify(before, rings(before, SCATTER, 3), ranks=3)
    assert verdict.equal, str(verdict)


def test_on_a_mesh_peers_count_within_the_group():
    listing = gather(cases(2, ("plain",))[0]).replace("size=2)", "size=2, stride=2)")
    before = weft.parse(listing)
    after = rings(before, GATHER, 4)
    verdict = weft.verify(before, after, ranks=4, inputs=example_inputs(before, 4, integers=True))
    assert verdict.bitwise, str(verdict)


def decision(spec: str, listing: str) -> str:
    (made,) = Pipeline.parse(spec).run(weft.parse(listing), cluster="h100-1x8").plan.steps[0].decisions
    return f"{made.reason.value}: {made.sentence}"


def test_without_its_rank_it_is_declined():
    listing = gather(cases(2, ("plain",))[0])
    found = decision(GATHER + "{chunks=2 kernel=ring}", listing)
    assert found.startswith("other-ranks: ")


def test_a_torch_without_transfers_declines_it(monkeypatch: pytest.MonkeyPatch):
    known = {name: op for name, op in ops.op_names().items() if name != "batch_p2p"}
    monkeypatch.setattr(ops, "op_names", lambda: known)
    found = decision(GATHER + "{chunks=2 kernel=ring rank=0}", gather(cases(2, ("plain",))[0]))
    assert found == "no-kernel: ag cannot run as a ring: transfers in graphs need torch 2.12"


def large(lines: str, rows: int) -> str:
    return LISTING.format(ranks=8, rows=rows, lines=lines.format(ranks=8))


@pytest.mark.parametrize(("name", "lines", "rows"), [(GATHER, GATHERED, 2048), (SCATTER, SCATTERED, 16384)])
def test_whether_it_pays_is_decided_by_the_simulator(name: str, lines: str, rows: int):
    assert decision(name + "{kernel=ring rank=3}", large(lines, rows)).endswith("around a ring of 8 ranks")
    small = decision(name + "{kernel=ring rank=3}", large(lines, 16 if name == GATHER else 128))
    assert small.startswith("no-gain: ")
    assert small.endswith(" us in 8 chunks")


@pytest.mark.parametrize(("name", "lines", "rows"), [(GATHER, GATHERED, 2048), (SCATTER, SCATTERED, 16384)])
def test_a_trial_takes_as_long_as_the_graph_with_a_ring(name: str, lines: str, rows: int):
    module = weft.parse(large(lines, rows))
    cluster, groups, dag = Cluster.load("h100-1x8"), read_groups(module), Dag(module.graph)
    collective = next(collectives(module.graph))
    site = read_scatter(collective, dag) if name == SCATTER else read_gather(collective, dag)
    assert not isinstance(site, Refusal)
    cut = replace(site, ring_rank=3).cut(8)
    assert isinstance(cut, Chunking)
    trial = TrialProgram(program_of(dag, groups, cluster), dag, ChunkCosts(cluster, groups))
    trial.stream(cut)
    after = Pipeline.parse(name + "{chunks=2 kernel=ring rank=3}").run(module).module
    expected = simulated(program_of(after, groups, cluster)).step_ns
    assert simulated(trial.result()).step_ns == pytest.approx(expected, rel=0.02)
