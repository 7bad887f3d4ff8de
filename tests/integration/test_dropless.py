"""A mixture of experts whose exchanges depend on data: the planned step computes what the captured one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import weft
from weft import zoo
from weft.cost.cluster import Cluster
from weft.graph.groups import read_groups
from weft.simulation.build import program_of
from weft.simulation.host_stalls import host_stalls
from weft.verification.comparison import example_inputs
from weft.verification.virtual.cluster import VirtualCluster

MESH = {"dp": 2, "ep": 2}
CLUSTER = "h100-8x8"


def load(parallel: str = "ep-fsdp", **options: Any) -> GraphModule:
    mesh = MESH if parallel == "ep-fsdp" else None
    return zoo.load("dropless-debug", parallel, mesh=mesh, **{"layers": 1, "batch": 2, **options})


def routed(module: GraphModule, routing: str) -> list[list[Any]]:
    """Inputs of four ranks that route tokens at random, or by a router that knows nothing to one rank."""
    given = example_inputs(module, 4)
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    for k in (k for k, name in enumerate(names) if "router" in name and routing == "one rank"):
        for rank in range(4):
            given[rank][k] = torch.zeros_like(given[rank][k])
    return given


def splits(module: GraphModule, inputs: list[list[Any]]) -> list[list[int]]:
    """The numbers that the host of each rank reads: rows for each rank, and rows from each rank."""
    body, _, _ = weft.listing(module).rpartition("    return ")
    names = [node.name for node in module.graph.nodes if "_local_scalar_dense" in node.name]
    shown = weft.parse(f"{body}    return [{', '.join(names)}]\n")
    results = VirtualCluster(4).run(shown, inputs, read_groups(shown))
    return [list(result.outputs) for result in results]


@pytest.mark.parametrize("routing", ["random", "one rank"])
@pytest.mark.parametrize("backend", ["virtual", pytest.param("gloo", marks=pytest.mark.slow)])
def test_the_planned_step_computes_the_same_however_tokens_are_routed(routing: str, backend: Any):
    module = load()
    planned = weft.optimize(module, CLUSTER, verify="equivalence").module
    assert weft.verify(module, planned, mesh=MESH, backend=backend, inputs=routed(module, routing)).bitwise


def test_a_router_that_knows_nothing_leaves_the_experts_of_a_rank_empty():
    module = load()
    assert splits(module, routed(module, "one rank")) == [[0, 128, 0, 0], [0, 128, 128, 128]] * 2
    even = splits(module, routed(module, "random"))
    assert all(0 < number < 128 for rank in even for number in rank)


def test_the_planner_shortens_a_step_whose_sizes_the_host_reads_and_the_preset_joins_the_reads():
    module = load(layers=2)
    planned = {
        spec: weft.optimize(module, CLUSTER, pipeline=spec, sizes="balanced").module
        for spec in ("schedule-overlap", "auto")
    }
    before, after = (
        weft.simulate(module, CLUSTER, sizes="balanced"),
        weft.simulate(planned["auto"], CLUSTER, sizes="balanced"),
    )
    assert after.step_us < 0.8 * before.step_us
    eager = Cluster.load(CLUSTER).running("eager")
    graphs = (module, planned["schedule-overlap"], planned["auto"])
    given, moved, joined = ([s.name for s in host_stalls(program_of(m, read_groups(m), eager))] for m in graphs)
    assert sorted(moved) == sorted(given)
    assert 0 < len(joined) < len(given)


@pytest.mark.slow
def test_a_step_with_latent_attention_is_planned_and_computes_the_same():
    module = zoo.load("deepseek-debug", "ep-fsdp", mesh=MESH, batch=2)
    planned = weft.optimize(module, CLUSTER, sizes="balanced", verify="equivalence").module
    before, after = weft.simulate(module, CLUSTER, sizes="balanced"), weft.simulate(planned, CLUSTER, sizes="balanced")
    assert after.step_us < before.step_us
    assert weft.verify(module, planned, mesh=MESH, inputs=routed(module, "random")).bitwise


@pytest.mark.slow
def test_a_step_that_is_bound_by_the_host_is_planned_with_the_times_of_the_host():
    """Merged launches save the host the time to issue them, which only a plan with host times sees."""
    module, plain = load(layers=2), Cluster.load("h100-2x2")
    for execution in ("eager", "compiled"):
        cluster = plain.running(execution)
        without, planned = (weft.optimize(module, given, sizes="balanced").module for given in (plain, cluster))
        captured, before, after = (weft.simulate(m, cluster).step_us for m in (module, without, planned))
        assert after < before < captured
