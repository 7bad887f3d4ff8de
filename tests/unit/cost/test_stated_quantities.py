"""Clusters with units: the same machine, however it is described, or an error or a warning that says what is wrong."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from weft.cost.cluster import Cluster
from weft.errors import ClusterError, ClusterWarning
from weft.graph.groups import Group
from weft.graph.ops import Kind

OURS = """base = "h100-16x8"
name = "ours"

[[levels]]
name = "infiniband"
{lines}
"""


def time_of(lines: str) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cluster = Cluster.read("ours.toml", OURS.format(lines=lines).encode())
    return cluster.collective_us(Kind.ALL_TO_ALL, Group("all", 128), 1 << 30)


@pytest.mark.parametrize(
    "lines",
    [
        "rails = true",
        'bandwidth = "50 GB/s"',
        'bandwidth = "400 Gbit/s"',
        'bandwidth = "400 Gbit"',
        'bandwidth = "0.05 TB/s"\nhop = "17 us"',
    ],
)
def test_one_machine_has_one_price(lines: str):
    expected = Cluster.load("h100-16x8").collective_us(Kind.ALL_TO_ALL, Group("all", 128), 1 << 30)
    assert time_of(lines) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ("bandwidth = 50", 'levels[0].bandwidth: expected a number with its unit, such as "50 GB/s"'),
        ('bandwidth = "400"', "levels[0].bandwidth: expected a number with its unit"),
        ('bandwidth = "50 gb/s"', "levels[0].bandwidth: expected a number with its unit"),
        ('bandwidth = "50 GB/s"\nbandwidth_gbps = 50.0', "bandwidth_gbps states it too"),
    ],
)
def test_a_number_without_its_unit_is_refused(lines: str, fault: str):
    with pytest.raises(ClusterError) as caught:
        time_of(lines)
    assert fault in str(caught.value)


def test_gigabits_that_are_taken_for_gigabytes_are_warned_of():
    with pytest.warns(UserWarning, match='write bandwidth = "400 Gbit/s"'):
        Cluster.read("ours.toml", OURS.format(lines="bandwidth_gbps = 400.0").encode())


@pytest.mark.parametrize("lines", ['bandwidth = "12.5 GB/s"\nrails = false', 'bandwidth = "50 GB/s"\nrails = true'])
def test_a_plausible_network_is_not_warned_of(lines: str):
    assert time_of(lines) > 0  # warnings are errors here


@pytest.mark.parametrize("bandwidth", ["200 Gbit/s", "50 GB/s"])
def test_one_fast_adapter_for_a_whole_node_is_warned_of(bandwidth: str):
    with pytest.warns(ClusterWarning, match="the 8 ranks of a node share one adapter"):
        Cluster.read("ours.toml", OURS.format(lines=f'bandwidth = "{bandwidth}"\nrails = false').encode())


NODES = """name = "ours"
num_nodes = 16
ranks_per_node = 8

[[levels]]
name = "nvlink"
spans = "node"
latency = "8 us"
bandwidth = "345 GB/s"

[[levels]]
name = "network"
spans = "cluster"
latency = "8 us"
{lines}
"""


def test_a_level_between_nodes_says_whose_bandwidth_it_states():
    with pytest.raises(ClusterError) as caught:
        Cluster.read("ours.toml", NODES.format(lines='bandwidth = "50 GB/s"').encode())
    assert "levels[1].rails: state it" in str(caught.value)
    stated = Cluster.read("ours.toml", NODES.format(lines='bandwidth = "50 GB/s"\nrails = true').encode())
    assert stated.levels[1].rails


def test_files_without_units_load_with_a_warning():
    text = NODES.replace('latency = "8 us"', "latency_us = 8.0").replace(
        'bandwidth = "345 GB/s"', "bandwidth_gbps = 345"
    )
    with pytest.warns(UserWarning, match="rails: state it"):
        cluster = Cluster.read("ours.toml", text.format(lines="bandwidth_gbps = 50").encode())
    assert not cluster.levels[1].rails


def test_a_level_that_the_base_does_not_have_is_refused():
    with pytest.raises(ClusterError, match="h100-16x8 has no level called 'ethernet'"):
        Cluster.read("ours.toml", OURS.replace("infiniband", "ethernet").format(lines="rails = true").encode())


def test_values_of_the_device_replace_those_of_the_base(tmp_path: Path):
    path = tmp_path / "ours.toml"
    path.write_text('base = "h100-2x8"\nname = "ours"\n\n[device]\nmemory = "96 GB"\n')
    made, base = Cluster.load(path), Cluster.load("h100-2x8")
    assert made.device.memory_bytes == 96_000_000_000
    assert (made.levels, made.device.peak_tflops) == (base.levels, base.device.peak_tflops)
