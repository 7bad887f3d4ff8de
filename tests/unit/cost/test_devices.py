"""Devices, measured tables and NCCL's constants in cluster files; what a device takes for flops and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from weft.cost.cluster import Cluster
from weft.cost.cluster_file import PeakTable, presets
from weft.cost.device import DTYPES, MATMUL_EFFICIENCY, UNDESCRIBED, Device
from weft.cost.execution import is_backward
from weft.cost.measured_table import Table
from weft.errors import ClusterError
from weft.graph.edit import IN_POLICY_KEY
from weft.graph.ops import Kind

LINKS = """
name = "box"
num_nodes = 1
ranks_per_node = 4

[[levels]]
name = "nvlink"
spans = "node"
latency_us = 10.0
bandwidth_gbps = 100.0
"""
DEVICE = """
[device]
name = "some GPU"
peak_tflops = { bf16 = 1000.0, f32 = 60 }
memory_gbps = 2000.0
memory_bytes = 80_000_000_000
launch_gap_us = 2.5
overlap_slowdown = 0.2
collective_slowdown = 0.1
matmul_efficiency = 0.5
"""
TABLES = """
[[tables]]
kind = "all_gather"
num_ranks = 4
input_bytes = [1000, 4000]
us = [10.0, 20.0]
level = "nvlink"

