"""Prices of whole graphs: launches by their full tensors, overrides, what is unknown, the 8b step."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

import weft
from weft.cost.cluster import Cluster
from weft.cost.device import UNDESCRIBED
from weft.cost.prices import Prices, price
from weft.errors import ClusterError
from weft.graph.dag import Dag
from weft.graph.groups import Group, read_groups
from weft.graph.ops import Kind

H100 = Cluster.load("h100-8")
STEP = """
group('dp', size=4)


def graph(x: f32[8, 4], y: f32[8, 4], s: f32[()]):
    a: f32[8, 4] = relu(x)
    ag: f32[32, 4] = all_gather(a, 4, 'dp')
    wag: f32[32, 4] = wait(ag)
    rs: f32[2, 4] = reduce_scatter(y, 'sum', 4, 'dp')
    wrs: f32[2, 4] = wait(rs)
    ar: f32[8, 4] = all_reduce(y, 'sum', 'dp')
    war: f32[8, 4] = wait(ar)
    zero: f32[()] = all_reduce(s, 'sum', 'dp')
    wzero: f32[()] = wait(zero)
    many = all_gather_coalesced([x, y], 4, 'dp')
    m0: f32[32, 4] = operator.getitem(many, 0)
    m1: f32[32, 4] = operator.getitem(many, 1)
    w0: f32[32, 4] = wait(m0)
    w1: f32[32, 4] = wait(m1)
    return [wag, wrs, war, wzero, w0, w1]
"""


def priced(module: GraphModule, cluster: Cluster = H100, **options: dict[str, float]) -> tuple[Prices, dict[str, int]]:
    dag = Dag(module.graph)
    return price(dag, read_groups(module), cluster, **options), {node.name: i for i, node in enumerate(dag.nodes)}


def test_a_launch_is_priced_by_its_full_tensor_once():
    found, at = priced(weft.parse(STEP))
    group = Group("dp", 4)
    expected = {
        "ag": (Kind.ALL_GATHER, 512),
        "rs": (Kind.REDUCE_SCATTER, 128),
        "ar": (Kind.ALL_REDUCE, 128),
        "zero": (Kind.ALL_REDUCE, 4),
        "many": (Kind.ALL_GATHER, 1024),
    }
    assert {name: found.collective_ns[at[name]] for name in expected} == {
        name: pytest.approx(H100.collective_us(kind, group, num_bytes) * 1000, abs=1)
        for name, (kind, num_bytes) in expected.items()
    }
    assert set(found.collective_ns) == {at[name] for name in expected}
    assert set(found.level.values()) == {"nvlink"}
    assert set(found.sources.values()) == {"nccl"}
    assert [i for i, ns in enumerate(found.compute_ns) if ns] == [at["a"]]
    assert (found.unknown, found.extrapolated, found.flops) == (frozenset(), frozenset(), 0)


def test_out_variants_are_priced_like_the_others():
    text = (
        "group('dp', size=4)\n\n\n"
        "def graph(x: f32[8, 4], out: f32[32, 4]):\n"
        "    ag: f32[32, 4] = all_gather_out(x, 4, 'dp', out=out)\n"
        "    w: f32[32, 4] = wait(ag)\n"
        "    return [w]\n"
    )
    found, at = priced(weft.parse(text))
    assert found.collective_ns[at["ag"]] == priced(weft.parse(STEP))[0].collective_ns[4]


def test_a_launch_outside_a_measured_table_is_extrapolated():
    found, at = priced(weft.parse(STEP), Cluster.load("loopback-1x4"))
    assert {found.sources[at[name]] for name in ("ag", "rs", "ar")} == {"table"}
    assert found.extrapolated == {at[name] for name in ("ag", "rs", "ar", "zero", "many")}


def test_overrides_by_name_come_before_everything():
    found, at = priced(weft.parse(STEP), Cluster.load("loopback-1x4"), overrides={"ag": 7.5, "a": 2.0, "wag": 0.25})
    assert (found.collective_ns[at["ag"]], found.sources[at["ag"]]) == (7500, "override")
    assert (found.compute_ns[at["a"]], found.compute_ns[at["wag"]]) == (2000, 250)
    assert at["ag"] not in found.extrapolated


def test_overrides_that_fit_no_node_are_refused_all_at_once():
    with pytest.raises(ClusterError) as error:
        priced(weft.parse(STEP), overrides={"agg": 1.0, "ar": -1.0, "rs": float("nan")})
    assert str(error.value).splitlines() == [
        "prices: overrides do not fit the graph",
        "    agg: no node has this name; did you mean 'ag'?",
        "    ar: expected a time of 0 us or more, found -1.0",
        "    rs: expected a time of 0 us or more, found nan",
    ]


def test_a_cluster_that_says_nothing_of_its_device_leaves_compute_unknown():
    found, at = priced(weft.parse(STEP), replace(H100, device=UNDESCRIBED))
    assert (sum(found.compute_ns), found.unknown) == (0, frozenset({at["a"]}))


def test_a_launch_without_metadata_is_unknown():
    module = weft.parse(STEP)
    for node in module.graph.nodes:
        if node.name == "ag":
            del node.meta["val"]
    found, at = priced(module)
    assert at["ag"] in found.unknown
    assert found.collective_ns[at["ag"]] == pytest.approx(H100.latency_us(Kind.ALL_GATHER, Group("dp", 4)) * 1e3, abs=1)


def test_the_8b_step_takes_the_time_of_its_flops():
    """Six flops for each weight that multiplies and each token; what is not a product adds a quarter at most here."""
    module = weft.zoo.load("llama-8b", parallel="fsdp", ranks=64, layers=4, part="joint")
    cluster = Cluster.load("h100-8x8")
    found, _ = priced(module, cluster)
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    weights, tokens = 4 * layer + 4096 * 131072, 4096
    attention = 4 * 4096 * 4096 * 4096 * 2 * 7 // 2  # four layers, causal, forward and backward
    assert found.flops == 6 * weights * tokens + attention
    at_peak_us = found.flops / (989.5e6 * cluster.device.matmul_efficiency)
    assert at_peak_us < sum(found.compute_ns) / 1e3 < 1.27 * at_peak_us
    assert found.unknown == frozenset()


@pytest.mark.slow
def test_a_hundred_thousand_nodes_are_priced_in_about_a_second():
    module = weft.parse(STEP)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = next(iter(module.graph.nodes)).meta["val"]
    node = x
    for i in range(100_000):
        node = graph.call_function((torch.ops.aten.relu if i % 7 else torch.ops.aten.mm).default, (node,))
        if i % 7 == 0:
            node.args = (node.args[0], x)
        node.meta["val"] = x.meta["val"]
    graph.output((node,))
    dag, groups = Dag(graph), read_groups(module)
    start = time.process_time()
    price(dag, groups, H100)
    assert time.process_time() - start < 5  # measured: about one; machines differ
