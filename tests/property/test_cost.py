"""Prices of random graphs and random clusters."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import GraphModule

from tests.property.strategies.listings import random_listing
from weft.cost.cluster import Cluster
from weft.cost.compute import compute
from weft.cost.device import Device
from weft.cost.measured_table import Table
from weft.cost.prices import Prices, price
from weft.graph.dag import Dag
from weft.graph.groups import Group, read_groups
from weft.graph.listings.text import parse
from weft.graph.ops import Kind, is_wait

NUM_GRAPHS = 60
DEVICE = Device("any", (("bf16", 300.0), ("f32", 20.0), ("f64", 10.0)), 0.37, matmul_efficiency=0.6)
CLUSTERS = ["h100-8", "h100-8x8", "a100-32x8", "b200-8x8", "mi300x-8x8", "ethernet-h100-8x8", "pcie-h100-8"]
kinds = st.sampled_from(list(Kind))
shapes = st.sampled_from([(2, 1), (4, 1), (8, 1), (2, 4), (16, 1), (64, 1), (8, 8), (2, 32)])
sizes = st.integers(0, 1 << 36)


def fits(cluster: Cluster, shape: tuple[int, int]) -> Group | None:
    return Group("a", *shape) if cluster.num_ranks % (shape[0] * shape[1]) == 0 else None


@given(st.sampled_from(CLUSTERS), kinds, shapes, sizes, sizes)
def test_more_bytes_never_take_less_time(name: str, kind: Kind, shape: tuple[int, int], few: int, more: int):
    cluster = Cluster.load(name)
    group = fits(cluster, shape)
    if group is not None:
        assert cluster.collective_us(kind, group, few) <= cluster.collective_us(kind, group, few + more)


@given(st.sampled_from(CLUSTERS), kinds, shapes, sizes, st.integers(0, 1), st.floats(1, 100))
def test_more_bandwidth_never_makes_a_collective_slower(
    name: str, kind: Kind, shape: tuple[int, int], num_bytes: int, at: int, factor: float
):
    cluster = Cluster.load(name)
    group = fits(cluster, shape)
    if group is None:
        return
    levels = list(cluster.levels)
    level = levels[at % len(levels)]
    link = replace(level.link, bandwidth_gbps=level.link.bandwidth_gbps * factor)
    levels[at % len(levels)] = replace(level, link=link)
    faster = replace(cluster, levels=tuple(levels))
    assert faster.collective_us(kind, group, num_bytes) <= cluster.collective_us(kind, group, num_bytes)


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(0.1, 1e6)), min_size=1, max_size=8), sizes, sizes)
def test_a_table_that_grows_gives_times_that_grow(samples: list[tuple[int, float]], few: int, more: int):
    ordered = zip(sorted(size for size, _ in samples), sorted(us for _, us in samples), strict=True)
    table = Table.measured(Kind.ALL_REDUCE, 4, ordered)
    assert table.at(few).us <= table.at(few + more).us * (1 + 1e-9)
    assert table.at(few).extrapolated == (not table.points[0][0] <= few <= table.points[-1][0])


@pytest.fixture(scope="module")
def modules() -> list[GraphModule]:
    return [parse(random_listing(Random(seed), 40)) for seed in range(NUM_GRAPHS)]


def test_a_region_takes_no_more_than_its_nodes_alone_and_exactly_its_bytes(modules: list[GraphModule]):
    num_fused = 0
    for module in modules:
        dag = Dag(module.graph)
        fused, alone = compute(dag, DEVICE), compute(dag, replace(DEVICE, fuses=False))
        together: dict[int, int] = {}
        apart: dict[int, int] = {}
        for i, region in enumerate(fused.regions):
            together[region] = together.get(region, 0) + fused.ns[i]
            apart[region] = apart.get(region, 0) + alone.ns[i]
        assert all(together[region] <= apart[region] for region in together)
        assert fused.flops == alone.flops
        num_fused += sum(region != i for i, region in enumerate(fused.regions) if region >= 0)
    assert num_fused > NUM_GRAPHS


def test_a_region_is_convex(modules: list[GraphModule]):
    """No way leads out of a region and back into it: one kernel could run it."""
    for module in modules:
        dag = Dag(module.graph)
        regions = compute(dag, DEVICE).regions
        kernels = [region if region >= 0 else -i - 2 for i, region in enumerate(regions)]
        for start in {region for region in regions if region >= 0}:
            outside: set[int] = set()
            for i, preds in enumerate(dag.preds):
                if any(p in outside or kernels[p] == start for p in preds) and kernels[i] != start:
                    outside.add(i)
                back = [p for p in preds if p in outside and (regions[p] >= 0 or is_wait(dag.nodes[p].target))]
                assert kernels[i] != start or not back


def priced(module: GraphModule) -> Prices:
    return price(Dag(module.graph), read_groups(module), Cluster.load("h100-8"))


def test_prices_do_not_depend_on_names(modules: list[GraphModule]):
    for seed, module in enumerate(modules):
        renamed = parse(random_listing(Random(seed), 40))
        for i, node in enumerate(renamed.graph.nodes):
            node._rename(f"other_{(i * 7919) % 10007}")
        assert priced(renamed) == priced(module)


def test_every_launch_has_a_price_and_a_level(modules: list[GraphModule]):
    for module in modules:
        found = priced(module)
        assert found.collective_ns.keys() == found.level.keys() == found.sources.keys()
        assert all(ns > 0 for ns in found.collective_ns.values())
        assert all(found.compute_ns[i] == 0 for i in found.collective_ns)
