"""Clusters: files and presets, which level a group runs at, how long a collective takes."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weft
from weft.cost.cluster import Cluster, assumed_cluster
from weft.cost.cluster_file import LevelTable, presets
from weft.cost.levels import Level, Link, Transport
from weft.errors import ClusterError
from weft.graph.groups import Group
from weft.graph.ops import Kind
from weft.passes.base import all_passes
from weft.passes.presets import NAMED

TEXT = """
name = "two-boxes"
num_nodes = 2
ranks_per_node = 8

[[levels]]
name = "pair"
spans = 2
latency_us = 1
hop_us = 0.5
bandwidth_gbps = 400.0

[[levels]]
name = "node"
spans = "node"
latency_us = 10.0
hop_us = 2.0
bandwidth_gbps = 100.0

[levels.all_reduce]
bandwidth_gbps = 200.0

[[levels]]
name = "network"
spans = "cluster"
latency_us = 20.0
hop_us = 5.0
bandwidth_gbps = 10.0

[levels.all_gather]
latency_us = 30.0
hop_us = 0.0
"""
BOXES = Cluster.read("boxes.toml", TEXT.encode())
LISTED = (
    "a100-8x8, b200-8x8, ethernet-h100-8x8, gloo-1x4, h100-500w-8x8, h100-efa-8x8, h100-8x8, h200-8x8, h800-8x8, "
    "loopback-1x4, mi300x-8x8, pcie-h100-1x8, "
    "with any number of nodes"
)
WIRED = [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.BROADCAST]


def refusal(text: str) -> str:
    with pytest.raises(ClusterError) as error:
        Cluster.read("boxes.toml", text.encode())
    return str(error.value)


def unknown(name: str | Path) -> str:
    with pytest.raises(ClusterError) as error:
        Cluster.load(name)
    return str(error.value)


# Files.


def test_a_file_describes_a_cluster(tmp_path: Path):
    (tmp_path / "boxes.toml").write_text(TEXT)
    assert weft.Cluster.load(tmp_path / "boxes.toml") == weft.Cluster.load(str(tmp_path / "boxes.toml")) == BOXES
    assert (BOXES.name, BOXES.num_nodes, BOXES.ranks_per_node, BOXES.num_ranks) == ("two-boxes", 2, 8, 16)
    assert BOXES.levels == (
        Level("pair", 2, Link(1, 0.5, 400.0)),
        Level("node", 8, Link(10.0, 2.0, 100.0), ((Kind.ALL_REDUCE, Link(10.0, 2.0, 200.0)),)),
        Level("network", 16, Link(20.0, 5.0, 10.0), ((Kind.ALL_GATHER, Link(30.0, 0.0, 10.0)),)),
    )


def test_a_level_takes_overrides_for_every_kind():
    assert {kind.value for kind in Kind} <= set(LevelTable.model_fields)


def test_every_fault_of_a_file_is_told_at_once_with_its_path():
    text = TEXT.replace('"two-boxes"', '"two boxes"').replace("num_nodes = 2", "num_nodes = 0\nnum_node = 2")
    text = text.replace("spans = 2", 'spans = "rack"').replace("hop_us = 0.5", "hop = 0.5").replace("400.0", "inf")
    text = text.replace("[levels.all_reduce]\nbandwidth_gbps = 200.0", "[levels.all_reduc]\nbandwidth_gbps = 200.0")
    text = text.replace("latency_us = 30.0", "latency_us = -30.0\ngbps = 1\nbandwidth_gbps = '10'")
    text = text.replace("ranks_per_node = 8\n", "")
    assert refusal(text).splitlines() == [
        "cluster boxes.toml: it is not a valid cluster",
        "    name: expected up to 80 letters, digits, dots and dashes, found 'two boxes'",
        "    num_nodes: expected greater than or equal to 1, found 0",
        "    ranks_per_node: it is missing",
        "    levels[0].spans: expected 'node', 'cluster' or a number of ranks, found 'rack'",
        "    levels[0].bandwidth_gbps: expected a finite number, found inf",
        "    levels[1].all_reduc: no key is called 'all_reduc'; did you mean 'all_reduce'?",
        "    levels[2].all_gather.latency_us: expected greater than or equal to 0, found -30.0",
        "    levels[2].all_gather.bandwidth_gbps: expected a valid number, found '10'",
        "    levels[2].all_gather.gbps: no key is called 'gbps'; use one of latency_us, hop_us, bandwidth_gbps, "
        "by_ranks",
        "    num_node: no key is called 'num_node'; did you mean 'num_nodes'?",
        '    levels[0].hop: expected a number with its unit, such as "3.4 us", found 0.5',
    ]


def test_levels_that_do_not_nest_are_refused():
    text = TEXT.replace("spans = 2", "spans = 3").replace('"cluster"', "12")
    assert refusal(text).splitlines() == [
        "cluster boxes.toml: it is not a valid cluster",
        "    levels[1].spans: 8 ranks are not a multiple of the 3 that levels[0] spans",
        "    levels[2].spans: 12 ranks are not a multiple of the 8 that levels[1] spans",
        "    levels[2].spans: the last level spans 12 ranks, the cluster has 16",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "cluster boxes.toml: it is not valid TOML: Invalid value (at end of document)"),
        (
            'name = "a"\nnum_nodes = 1\nranks_per_node = 1\nlevels = []',
            "cluster boxes.toml: it is not a valid cluster\n    levels: expected at least one, found none",
        ),
        (
            f'name = "a"\nnum_nodes = 1\nranks_per_node = 1\nlevels = "{"x" * 100}"',
            f"cluster boxes.toml: it is not a valid cluster\n    levels: expected a valid list, found '{'x' * 79} ...",
        ),
    ],
)
def test_a_file_that_is_no_cluster_is_refused(text: str, message: str):
    assert refusal(text) == message


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path: Path):
    missing, large = tmp_path / "missing.toml", tmp_path / "large"
    assert unknown(str(missing)) == (
        f"cluster {missing}: it cannot be read: No such file or directory\ngive a TOML file, or a preset: {LISTED}"
    )
    large.write_bytes(b"#" * (1 << 20) + b"\n")
    assert unknown(large) == f"cluster {large}: it is larger than 1.00 MiB, too large for a cluster"


def test_a_level_that_holds_no_more_than_the_one_within_it_is_left_out():
    one = Cluster.read("boxes.toml", TEXT.replace("num_nodes = 2", "num_nodes = 1").encode())
    assert [level.name for level in one.levels] == ["pair", "node"]


# Presets.


@pytest.mark.parametrize(
    ("name", "title", "levels"),
    [
        ("h100-8", "h100-1x8", [("nvlink", 8)]),
        ("h100-1x8", "h100-1x8", [("nvlink", 8)]),
        ("h100-2x4", "h100-2x4", [("nvlink", 4), ("infiniband", 8)]),
        ("h100-8x8", "h100-8x8", [("nvlink", 8), ("infiniband", 64)]),
        ("h100-64x8", "h100-64x8", [("nvlink", 8), ("infiniband", 512)]),
    ],
)
def test_a_preset_has_any_number_of_nodes(name: str, title: str, levels: list[tuple[str, int]]):
    cluster = Cluster.load(name)
    assert cluster.name == title
    assert [(level.name, level.num_ranks) for level in cluster.levels] == levels


def test_every_preset_of_the_list_loads():
    assert [Cluster.load(name).name for name in presets()] == presets()


def test_presets_of_one_node_only_have_as_many_ranks_as_were_measured():
    assert {"loopback-1x2", "loopback-1x4", "gloo-1x4", "pcie-h100-1x8"} <= set(presets())
    assert unknown("loopback-2x4") == (
        "cluster 'loopback-2x4': it is not a valid cluster\n"
        "    levels[0].spans: the last level spans 4 ranks, the cluster has 8"
    )


def test_every_constant_of_a_preset_cites_its_source():
    for file in resources.files("weft.cost").joinpath("clusters").iterdir():
        lines = file.read_text().splitlines()
        described = (
            "name",
            "num_nodes",
            "ranks_per_node",
            "spans",
            "wire",
            "kind",
            "num_ranks",
            "input_bytes",
            "[",
            "#",
        )
        constants = [i for i, line in enumerate(lines) if line and not line.startswith(described)]
        assert len(constants) >= 5
        cited: set[int] = set()  # a comment holds for the constants right below it
        for i in constants:
            if "#" in lines[i] or lines[i - 1].startswith(("#", "[device.attention")) or i - 1 in cited:
                cited.add(i)
        assert [lines[i] for i in constants if i not in cited] == []


@pytest.mark.parametrize(("name", "near"), [("h10-8x8", "h100-8x8"), ("h100", "h100-8"), ("h100-8x8x8", "h100-8x8")])
def test_an_unknown_preset_gets_the_nearest_one_and_the_list(name: str, near: str):
    assert unknown(name) == (f"cluster: no cluster is called {name!r}\ndid you mean {near!r}?\npresets: {LISTED}")


def test_a_preset_without_a_near_one_gets_the_list():
    assert unknown("tpu") == f"cluster: no cluster is called 'tpu'\npresets: {LISTED}"


def test_a_preset_with_more_ranks_than_a_node_has_is_refused():
    assert unknown("h100-2x16") == (
        "cluster 'h100-2x16': it asks for 16 ranks per node, but a node of h100 has 8\nwrite h100-NODESx8"
    )


def test_a_preset_without_nodes_is_refused():
    assert unknown("h100-0x8") == (
        "cluster 'h100-0x8': it is not a valid cluster\n    num_nodes: expected greater than or equal to 1, found 0"
    )


def test_the_digest_tells_clusters_apart():
    assert Cluster.load("h100-8").digest == Cluster.load("h100-1x8").digest == "5cd09e68226e1bd76f996ee892695592"
    others = [Cluster.load("h100-8x8"), BOXES, replace(BOXES, levels=BOXES.levels[:2]), replace(BOXES, name="boxes")]
    assert len({cluster.digest for cluster in others}) == 4
    assert hash(BOXES) == hash(Cluster.read("other.toml", TEXT.encode()))


# Transports.

SHARED = TEXT.replace("[levels.all_reduce]", "[levels.symmetric]\nhop_us = 7.0\nsm_share = 0.25\n\n[levels.all_reduce]")


def test_copies_through_symmetric_memory_take_missing_values_from_their_level():
    cluster = Cluster.read("boxes.toml", SHARED.encode())
    assert cluster.symmetric(Group("tp", 8)) == Transport(Link(10.0, 7.0, 100.0), 0.25)
    assert cluster.symmetric(Group("tp", 8)).copy_us(1_000_000, 8) == 7.0 + 10.0


def test_a_level_without_symmetric_memory_copies_at_the_speed_of_its_links():
    cluster = Cluster.read("boxes.toml", SHARED.encode())
    assert cluster.symmetric(Group("tp", 2)) == Transport(Link(1.0, 0.5, 400.0))


def test_keys_of_symmetric_memory_are_checked():
    with pytest.raises(ClusterError, match=r"sm_share: expected less than 1, found 1\.5") as raised:
        Cluster.read("boxes.toml", SHARED.replace("0.25", "1.5").replace("hop_us = 7.0", "hops = 7.0").encode())
    assert "levels[1].symmetric.hops: no key is called 'hops'" in str(raised.value)


# Levels.


@pytest.mark.parametrize(
    ("group", "level"),
    [
        (Group("a", 1), "pair"),
        (Group("a", 1, 8), "pair"),
        (Group("a", 2), "pair"),
        (Group("a", 2, 2), "node"),
        (Group("a", 4), "node"),
        (Group("a", 2, 4), "node"),
        (Group("a", 4, 2), "node"),
        (Group("a", 8), "node"),
        (Group("a", 2, 8), "network"),
        (Group("a", 16), "network"),
        (Group("a", 3), "network"),  # the third of them has ranks 6, 7 and 8
        (Group("a", 2, 6), "network"),  # ranks 2 and 8
        (Group("a", 0), "network"),  # of unknown size
        (Group("a", 2, ranks=((0, 1), (2,), (3,))), "pair"),
        (Group("a", 2, ranks=((1, 2), (0, 3))), "node"),
        (Group("a", 2, ranks=((0, 1), (7, 8))), "network"),
    ],
)
def test_a_group_runs_at_the_innermost_level_that_holds_it(group: Group, level: str):
    assert BOXES.level_of(group).name == level


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from(["h100-8", "h100-3x8", "h100-4x6"]))
def test_the_level_is_that_of_the_groups_one_by_one(size: int, stride: int, name: str):
    cluster, group = Cluster.load(name), Group("a", size, stride)
    num_ranks = cluster.num_ranks - cluster.num_ranks % (size * stride)
    if num_ranks == 0:
        return
    parts = group.partition(num_ranks)
    one_by_one = cluster.level_of(replace(group, ranks=parts))
    assert cluster.level_of(group).num_ranks >= one_by_one.num_ranks
    if num_ranks == cluster.num_ranks:
        assert cluster.level_of(group) == one_by_one


def test_a_mesh_larger_than_its_cluster_is_refused():
    BOXES.check(16)
    with pytest.raises(ClusterError) as error:
        BOXES.check(64)
    do = "use another cluster such as h100-8x8, or a graph for at most 16 ranks"
    assert str(error.value) == f"cluster two-boxes: it has 16 ranks, the mesh needs 64\n{do}"


@pytest.mark.parametrize("group", [Group("dp", 32), Group("dp", 4, 8), Group("dp", 2, ranks=((0, 1), (2, 31)))])
def test_a_group_larger_than_its_cluster_is_refused(group: Group):
    with pytest.raises(ClusterError) as error:
        BOXES.saturating_bytes(Kind.ALL_GATHER, group)
    do = "use another cluster such as h100-4x8, or a graph for at most 16 ranks"
    assert str(error.value) == f"cluster two-boxes: it has 16 ranks, group 'dp' needs 32\n{do}"


# Times.


@pytest.mark.parametrize(
    ("kind", "group", "microseconds"),
    [
        (Kind.REDUCE_SCATTER, Group("a", 2), 1 + 0.5 + 1000 / 2 / 400),
        (Kind.REDUCE_SCATTER, Group("a", 4, 2), 10 + 3 * 2 + 1000 * 3 / 4 / 100),
        (Kind.ALL_TO_ALL, Group("a", 8), 10 + 4 * 0.5 + 3 * 2 + 1000 * 7 / 8 / 100),
        (Kind.ALL_REDUCE, Group("a", 8), 10 + 2 * (4 * 0.5 + 3 * 2) + 1000 * 2 * 7 / 8 / 200),
        (Kind.BROADCAST, Group("a", 2, 8), 20 + 5 + 1000 / 10),
        (Kind.ALL_GATHER, Group("a", 2, 8), 30 + 1000 / 2 / 10),
        (Kind.REDUCE_SCATTER, Group("a", 16), 20 + 8 * 0.5 + 6 * 2 + 5 + 1000 * 15 / 16 / 10),
        (Kind.REDUCE_SCATTER, Group("a", 0), 20 + 8 * 0.5 + 6 * 2 + 5 + 1000 * 15 / 16 / 10),
        (Kind.REDUCE_SCATTER, Group("a", 2, ranks=((0, 8), (1,))), 20 + 5 + 1000 / 2 / 10),
        (Kind.SEND, Group("a", 16), 20 + 5 + 1000 / 10),
        (Kind.BARRIER, Group("a", 2), 1.5),
        (Kind.ALL_REDUCE, Group("a", 1), 0),
        (Kind.ALL_REDUCE, Group("a", 1, ranks=((0,), (1,))), 0),
    ],
)
def test_a_collective_takes_its_latency_its_hops_and_its_bytes(kind: Kind, group: Group, microseconds: float):
    assert BOXES.collective_us(kind, group, 1_000_000) == pytest.approx(microseconds)


@pytest.mark.parametrize("kind", WIRED)
@pytest.mark.parametrize("group", [Group("a", 2), Group("a", 8), Group("a", 2, 8), Group("a", 16)])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_saturating_bytes_reach_that_share_of_the_bandwidth(kind: Kind, group: Group, share: float):
    num_bytes = BOXES.saturating_bytes(kind, group, share)
    moving = BOXES.collective_us(kind, group, num_bytes) - BOXES.latency_us(kind, group)
    assert moving / BOXES.collective_us(kind, group, num_bytes) == pytest.approx(share, rel=1e-3)


@pytest.mark.parametrize(("kind", "group"), [(Kind.ALL_GATHER, Group("a", 1)), (Kind.BARRIER, Group("a", 8))])
def test_what_sends_nothing_is_saturated_by_nothing(kind: Kind, group: Group):
    assert BOXES.saturating_bytes(kind, group) == 0


@pytest.mark.parametrize("share", [0, 1, -1, 1.5, float("nan")])
def test_a_share_that_is_never_reached_is_refused(share: float):
    with pytest.raises(ClusterError) as error:
        BOXES.saturating_bytes(Kind.ALL_GATHER, Group("a", 8), share)
    assert str(error.value) == (
        f"cluster two-boxes: a share of {share} of the bandwidth is out of range\nuse a share between 0 and 1"
    )


def test_the_saturation_constants_of_the_field_give_its_bucket_sizes():
    """PyTorch's own caps for H100 over NVLink: 10 us, 40 us a hop, 36 GB/s, on the wire."""
    field = Cluster("field", 1, 8, (Level("nvlink", 8, Link(10.0, 40.0, 36.0)),))
    wire = {n: field.saturating_bytes(Kind.ALL_GATHER, Group("a", n)) * (n - 1) / n / 2**20 for n in (4, 8)}
    assert wire == pytest.approx({4: 40.2, 8: 89.6}, rel=2e-3)


