"""NCCL's model of its collectives, by hand; what many network adapters do; that every preset answers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from weft.cost.cluster import Cluster
from weft.cost.cluster_file import presets
from weft.cost.communication import NVLS_TREE_SHARE
from weft.graph.groups import Group
from weft.graph.ops import Kind

NODE, NODES = Cluster.load("h100-8"), Cluster.load("h100-8x8")
ALL = Group("all", 64)
ACROSS = Group("dp", 8, 8)
"""One rank of each node."""


def _with_network(cluster: Cluster, gbps: float, *, rails: bool = True) -> Cluster:
    *inner, outer = cluster.levels
    link = replace(outer.link, bandwidth_gbps=gbps)
    return replace(cluster, levels=(*inner, replace(outer, link=link, rails=rails)))


@pytest.mark.parametrize(
    ("cluster", "kind", "group", "num_bytes", "microseconds"),
    [
        # Ring, LL: 6.6 + 7 hops of 0.6.
        (NODE, Kind.ALL_GATHER, Group("tp", 8), 0, 6.6 + 7 * 0.6),
        # Ring, LL128: 14.0 + 7 hops of 1.9, 120/128 of 345 GB/s, and 7/8 of the bytes.
        (NODE, Kind.ALL_GATHER, Group("tp", 8), 8_000_000, 14 + 7 * 1.9 + 7000 / (345 * 120 / 128)),
        # Ring, Simple: 8.4 + 7 hops of 3.4, all of the bandwidth; a pair of ranks reaches less of it.
        (NODE, Kind.REDUCE_SCATTER, Group("tp", 8), 8 * 10**9, 8.4 + 7 * 3.4 + 7 * 10**6 / 345),
        (NODE, Kind.REDUCE_SCATTER, Group("tp", 2), 8 * 10**9, 8.4 + 3.4 + 4 * 10**6 / 269),
        # Switches of the node: 31 us, and 467 GB/s as a ring would count them; four ranks use a ring.
        (NODE, Kind.ALL_REDUCE, Group("tp", 8), 8 * 10**9, 31 + 14 * 10**6 / 467),
        (NODE, Kind.ALL_REDUCE, Group("tp", 4), 8 * 10**9, 8.4 + 6 * 3.4 + 12 * 10**6 / 326),
        # Tree, LL: 6.8 + twice 7 hops of 0.6 within a node and 3 of 5.0 between eight.
        (NODES, Kind.ALL_REDUCE, ALL, 0, 6.8 + 2 * (7 * 0.6 + 3 * 5.0)),
        # Ring, Simple, between nodes: 56 hops of 3.4, 7 of 14.0; the eight adapters of a node outdo its NVLinks. Up to
        # 8 MiB for each rank it reaches 0.77 of the bandwidth, and 0.95 for every byte beyond.
        (NODES, Kind.ALL_GATHER, ALL, 63 * 2**23, 8.4 + 56 * 3.4 + 7 * 14 + 63**2 / 64 * 2**23 / 345e3 / 0.77),
        (
            NODES,
            Kind.ALL_GATHER,
            ALL,
            64 * 10**9,
            8.4 + 56 * 3.4 + 7 * 14 + 63 * 2**23 / 345e3 / 0.77 + 63 * (10**9 - 2**23) / 345e3 / 0.95,
        ),
        # One rank of each node has one adapter.
        (
            NODES,
            Kind.ALL_GATHER,
            ACROSS,
            8 * 10**9,
            8.4 + 7 * 14 + 7 * 2**23 / 50e3 / 0.77 + 7 * (10**9 - 2**23) / 50e3 / 0.95,
        ),
        # Switches and a tree over eight nodes: 31 us and 28 for each doubling, 160 GB/s of the full tensor.
        (NODES, Kind.ALL_REDUCE, ALL, 16 * 10**6, 31 + 3 * 28 + 16 * 10**3 / 160),
        # Two nodes: the switches limit the rate; at a quarter of the network, 0.8 of its 100 GB/s does.
        (Cluster.load("h100-2x8"), Kind.ALL_REDUCE, Group("all", 16), 10**9, 31 + 28 + 10**6 / 267),
        (_with_network(Cluster.load("h100-2x8"), 12.5), Kind.ALL_REDUCE, Group("all", 16), 10**8, 31 + 28 + 10**5 / 80),
        # At a quarter of the network, the tree over eight nodes has a quarter of its rate.
        (_with_network(NODES, 12.5), Kind.ALL_REDUCE, ALL, 10**7, 31 + 3 * 28 + 10**4 / 40),
    ],
)
def test_a_collective_takes_the_fastest_algorithm_and_protocol(
    cluster: Cluster, kind: Kind, group: Group, num_bytes: int, microseconds: float
):
    assert cluster.estimate(kind, group, num_bytes).source == "nccl"
    assert cluster.collective_us(kind, group, num_bytes) == pytest.approx(microseconds)


@pytest.mark.parametrize("rails", [True, False])
@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("name", ["h100-16x8", "h100-2x8", "b200-4x8", "mi300x-4x8"])
def test_a_faster_network_never_makes_a_collective_slower_and_a_slow_one_costs(name: str, kind: Kind, rails: bool):
    cluster = Cluster.load(name)
    group = Group("all", cluster.num_ranks)
    for num_bytes in (0, 1 << 16, 1 << 24, 1 << 30, 1 << 34):
        times = [
            _with_network(cluster, gbps, rails=rails).collective_us(kind, group, num_bytes)
            for gbps in (1.0, 6.25, 12.5, 25.0, 37.5, 50.0, 100.0, 400.0)
        ]
        assert times == sorted(times, reverse=True)
        if num_bytes >= 1 << 30 and kind is not Kind.BARRIER:
            assert all(slow > fast for slow, fast in itertools.pairwise(times[:4]))


def test_the_network_limits_an_all_reduce_over_part_of_the_ranks_of_each_node():
    half, num_bytes = Group("half", 32, 2), 1 << 30
    carried_us = 2 * num_bytes / (4 * 50e3)  # four adapters; every byte leaves the node twice
    assert NODES.collective_us(Kind.ALL_REDUCE, half, num_bytes) > carried_us
    assert NODES.collective_us(Kind.ALL_REDUCE, ALL, num_bytes) < carried_us


@pytest.mark.parametrize("name", [name for name in presets() if "x" in name])
def test_the_network_of_a_preset_carries_its_tree(name: str):
    cluster = Cluster.load(name)
    if cluster.num_nodes == 1 or cluster.nccl is None:
        return
    network = cluster.ranks_per_node * cluster.levels[-1].link.bandwidth_gbps
    assert cluster.levels[-1].rails
    for rate, num_sends in zip(cluster.nccl.nvls_tree_gbps, (1, 2), strict=True):
        assert rate <= network * NVLS_TREE_SHARE / num_sends


def test_the_latency_is_the_time_of_no_bytes():
    for kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL):
        assert NODES.latency_us(kind, ALL) == NODES.collective_us(kind, ALL, 0)


def test_kinds_that_nccl_does_not_model_take_the_links():
    assert NODES.estimate(Kind.ALL_TO_ALL, ALL, 10**6).source == "links"
    assert NODES.estimate(Kind.BROADCAST, ALL, 10**6).source == "links"


def test_rails_multiply_the_links_of_a_plain_cluster_too():
    plain = replace(NODES, nccl=None)
    alone = replace(plain, levels=tuple(replace(level, rails=False) for level in plain.levels))
    num_bytes = 64 * 10**9
    latency = plain.latency_us(Kind.ALL_GATHER, ALL)
    assert plain.collective_us(Kind.ALL_GATHER, ALL, num_bytes) == pytest.approx(latency + 63 * 10**6 / 345)
    assert alone.collective_us(Kind.ALL_GATHER, ALL, num_bytes) == pytest.approx(latency + 63 * 10**6 / 50)
    assert plain.collective_us(Kind.ALL_TO_ALL, ALL, num_bytes) == alone.collective_us(Kind.ALL_TO_ALL, ALL, num_bytes)


@pytest.mark.parametrize("name", presets())
def test_every_preset_has_a_time_for_every_kind(name: str):
    cluster = Cluster.load(name)
    group = Group("all", cluster.num_ranks)
    for kind in Kind:
        assert cluster.collective_us(kind, group, 1 << 20) > 0
    assert cluster.device.traffic_ns(1 << 30)


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE])
def test_saturating_bytes_grow_with_the_group(name: str, kind: Kind):
    cluster = Cluster.load(name)
    sizes = [size for size in (1, 2, 4, 8) if size <= cluster.ranks_per_node]
    found = [cluster.saturating_bytes(kind, Group("a", size)) for size in sizes]
    assert found[0] == 0
    if kind is Kind.ALL_REDUCE and cluster.levels[0].link.hop_us == 0:  # the same latency, more bytes on the wire
        return
    on_wire = [num * (size - 1) / size for num, size in zip(found, sizes, strict=True)]
    assert on_wire == sorted(on_wire)


def test_a_network_is_not_saturated_by_less_than_its_floor():
    pair = Group("dp", 2, 8)
    assert NODES.saturating_bytes(Kind.ALL_GATHER, pair) == 100 << 20
    assert Cluster.load("a100-8x8").saturating_bytes(Kind.ALL_GATHER, pair) == 75 << 20
