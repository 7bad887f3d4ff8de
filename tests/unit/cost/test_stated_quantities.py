"""Clusters with units: the same machine, however it is described, or an error or a warning that says what is wrong."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weft
from weft.cost.cluster import Cluster
from weft.cost.stated_quantities import RATES, SIZES, quantity, stated
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


def test_gigabits_that_are_taken_for_gigabytes():
    with pytest.raises(ClusterError, match='write bandwidth = "400 Gbit/s"'):
        Cluster.read("ours.toml", OURS.format(lines="bandwidth_gbps = 400.0").encode())
    with pytest.warns(ClusterWarning, match='write bandwidth = "400 Gbit/s"'):
        Cluster.read("ours.toml", OURS.format(lines='bandwidth = "400 GB/s"').encode())


@pytest.mark.parametrize(
    ("lines", "old"),
    [
        ("bandwidth_gbps = 50", 'levels[0].bandwidth_gbps; write bandwidth = "50 GB/s"'),
        ("latency_us = 8.5", 'levels[0].latency_us; write latency = "8.5 us"'),
        ("by_ranks = { 2 = 40 }", 'levels[0].by_ranks.2; write 2 = "40 GB/s"'),
        ("[device]\nmemory_bytes = 80_500_000_000", 'device.memory_bytes; write memory = "80500 MB"'),
    ],
)
def test_a_number_whose_unit_is_in_the_key_loads_with_a_warning(lines: str, old: str):
    with pytest.warns(ClusterWarning) as caught:
        Cluster.read("ours.toml", OURS.format(lines=lines).encode())
    [warning] = caught
    assert str(warning.message).endswith(f"a number has its unit only in the key, such as {old}")


@given(st.floats(1e-6, 1e12), st.integers(1, 1 << 50))
def test_numbers_are_read_as_they_were_written(rate: float, size: int):
    rates, sizes = (line.split('"')[1] for line in (stated("bandwidth_gbps", rate), stated("memory_bytes", size)))
    assert quantity(rates, RATES) == rate
    assert round(quantity(sizes, SIZES) or 0) == size


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


OLD = NODES.replace('latency = "8 us"', "latency_us = 8.0").replace('bandwidth = "345 GB/s"', "bandwidth_gbps = 345")


def test_files_without_units_load_with_a_warning():
    with pytest.warns(ClusterWarning, match="rails: state it"):
        cluster = Cluster.read("ours.toml", OLD.format(lines="bandwidth_gbps = 10").encode())
    assert not cluster.levels[1].rails


DESCRIPTIONS = {
    "a bare number, rails unknown": OLD.format(lines="bandwidth_gbps = 50"),
    "a bare number": OLD.format(lines="bandwidth_gbps = 50\nrails = true"),
    "a bare number of gigabits": OLD.format(lines="bandwidth_gbps = 400\nrails = true"),
    "bytes with their unit": NODES.format(lines='bandwidth = "50 GB/s"\nrails = true'),
    "bits with their unit": NODES.format(lines='bandwidth = "400 Gbit/s"\nrails = true'),
}
ERRORS = {
    "a bare number, rails unknown": "levels[1].rails: state it",
    "a bare number of gigabits": "levels[1].bandwidth_gbps: 400 counts 1e9 bytes per second",
}


@pytest.mark.parametrize("described", DESCRIPTIONS)
def test_every_description_of_one_machine_gives_the_same_step_or_an_error(described: str):
    graph = weft.parse(STEP)
    content = DESCRIPTIONS[described].encode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClusterWarning)
        if described in ERRORS:
            with pytest.raises(ClusterError) as caught:
                Cluster.read("ours.toml", content)
            assert ERRORS[described] in str(caught.value)
        else:
            expected = Cluster.read("ours.toml", DESCRIPTIONS["bits with their unit"].encode())
            assert weft.simulate(graph, Cluster.read("ours.toml", content)) == weft.simulate(graph, expected)


STEP = """group('dp', size=128)

def graph(x: f32[1000, 1000], y: f32[128000, 8]):
    launch = all_gather(x, 128, 'dp')
    w = wait(launch)
    return [w]
"""


def test_a_level_that_the_base_does_not_have_is_refused():
    with pytest.raises(ClusterError, match="h100-16x8 has no level called 'ethernet'"):
        Cluster.read("ours.toml", OURS.replace("infiniband", "ethernet").format(lines="rails = true").encode())


def test_values_of_the_device_replace_those_of_the_base(tmp_path: Path):
    path = tmp_path / "ours.toml"
    path.write_text('base = "h100-2x8"\nname = "ours"\n\n[device]\nmemory = "96 GB"\n')
    made, base = Cluster.load(path), Cluster.load("h100-2x8")
    assert made.device.memory_bytes == 96_000_000_000
    assert (made.levels, made.device.peak_tflops) == (base.levels, base.device.peak_tflops)