@pytest.mark.parametrize("kind", WIRED)
def test_a_bucket_for_a_node_of_h100s_is_of_the_size_that_the_field_uses(kind: Kind):
    assert 50e6 <= Cluster.load("h100-8").saturating_bytes(kind, Group("dp", 8)) <= 200e6


# Properties.

links = st.builds(Link, st.floats(0, 1e4), st.floats(0, 1e3), st.floats(0.1, 1e4))
levels = st.tuples(links, links, links)
groups = st.sampled_from([Group("a", s, t) for s in (0, 1, 2, 4, 8, 16) for t in (1, 2, 4, 8) if s * t <= 16])
kinds = st.sampled_from(list(Kind))


def cluster_of(links: tuple[Link, ...]) -> Cluster:
    sizes = (2, 8, 16)
    return Cluster("any", 2, 8, tuple(Level(f"l{n}", n, link) for n, link in zip(sizes, links, strict=True)))


@given(levels, groups, kinds, st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_more_bytes_never_take_less_time(links: tuple[Link, ...], group: Group, kind: Kind, few: int, more: int):
    cluster = cluster_of(links)
    assert cluster.collective_us(kind, group, few) <= cluster.collective_us(kind, group, few + more)


@given(levels, groups, kinds, st.integers(0, 2), st.floats(0, 1e4), st.floats(0, 1e3))
def test_more_latency_never_takes_less_time_nor_saturates_earlier(
    links: tuple[Link, ...], group: Group, kind: Kind, at: int, latency_us: float, hop_us: float
):
    slower = [*links]
    slower[at] = replace(links[at], latency_us=links[at].latency_us + latency_us, hop_us=links[at].hop_us + hop_us)
    before, after = cluster_of(links), cluster_of(tuple(slower))
    assert before.collective_us(kind, group, 1 << 20) <= after.collective_us(kind, group, 1 << 20)
    assert before.saturating_bytes(kind, group) <= after.saturating_bytes(kind, group)


@given(levels, groups, kinds, st.integers(0, 2), st.floats(1, 100), st.integers(0, 1 << 40))
def test_more_bandwidth_never_takes_more_time_and_saturates_later(
    links: tuple[Link, ...], group: Group, kind: Kind, at: int, factor: float, num_bytes: int
):
    faster = [*links]
    faster[at] = replace(links[at], bandwidth_gbps=links[at].bandwidth_gbps * factor)
    before, after = cluster_of(links), cluster_of(tuple(faster))
    assert after.collective_us(kind, group, num_bytes) <= before.collective_us(kind, group, num_bytes)
    assert before.saturating_bytes(kind, group) <= after.saturating_bytes(kind, group)


@given(levels, groups, kinds, st.floats(0.01, 0.98), st.floats(0.001, 0.01))
def test_a_larger_share_needs_no_fewer_bytes(
    links: tuple[Link, ...], group: Group, kind: Kind, share: float, more: float
):
    cluster = cluster_of(links)
    assert cluster.saturating_bytes(kind, group, share) <= cluster.saturating_bytes(kind, group, share + more)


@given(levels, st.sampled_from(WIRED))
def test_a_larger_group_of_one_level_has_no_less_latency(links: tuple[Link, ...], kind: Kind):
    cluster = cluster_of(links)
    assert cluster.latency_us(kind, Group("a", 4)) <= cluster.latency_us(kind, Group("a", 8))


def test_where_no_cluster_is_given_as_many_nodes_are_assumed_as_the_groups_need():
    assert assumed_cluster([]).name == "h100-1x8"
    assert assumed_cluster([Group("dp", 8)]).name == "h100-1x8"
    assert assumed_cluster([Group("dp", 8)], num_nodes=8).name == "h100-8x8"
    assert assumed_cluster([Group("tp", 8), Group("dp", 64, stride=8)], num_nodes=8).num_ranks == 512
    assert assumed_cluster([Group("dp", 4, stride=8)]).num_ranks == 32
    assert assumed_cluster([Group("dp", 2, ranks=((0, 1), (2, 3)))]).num_ranks == 8
    assert assumed_cluster([Group("dp", 2, ranks=((3, 100),))]).num_ranks == 104


LARGE = """group('dp', size=64, stride=8)
group('tp', size=8)

def graph(x: bf16[512, 1024], w: bf16[1024, 512], p: bf16[16, 512]):
    a = all_gather(x, 8, 'tp')
    wa = wait(a)
    g = all_gather(p, 64, 'dp')
    wg = wait(g)
    y = mm(wa, w)
    z = mm(y, w2)
    s = reduce_scatter(z, 'sum', 8, 'tp')
    ws = wait(s)
    r = all_reduce(wg, 'sum', 'dp')
    wr = wait(r)
    return [ws, wr]
""".replace("z = mm(y, w2)", "t = t(w)\n    z = mm(y, t)")


@pytest.mark.parametrize("name", ["auto", *sorted(NAMED)])
def test_every_preset_plans_for_512_ranks_without_a_cluster(name: str):
    weft.optimize(weft.parse(LARGE), pipeline=name)


def test_every_pass_plans_for_512_ranks_without_a_cluster():
    for name in all_passes():
        weft.optimize(weft.parse(LARGE), pipeline=name)


def test_512_ranks_are_simulated_without_a_cluster():
    assert weft.simulate(weft.parse(LARGE)).step_us == weft.simulate(weft.parse(LARGE), "h100-64x8").step_us
