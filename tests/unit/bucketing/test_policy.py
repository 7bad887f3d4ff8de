"""Policies: caps by number and by cluster, modules by the stack of names that tracing leaves, pins and bans by name."""

from __future__ import annotations

import pytest
from torch.fx import GraphModule

import weft
from tests.unit.plan.listings import buckets, decisions, gathers, graph, node, run
from weft.bucketing.eligibility import Key
from weft.bucketing.policy import SHARE, Policy, cap_from
from weft.cost.cluster import Cluster
from weft.errors import PipelineError
from weft.graph.groups import Group, GroupTable
from weft.graph.ops import Kind
from weft.graph.origins import module_paths
from weft.plan.decision import Reason

MIB = 1 << 20
NODE = Cluster.load("h100-8")


def key(kind: Kind = Kind.ALL_GATHER, group: str = "dp", size: int = 8) -> Key:
    return Key(kind, group, size, None, None, "cuda", None)


def table(**sizes: int) -> GroupTable:
    return GroupTable({name: Group(name, size) for name, size in sizes.items()})


# Caps.


def test_the_last_cap_holds_for_all_further_buckets():
    cap = cap_from((1, 2, 3), NODE, table(dp=8))
    assert [cap(key(), number) for number in range(5)] == [1, 2, 3, 3, 3]


@pytest.mark.parametrize(
    "kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.BROADCAST, Kind.ALL_TO_ALL]
)
@pytest.mark.parametrize("name", ["h100-8", "h100-8x8"])
def test_without_caps_the_cluster_says_where_bandwidth_is_reached(name: str, kind: Kind):
    cluster = Cluster.load(name)
    cap = cap_from((), cluster, table(dp=8))(key(kind), 3)
    assert cap == cluster.saturating_bytes(kind, Group("dp", 8), SHARE)
    assert MIB < cap < 1000 * MIB


def test_a_group_that_spans_nodes_has_another_cap_than_one_that_does_not():
    groups = GroupTable({"dp": Group("dp", 8, stride=8), "tp": Group("tp", 8)})
    cap = cap_from((), Cluster.load("h100-8x8"), groups)
    assert cap(key(group="dp"), 0) != cap(key(group="tp"), 0)


def test_a_first_cap_is_used_only_where_the_cluster_gives_the_others():
    given = cap_from((5,), NODE, table(dp=8), first=MIB)
    derived = cap_from((), NODE, table(dp=8), first=MIB)
    assert given(key(), 0) == 5
    assert derived(key(), 0) == MIB < derived(key(), 1)


def test_a_cluster_decides_what_fits_in_a_bucket():
    module = gathers(3, size=4 * MIB)  # 32 MiB each, received
    fast = weft.optimize(module, "h100-8", pipeline="bucket-all-gathers").plan.steps[0].actions
    slow = weft.optimize(module, "h100-8x8", pipeline="bucket-all-gathers").plan.steps[0].actions
    none = weft.optimize(module, pipeline="bucket-all-gathers").plan.steps[0].actions
    cap = Cluster.load("h100-8").saturating_bytes(Kind.ALL_GATHER, Group("dp", 2), SHARE)
    expected = 3 if cap >= 96 * MIB else 2 if cap >= 64 * MIB else 0
    found = [sum(len(action.launches) for action in actions) for actions in (fast, slow, none)]  # type: ignore[union-attr]
    assert found == [expected] * 3  # a group of two neighbours stays in its node in all of them


# Modules.


def with_modules(module: GraphModule, modules: dict[str, str]) -> GraphModule:
    """Give launches the stack of modules that tracing leaves: names of growing paths."""
    for name, path in modules.items():
        parts = path.split(".")
        paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
        node(module, name).meta["nn_module_stack"] = {f"L__{p}": (p, object) for p in paths}
    return module


LAYERS = {f"ag{i}": f"layers.{i // 2}.{'wq' if i % 2 else 'wo'}" for i in range(4)} | {"ag4": "norm", "ag5": "head"}


def test_each_module_that_matches_has_buckets_of_its_own():
    module = with_modules(gathers(6), LAYERS)
    assert buckets(module, "bucket-all-gathers{modules=layers.?}") == [("ag0", "ag1"), ("ag2", "ag3"), ("ag4", "ag5")]


def test_the_outermost_module_that_matches_decides():
    module = with_modules(gathers(6), LAYERS)
    assert buckets(module, "bucket-all-gathers{modules=layers/layers.*}") == [
        ("ag0", "ag1", "ag2", "ag3"),
        ("ag4", "ag5"),
    ]


def test_a_pattern_matches_dots_too():
    module = with_modules(gathers(6), LAYERS)
    assert buckets(module, "bucket-all-gathers{modules=layers.*.wq/layers.*.wo}") == [("ag4", "ag5")]


def test_without_patterns_modules_do_not_matter():
    module = with_modules(gathers(6), LAYERS)
    assert buckets(module, "bucket-all-gathers") == [tuple(f"ag{i}" for i in range(6))]


def test_caps_hold_within_each_module():
    module = with_modules(gathers(6), {f"ag{i}": f"layers.{i // 3}.w" for i in range(6)})
    assert buckets(module, "bucket-all-gathers{modules=layers.? max-bytes=64}") == [("ag0", "ag1"), ("ag3", "ag4")]


def test_prefetch_goes_module_by_module():
    module = with_modules(gathers(6), {f"ag{i}": f"layers.{i // 2}.w" for i in range(6)})
    listing = weft.listing(run(module, "bucket-all-gathers{modules=layers.? prefetch=1}").module)
    order = [
        word
        for line in listing.splitlines()
        for word in [line.strip().split(":")[0]]
        if "bucket" in word or "done" in word
    ]
    assert order == ["ag0_bucket", "ag2_bucket", "ag0_done", "ag4_bucket", "ag2_done", "ag4_done"]


def test_a_launch_without_modules_takes_those_of_its_input():
    module = graph("p: f32[4]", "c = clone(p)", "ag = all_gather(c, 2, 'dp')", "w = wait(ag)", returns="w")
    with_modules(module, {"c": "layers.3.wq"})
    assert module_paths(node(module, "ag")) == ["layers", "layers.3", "layers.3.wq"]
    policy = Policy(cap_from((1,), None, table()), modules=("layers.?",))
    assert policy.module_of(node(module, "ag")) == "layers.3"
    assert policy.module_of(node(module, "p")) is None


# Pins and bans.


def test_an_unknown_name_is_an_error_with_the_nearest_one():
    with pytest.raises(PipelineError) as error:
        run(gathers(2), "bucket-all-gathers{pinned=ag0+ag11}")
    assert str(error.value) == "bucket-all-gathers: the graph has no launch 'ag11'\ndid you mean 'ag1'?"


def test_names_of_launches_that_a_bucket_took_are_known_in_a_second_run():
    spec = "bucket-all-gathers{pinned=ag0+ag2 forbidden=ag1}"
    first = run(gathers(3), spec)
    (entry,) = run(first.module, spec).log
    assert not entry.changed


def test_a_forbidden_gather_stays_alone():
    found = [(d.reason, d.nodes) for d in decisions(gathers(2), "bucket-all-gathers{forbidden=ag1}")]
    assert found == [(Reason.ALONE, ("ag0",)), (Reason.FORBIDDEN, ("ag1",))]
