"""The planner's benchmark measures what it says: prices by hand, groups on their wires, a peer that leaves no trace."""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.utils.flop_counter import flop_registry

import weft
from benchmarks import peer, scenarios
from benchmarks.scenarios import SCENARIOS
from tests.unit.benchmarks.steps import STEP
from weft.cost.prices import price
from weft.graph.dag import Dag
from weft.graph.groups import Group, read_groups
from weft.graph.ops import Kind

MB = 1_000_000


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(scenarios.HERE))
    return importlib.import_module("planner")


@pytest.mark.parametrize(
    ("wire", "group", "us"),
    [
        ("infiniband", Group("dp", 8), 20 + 7 / 8 * 400 * MB / 400e3),
        ("infiniband", Group("dp", 512), 20 + 511 / 512 * 400 * MB / 50e3),
        ("infiniband", Group("dp", 64, 8), 20 + 63 / 64 * 400 * MB / 50e3),
        ("ethernet", Group("dp", 64, 8), 150 + 63 / 64 * 400 * MB / 10e3),
        ("ethernet", Group("tp", 8), 20 + 7 / 8 * 400 * MB / 400e3),
    ],
)
def test_a_collective_takes_its_latency_and_its_bytes_on_the_wire(wire: str, group: Group, us: float) -> None:
    cluster = weft.Cluster.load(scenarios.HERE / "clusters" / f"{wire}.toml")
    assert cluster.collective_us(Kind.ALL_GATHER, group, 400 * MB) == pytest.approx(us)
    assert cluster.collective_us(Kind.REDUCE_SCATTER, group, 400 * MB) == pytest.approx(us)
    latency = cluster.latency_us(Kind.ALL_GATHER, group)
    assert cluster.collective_us(Kind.ALL_REDUCE, group, 400 * MB) == pytest.approx(2 * us - latency)


def test_compute_takes_its_flops_or_its_traffic() -> None:
    text = """
def graph(x: bf16[4096, 4096], v: bf16[4096, 1]):
    large: bf16[4096, 4096] = mm(x, x)
    small: bf16[4096, 1] = mm(x, v)
    point: bf16[4096, 4096] = relu(x)
    return [large, small, point]
"""
    module = weft.parse(text)
    dag = Dag(module.graph)
    prices = price(dag, read_groups(module), SCENARIOS["fsdp-x8-nvlink"].cluster())
    found = {node.name: prices.compute_ns[i] for i, node in enumerate(dag.nodes)}
    matrix, vector = 4096 * 4096 * 2, 4096 * 2
    assert found["large"] == pytest.approx(2 * 4096**3 / 600e12 * 1e9, abs=1)
    assert found["small"] == pytest.approx((matrix + 2 * vector) / 2500e9 * 1e9, abs=1)
    assert found["point"] == pytest.approx(2 * matrix / 2500e9 * 1e9, abs=1)


@pytest.mark.parametrize("name", SCENARIOS)
def test_inner_axes_stay_on_nvlink_and_outer_ones_cross_nodes(name: str) -> None:
    scenario = SCENARIOS[name]
    stride = 1
    for axis, size in reversed(scenario.mesh):
        level = scenario.cluster().level_of(Group(axis, size, stride)).name
        assert level == ("nvlink" if size * stride <= 8 else scenario.wire)
        stride *= size


@pytest.mark.parametrize("name", SCENARIOS)
def test_overlap_costs_change_the_device_alone(name: str) -> None:
    plain, loaded = SCENARIOS[name].cluster(), SCENARIOS[name].cluster(with_overlap_costs=True)
    assert (plain.levels, plain.num_ranks) == (loaded.levels, loaded.num_ranks)
    assert (plain.device.overlap_slowdown, plain.device.launch_gap_us) == (0, 0)
    assert loaded.device.overlap_slowdown > 0
    assert loaded.device.launch_gap_us > 0