[[tables]]
kind = "all_reduce"
num_ranks = 2
input_bytes = [1000]
us = [5]
"""


def refusal(text: str) -> list[str]:
    with pytest.raises(ClusterError) as error:
        Cluster.read("box.toml", text.encode())
    return str(error.value).splitlines()


def test_a_file_describes_a_device():
    device = Cluster.read("box.toml", (LINKS + DEVICE).encode()).device
    assert device == Device(
        "some GPU", (("bf16", 1000.0), ("f32", 60.0)), 2000.0, 80_000_000_000, 2.5, 0.2, 0.1, matmul_efficiency=0.5
    )


def test_a_device_fuses_unless_its_file_says_otherwise():
    device = Cluster.read("box.toml", (LINKS + "[device]\nfuses = false\n").encode()).device
    assert not device.fuses
    assert Cluster.read("box.toml", LINKS.encode()).device.fuses


def test_a_file_without_a_device_says_nothing_of_compute():
    device = Cluster.read("box.toml", LINKS.encode()).device
    assert device == UNDESCRIBED
    assert (device.launch_gap_us, device.overlap_slowdown, device.collective_slowdown) == (0.0, 0.0, 0.0)
    assert device.matmul_efficiency == MATMUL_EFFICIENCY
    assert device.product_ns(10**12, torch.bfloat16) is None
    assert device.traffic_ns(10**9) is None


def test_products_take_their_flops_at_the_stated_share_of_the_peak_of_their_dtype():
    device = Cluster.read("box.toml", (LINKS + DEVICE).encode()).device
    assert device.product_ns(10**12, torch.bfloat16) == 2_000_000
    assert device.product_ns(3 * 10**10, torch.float32) == 1_000_000
    assert device.product_ns(10**12, torch.float16) is None
    assert device.traffic_ns(4 * 10**9) == 2_000_000
    assert device.traffic_ns(1) == 1


def test_rates_that_round_to_nothing_are_refused_with_their_path():
    slow = DEVICE.replace("bf16 = 1000.0", "bf16 = 0.0000005").replace("memory_gbps = 2000.0", "memory_gbps = 1e-9")
    assert refusal(LINKS + slow) == [
        "cluster box.toml: it is not a valid cluster",
        "    device.peak_tflops.bf16: expected greater than or equal to 0.000001, found 5e-07",
        "    device.memory_gbps: expected greater than or equal to 0.000001, found 1e-09",
    ]


@pytest.mark.parametrize("efficiency", [1e-12, float("nan")])
def test_a_device_without_a_rate_that_can_be_counted_is_refused(efficiency: float):
    with pytest.raises(ClusterError) as error:
        Device("slow", (("f32", 1.0),), 1.0, matmul_efficiency=efficiency)
    assert str(error.value).splitlines() == [
        f"device 'slow': its products of f32 run at {efficiency:g} TFLOP/s, expected 5.1e-07 to 1e+12",
        "check the units",
    ]
    with pytest.raises(ClusterError, match="its memory runs at inf GB/s"):
        Device("fast", (), float("inf"))


def test_the_slowest_device_that_a_file_may_describe_takes_finite_times():
    slowest = LINKS.replace("100.0", "1e-6").replace("10.0", "1e12")
    slowest += "[device]\npeak_tflops = { f32 = 1e-6 }\nmemory_gbps = 1e-6\nmatmul_efficiency = 1.0\n"
    made = Cluster.read("box.toml", slowest.encode())
    assert (made.device.product_ns(10**6, torch.float32), made.device.traffic_ns(1000)) == (10**9, 10**9)


def test_ranks_that_share_a_device_have_a_part_of_it_each():
    two, four = Cluster.load("loopback-1x2").device, Cluster.load("loopback-1x4").device
    assert two.peak_of(torch.bfloat16) == pytest.approx(989.5 / 2)
    assert (two.memory_gbps, four.memory_gbps) == (2400.0, 1200.0)
    assert (two.memory_bytes, four.memory_bytes) == (70_500_000_000, 35_250_000_000)


def test_every_dtype_of_a_product_has_a_key_for_its_peak():
    assert set(DTYPES.values()) | {"tf32"} == set(PeakTable.model_fields)


def test_a_file_holds_measured_tables():
    made = Cluster.read("box.toml", (LINKS + TABLES).encode())
    assert made.tables == (
        Table(Kind.ALL_GATHER, 4, ((4000, 10.0), (16000, 20.0)), "nvlink"),
        Table(Kind.ALL_REDUCE, 2, ((1000, 5.0),)),
    )


def test_every_fault_of_devices_and_tables_is_told_at_once_with_its_path():
    text = DEVICE.replace("f32 = 60", "fp32 = 60").replace("launch_gap_us = 2.5", "launch_gap = 2.5")
    text = (
        text.replace("0.2", "-0.2")
        .replace("0.1", "-0.1")
        .replace("0.5", "1.5")
        .replace("memory_gbps = 2000.0", "memory_gbps = 0")
    )
    tables = TABLES.replace("1000, 4000", "1000, 0").replace('"all_reduce"', '"all_reduces"').replace("[5]", "[]")
    nccl = "[nccl]\nnum_channels = 16\nll_gbps = [1.0, 2.0]\nring_ll128_gbps = [1.0, 2.0, 3.0]\nrails = true\n"
    assert refusal(LINKS + text + nccl + tables) == [
        "cluster box.toml: it is not a valid cluster",
        "    device.peak_tflops.fp32: no key is called 'fp32'; did you mean 'f32'?",
        "    device.memory_gbps: expected greater than or equal to 0.000001, found 0",
        "    device.overlap_slowdown: expected greater than or equal to 0, found -0.2",
        "    device.collective_slowdown: expected greater than or equal to 0, found -0.1",
        "    device.matmul_efficiency: expected less than or equal to 1, found 1.5",
        "    nccl.ll_gbps: List should have at least 3 items after validation, not 2, found [1.0, 2.0]",
        "    nccl.tree_ll128_gbps: it is missing",
        "    nccl.tree_simple_gbps: it is missing",
        "    nccl.rails: no key is called 'rails'; use one of num_channels, ll_gbps, ring_ll128_gbps, tree_ll128_gbps, "
        "tree_simple_gbps, network_share, network_large_bytes, nvls_gbps, nvls_us, nvls_tree_gbps, nvls_tree_hop_us",
        "    tables[0].input_bytes[1]: expected greater than or equal to 1, found 0",
        "    tables[1].kind: expected 'all_gather', 'reduce_scatter', 'all_reduce', 'all_to_all', 'broadcast', 'send', "
        "'recv', 'batch_p2p' or 'barrier', found 'all_reduces'",
        "    tables[1].us: List should have at least 1 item after validation, not 0, found []",
        '    device.launch_gap: expected a number with its unit, such as "2 us", found 2.5',
    ]


def test_tables_that_contradict_themselves_are_refused_with_the_levels_that_do_not_nest():
    text = LINKS.replace('"node"', "2") + TABLES.replace("[1000, 4000]", "[4000, 1000, 2000]")
    text = text.replace("num_ranks = 2", "num_ranks = 4").replace('level = "nvlink"', 'level = "nvlinks"')
    again = TABLES[TABLES.index('[[tables]]\nkind = "all_reduce"') :].replace("num_ranks = 2", "num_ranks = 4")
    assert refusal(text + again) == [
        "cluster box.toml: it is not a valid cluster",
        "    levels[0].spans: the last level spans 2 ranks, the cluster has 4",
        "    tables[0].us: expected 3 times, found 2",
        "    tables[0].input_bytes: expected sizes in ascending order",
        "    tables[0].level: no level is called 'nvlinks'; use one of nvlink",
        "    tables[2]: tables[1] has the same kind, num_ranks and level",
    ]


def test_the_digest_tells_devices_and_tables_apart():
    box = Cluster.read("box.toml", (LINKS + DEVICE + TABLES).encode())
    others = [
        replace(box, device=UNDESCRIBED),
        replace(box, device=replace(box.device, overlap_slowdown=0.3)),
        replace(box, device=replace(box.device, collective_slowdown=0.3)),
        replace(box, tables=()),
        replace(box, nccl=Cluster.load("h100-8").nccl),
    ]
    assert len({cluster.digest for cluster in (box, *others)}) == 6
    assert hash(box) == hash(Cluster.read("other.toml", (LINKS + DEVICE + TABLES).encode()))


@pytest.mark.parametrize("name", [name for name in presets() if not name.startswith("gloo")])
def test_an_eager_step_takes_at_least_the_time_to_issue_its_kernels(name: str):
    """On a CPU, the host is the device."""
    debug = weft.parse(
        "def graph(x: f32[4, 4], y: f32[4, 4]):\n"
        "    a: f32[4, 4] = mm(x, y)\n"
        "    b: f32[4, 4] = relu(a)\n"
        "    c: f32[4, 4] = mm(b, y)\n"
        "    return [c]\n"
    )
    cluster = Cluster.load(name).running("eager")
    host = cluster.device.host
    assert host is not None
    assert host.operator_us > 0
    assert weft.simulate(debug, cluster).step_us >= 3 * host.operator_us


@pytest.mark.parametrize("checkpoint", ["none", "full", "selective"])
def test_eager_checkpointing_asks_its_policy_about_each_operator_of_a_block(checkpoint: str):
    step = weft.zoo.load("llama-debug", "none", checkpoint=checkpoint)
    cluster = Cluster.load("h200-1x8").running("eager")
    assert cluster.device.host is not None
    unasked = replace(cluster, device=replace(cluster.device, host=replace(cluster.device.host, policy_us=0.0)))
    times = [weft.simulate(step, each).host_us for each in (cluster, unasked)]
    asked = [node for node in step.graph.nodes if node.meta.get(IN_POLICY_KEY)]
    assert all("layers" in str(node.meta["nn_module_stack"]) for node in asked)
    assert {is_backward(node) for node in asked} == ({False, True} if asked else set())
    assert times[0] - times[1] == pytest.approx(len(asked) * cluster.device.host.policy_us)
    assert bool(asked) == (checkpoint != "none")


def test_compiled_blocks_ask_no_policy():
    step = weft.zoo.load("llama-debug", "none", checkpoint="full")
    cluster = Cluster.load("h200-1x8").running("blocks")
    assert cluster.device.host is not None
    unasked = replace(cluster, device=replace(cluster.device, host=replace(cluster.device.host, policy_us=0.0)))
    assert weft.simulate(step, cluster).host_us == weft.simulate(step, unasked).host_us
