"""Random graphs with random sets of values made again, and random memory limits: values and limits are kept.

`make test` runs 120 graphs of each kind; `make test-full` (WEFT_FUZZ=full) runs 2 000.
"""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random

import pytest
from torch.fx import GraphModule

import weft
from tests.property.checks import NUM_RANKS
from tests.property.strategies.listings import REWRITE_STEPS, STEPS, random_listing
from weft.cost.cluster import assumed_cluster
from weft.cost.device import HostMemory
from weft.cost.execution import BACKWARD
from weft.errors import MemoryLimitError
from weft.graph import check
from weft.graph.dag import Dag
from weft.graph.edit import Edit, copy_module, recompile
from weft.graph.groups import read_groups
from weft.graph.host_copies import OFFLOAD
from weft.graph.listings.text import parse, render
from weft.graph.ops import value_of
from weft.passes.pipeline import Pipeline, replay
from weft.retention.offloading import is_dense_result
from weft.retention.rebuild import OverwrittenError, rebuild
from weft.retention.repeats import repeat
from weft.retention.sites import Sites
from weft.simulation.build import program_of
from weft.simulation.simulator import simulate
from weft.verification.comparison import compare, example_inputs
from weft.verification.symbolic.equivalence import prove
from weft.verification.virtual.cluster import VirtualCluster

NUM_SEEDS = 2000 if os.environ.get("WEFT_FUZZ") == "full" else 120
CHUNK = 10
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_SEEDS, CHUNK)]
seeds_of = pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")


def two_parts(seed: int) -> GraphModule:
    """A random graph whose nodes count as backward from a random place on."""
    rng = Random(seed)
    module = parse(random_listing(rng, 40, STEPS if seed % 2 else REWRITE_STEPS))
    nodes = list(module.graph.nodes)
    for node in nodes[rng.randrange(len(nodes) // 4, len(nodes)) :]:
        node.meta["partitioner_tag"] = BACKWARD
    return module


def sites_of(module: GraphModule) -> Sites:
    groups = read_groups(module)
    dag = Dag(module.graph)
    return Sites(dag, program_of(dag, groups, assumed_cluster(groups)), groups, {})


def with_random_sites_again(module: GraphModule, rng: Random, may_offload: bool = True) -> GraphModule | None:
    sites = sites_of(module)
    kept = {site for site in range(sites.cut) if rng.random() < rng.choice((0.2, 0.8))}
    share = rng.choice((0.0, 0.5)) if may_offload else 0.0
    while True:
        try:
            action = rebuild(sites, kept, offloaded_at_random(sites, kept, share, Random(rng.random())))
            break
        except OverwrittenError as error:
            kept.add(error.site)
    if action is None:
        return None
    made = copy_module(module)
    with Edit(made.graph, keep_issue_order=False) as edit:
        repeat(edit, {node.name: node for node in made.graph.nodes}, action)
    recompile(made)
    return made


def offloaded_at_random(sites: Sites, kept: set[int], share: float, rng: Random) -> dict[int, int]:
    """Some of the needed sites that are not kept, each with a place to wait for its copy."""
    free = [site for site in sites.needed if sites.is_free(site) and site not in kept and is_dense_result(sites, site)]
    return {site: rng.randint(sites.uses[site][0], sites.cut) for site in free if rng.random() < share}


def check_same(before: GraphModule, after: GraphModule, seed: int) -> None:
    told = f"seed {seed}\n{render(before)}\n{render(after)}"
    check.validate(Dag(after.graph))
    inputs, groups = example_inputs(before, NUM_RANKS, seed=seed), read_groups(before)
    cluster = VirtualCluster(NUM_RANKS)
    results = [cluster.run(module, inputs, groups, seed=seed) for module in (before, after)]
    assert compare(*results, num_terms=1).bitwise, told
    proof = prove(before, after)
    assert proof, f"{proof}\n{told}"


@seeds_of
def test_values_that_are_made_again_are_the_same(seeds: range) -> None:
    num_changed = 0
    for seed in seeds:
        before = two_parts(seed)
        after = with_random_sites_again(before, Random(seed))
        if after is not None:
            num_changed += 1
            check_same(before, after, seed)
    assert num_changed


def bytes_offloaded(module: GraphModule) -> int:
    """Bytes of all values that a graph copies to host memory."""
    return sum(value_of(node).nbytes for node in module.graph.nodes if node.target is OFFLOAD)


@seeds_of
def test_a_limit_is_kept_or_the_error_names_one_that_is(seeds: range) -> None:
    num_met = 0
    for seed in seeds:
        before = two_parts(seed)
        groups = read_groups(before)
        cluster = assumed_cluster(groups)
        rng = Random(f"host {seed}")
        memory = HostMemory(rng.choice((0.01, 1.0, 1e5)), 0.0, rng.choice((64, 256, 1 << 40)))
        cluster = replace(cluster, device=replace(cluster.device, host_memory=memory))
        peak = simulate(program_of(before, groups, cluster)).peak_bytes
        limit = int(peak * Random(seed).uniform(0.6, 1.1))
        offload = "true" if seed % 4 else "false"
        passes = Pipeline.parse(f"decide-memory{{offload={offload}}},schedule-overlap{{merge=none}}")
        try:
            run = passes.run(before, cluster=cluster, memory_limit_bytes=limit, effort="fast")
            num_met += 1
        except MemoryLimitError as error:
            limit = error.least_bytes
            run = passes.run(before, cluster=cluster, memory_limit_bytes=limit, effort="fast")
        assert simulate(program_of(run.module, groups, cluster)).peak_bytes <= limit, f"seed {seed}"
        assert bytes_offloaded(run.module) <= memory.limit_bytes, f"seed {seed}"
        check_same(before, run.module, seed)
        plan = weft.Plan.from_json(run.plan.to_json())
        assert render(replay(before, plan).module) == render(run.module), f"seed {seed}"
    assert num_met
