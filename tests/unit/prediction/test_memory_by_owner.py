"""Memory by owner: the owners add up to the curve, and each storage has the owner that data flow gives it."""

from __future__ import annotations

import pytest
from torch.fx import GraphModule

import weft.zoo
from tests.tiers import quick_first
from weft.cost.cluster import Cluster
from weft.graph.dag import Dag
from weft.graph.groups import read_groups
from weft.graph.listings.text import parse
from weft.prediction.memory_by_owner import OwnedMemory, memory_by_owner
from weft.simulation.build import program_of
from weft.simulation.simulator import simulate
from weft.simulation.timeline import Timeline

CLUSTER = Cluster.load("h100-8")
STEP = """group('dp', size=2)

def graph(x: f32[64, 64], p: f32[32, 64], m: f32[32, 64]):
    ag: f32[64, 64] = all_gather(p, 2, 'dp')
    w: f32[64, 64] = wait(ag)
    y: f32[64, 64] = mm(x, w)
    t: f32[64, 64] = t(x)
    g: f32[64, 64] = mm(t, y)
    rs: f32[32, 64] = reduce_scatter(g, 'sum', 2, 'dp')
    r: f32[32, 64] = wait(rs)
    n: f32[32, 64] = add_(m, r)
    u: f32[32, 64] = mul(n, 0.5)
    q: f32[32, 64] = add_(p, u)
    return [q]
"""
SHARD, FULL = 32 * 64 * 4, 64 * 64 * 4


def owned(module: GraphModule) -> tuple[OwnedMemory, Timeline]:
    dag = Dag(module.graph)
    program = program_of(dag, read_groups(module), CLUSTER)
    return memory_by_owner(dag, program), simulate(program)


def peaks(found: OwnedMemory) -> dict[str, int]:
    """The most that each owner has at any time."""
    return dict(zip(found.owners, map(max, zip(*found.points(), strict=True)), strict=True))


def test_each_storage_has_its_owner():
    found, timeline = owned(parse(STEP))
    most = peaks(found)
    assert (most["parameters"], most["optimizer state"]) == (SHARD, SHARD)
    assert most["batch and constants"] == FULL
    assert most["gathered or cast weights"] == FULL
    assert most["activations"] == FULL
    assert most["optimizer temporaries"] == SHARD
    assert most["gradients"] > 0
    assert sum(found.at_peak.values()) == timeline.peak_bytes


def test_inputs_of_a_graph_that_writes_none_are_not_called_parameters():
    lines = [line for line in STEP.splitlines() if "add_" not in line and "mul" not in line]
    found, _ = owned(parse("\n".join(lines).replace("return [q]", "return [r]") + "\n"))
    assert found.given[found.owners.index("inputs and constants")] == FULL + 2 * SHARD
    assert not {"parameters", "optimizer state", "batch and constants"} & set(found.owners)


@pytest.mark.parametrize("parallel", quick_first(["fsdp", "ddp", "fsdp-tp"]))
def test_the_owners_add_up_to_the_curve_before_and_after_planning(parallel: str):
    module = weft.zoo.load("llama-debug", parallel, ranks=8, layers=1, part="step")
    for each in (module, weft.optimize(module, CLUSTER, effort="fast").module):
        found, timeline = owned(each)
        assert [sum(point) for point in found.points()] == [num_bytes for _, num_bytes in timeline.memory]
        assert sum(found.at_peak.values()) == timeline.peak_bytes


def test_a_graph_without_memory_has_no_owners():
    found, _ = owned(parse("def graph():\n    return []\n"))
    assert (found.owners, found.at_peak) == ((), {})