def test_the_peer_gets_a_copy_and_leaves_no_trace() -> None:
    module = weft.parse(STEP)
    before, known = weft.listing(module), dict(flop_registry)
    attempt = peer.run("overlap", module, SCENARIOS["fsdp-x8-nvlink"].cluster())
    assert attempt.error == ""
    assert weft.listing(module) == before
    assert not dist.is_initialized()
    assert flop_registry == known
    assert attempt.module is not None
    names = [node.name for node in attempt.module.graph.nodes]
    assert names.index("gq") < names.index("a")
    assert {str(value.device) for value in _values(attempt.module)} == {"cpu"}


def test_prices_of_the_peer_are_those_of_weft(monkeypatch: pytest.MonkeyPatch) -> None:
    module, cluster = weft.parse(STEP), SCENARIOS["fsdp-x8-nvlink"].cluster()
    seen: dict[str, float | None] = {}

    def ask(copy: GraphModule, estimate: peer.Estimate) -> GraphModule:
        nodes = {node.name: node for node in copy.graph.nodes}
        seen.update(a=estimate(nodes["a"], None), gp=estimate(nodes["gp"], None), half=estimate(nodes["gp"], 1 << 24))
        return copy

    monkeypatch.setitem(peer.VARIANTS, "asks", ask)
    assert peer.run("asks", module, cluster).error == ""
    gathered_us = [20 + 7 / 8 * num_bytes / 400e3 for num_bytes in (1 << 25, 1 << 24)]
    assert seen["a"] == pytest.approx(2 * 4096**3 / 600e12 * 1e3, rel=1e-4)
    assert [seen["gp"], seen["half"]] == pytest.approx([us / 1e3 for us in gathered_us], rel=1e-4)


def test_a_peer_that_fails_is_reported_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_module: GraphModule, _estimate: peer.Estimate) -> GraphModule:
        raise RuntimeError("cyclic extra dep(s)\nmore of it")

    monkeypatch.setitem(peer.VARIANTS, "fails", fail)
    attempt = peer.run("fails", weft.parse(STEP), SCENARIOS["fsdp-x8-nvlink"].cluster())
    assert (attempt.module, attempt.error) == (None, "RuntimeError: cyclic extra dep(s)")
    assert not dist.is_initialized()


@pytest.mark.slow
def test_all_contestants_are_judged_against_one_bound(planner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "load", lambda *_: [weft.parse(STEP)])
    options = Namespace(overlap_costs=False, repeats=2, pipeline="auto", efforts="default", peer=False)
    row = planner.compare(SCENARIOS["fsdp-x8-nvlink"], 1, "joint", options)
    matmul_ms, gather_ms = 2 * 4096**3 / 600e12 * 1e3, (20 + 7 / 8 * (1 << 25) / 400e3) / 1e3
    assert row.results["captured"].step_ms == pytest.approx(2 * (matmul_ms + gather_ms), rel=1e-4)
    best = planner.judge([weft.parse(STEP)], SCENARIOS["fsdp-x8-nvlink"].cluster(), row.bound_ms, None)[0]
    assert best.gap == pytest.approx(row.results["captured"].step_ms / row.bound_ms - 1)
    naive = row.results["naive 256 MB"]
    assert naive.step_ms == pytest.approx(2 * matmul_ms + gather_ms, rel=1e-4)
    assert naive.gap >= 0
    assert len(naive.seconds) == 2
    assert planner.table([row], ["default"]).count("\n") == 2


def test_the_synthetic_graph_has_the_size_that_is_asked_for(planner: Any) -> None:
    module = planner.synthetic(1000)
    assert len(module.graph.nodes) == pytest.approx(1000, rel=0.1)
    assert all(isinstance(value, torch.Tensor) for value in _values(module))


def test_the_exponent_is_that_of_a_power_law(planner: Any) -> None:
    assert planner.exponent([10, 100, 1000], [0.1 * size**1.5 for size in (10, 100, 1000)]) == pytest.approx(1.5)


def _values(module: GraphModule) -> list[torch.Tensor]:
    return [node.meta["val"] for node in module.graph.nodes if node.op == "call_function"]
