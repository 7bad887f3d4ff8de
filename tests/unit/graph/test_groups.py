"""Process groups by names that every rank agrees on."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import weft
from tests.unit.conftest import fake_mesh
from tests.versions import needs_traced_groups
from weft.errors import GraphError
from weft.graph.groups import Group, GroupTable, group_argument, read_groups, runtime_name

FUNCTIONAL = torch.ops._c10d_functional


def step(x: torch.Tensor, *groups: object) -> torch.Tensor:
    """An all-reduce over each group in turn."""
    for group in groups:
        x = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_reduce(x, "sum", group))
    return x


def trace(*groups: object) -> GraphModule:
    return make_fx(lambda x: step(x, *groups), tracing_mode="fake")(torch.zeros(4))


@pytest.mark.parametrize(
    ("group", "num_ranks", "parts"),
    [
        (Group("dp", 2), 4, ((0, 1), (2, 3))),
        (Group("dp", 2, 2), 4, ((0, 2), (1, 3))),
        (Group("dp", 2, 2), 8, ((0, 2), (1, 3), (4, 6), (5, 7))),
        (Group("dp", 4), 4, ((0, 1, 2, 3),)),
        (Group("dp", 1), 3, ((0,), (1,), (2,))),
        (Group("dp", 3, 1, ((0, 1, 3), (2,))), 4, ((0, 1, 3), (2,))),
    ],
)
def test_a_group_partitions_the_ranks_of_a_world(group: Group, num_ranks: int, parts: tuple[tuple[int, ...], ...]):
    assert group.partition(num_ranks) == parts


def test_groups_that_do_not_tile_a_world_are_refused():
    with pytest.raises(GraphError) as error:
        Group("tp", 2, 2).partition(6)
    assert str(error.value) == (
        "group 'tp': groups of 2 ranks with stride 2 do not tile 6 ranks\n"
        "use a multiple of 4 ranks, or give the ranks of the group"
    )


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_the_axes_of_a_mesh_give_the_same_names_sizes_and_strides_on_every_rank(rank: int):
    with fake_mesh(rank) as mesh:
        table = read_groups(trace(mesh.get_group("dp").group_name, mesh.get_group("tp").group_name))
    assert list(table) == [Group("dp", 4, 2), Group("tp", 2, 1)]


def test_run_time_names_differ_by_rank_and_the_listing_does_not():
    listings, names = [], []
    for rank in (0, 3):
        with fake_mesh(rank) as mesh:
            module = trace(mesh.get_group("dp").group_name)
            listings.append(weft.listing(module))
            names.append(read_groups(module).runtime["dp"])
    assert names[0] != names[1]
    assert listings[0] == listings[1]
    assert listings[0].startswith("group('dp', size=4, stride=2)\n")


def test_groups_without_an_axis_are_numbered_by_their_ranks_and_never_by_their_use(mesh: DeviceMesh):
    pair, quad = dist.new_group([0, 1]), dist.new_group([0, 2, 4, 6])
    names = [quad.group_name, mesh.get_group("tp").group_name, pair.group_name]
    for order in itertools.permutations(names):
        table = read_groups(trace(*order))
        assert list(table) == [Group("g0", 4, 2), Group("g1", 2), Group("tp", 2)]
        assert table.runtime == {"g0": quad.group_name, "g1": pair.group_name, "tp": mesh.get_group("tp").group_name}


def test_groups_of_the_same_ranks_are_told_apart_by_the_order_of_their_creation(mesh: DeviceMesh):
    first, second = (dist.new_group([0, 1]).group_name for _ in range(2))
    for order in ((first, second), (second, first)):
        table = read_groups(trace(*order))
        assert list(table) == [Group("g0", 2), Group("g1", 2, id="#1")]
        assert table.runtime == {"g0": first, "g1": second}
    assert list(read_groups(trace(second))) == [Group("g0", 2, id="#1")]
    assert weft.listing(trace(first, second)) != weft.listing(trace(second, first))
    text = weft.listing(trace(second, first))
    assert text.startswith("group('g0', size=2)\ngroup('g1', size=2, id='#1')\n")
    assert weft.listing(weft.parse(text)) == text


def test_the_same_groups_have_the_same_listing_on_every_rank_whatever_else_a_rank_created():
    listings: list[str] = []
    for rank in (0, 5):
        with fake_mesh(rank):
            quads = ([0, 1, 2, 3], [4, 5, 6, 7])
            first, _, second = ([dist.new_group(ranks) for ranks in quads][rank // 4] for _ in range(3))
            listings.append(weft.listing(trace(second.group_name, first.group_name)))
    assert listings[0] == listings[1]
    assert listings[0].startswith("group('g0', size=4)\ngroup('g1', size=4, id='#2')\n")


def test_the_whole_world_is_a_group(mesh: DeviceMesh):
    assert list(read_groups(trace(dist.group.WORLD.group_name))) == [Group("g0", 8)]


def test_irregular_ranks_are_listed_one_by_one(mesh: DeviceMesh):
    odd = dist.new_group([0, 1, 3, 7])
    (group,) = read_groups(trace(odd.group_name))
    assert group == Group("g0", 4, 1, ((0, 1, 3, 7), (2,), (4,), (5,), (6,)))
    assert weft.listing(trace(odd.group_name)).startswith("group('g0', ranks=[[0, 1, 3, 7], [2], [4], [5], [6]])\n")


def test_a_group_that_does_not_begin_at_a_multiple_of_its_size_keeps_its_ranks():
    with fake_mesh(1):
        (group,) = read_groups(trace(dist.new_group([1, 2]).group_name))
    assert (1, 2) in group.partition(8)


def test_two_groups_of_one_axis_name_stay_two(mesh: DeviceMesh):
    first = dist.new_group([0, 1], group_desc="mesh_tp")
    table = read_groups(trace(mesh.get_group("tp").group_name, first.group_name))
    assert list(table) == [Group("tp", 2), Group("g1", 2, id="tp#1")]
    assert table.canonical(first.group_name) == "g1"
    assert list(read_groups(trace(first.group_name))) == [Group("tp", 2, id="tp#1")]


def test_a_group_that_is_a_node_with_a_process_group_is_read(mesh: DeviceMesh):
    group = mesh.get_group("dp")
    graph = Graph()
    x, node = graph.placeholder("x"), graph.placeholder("group")
    node.meta["val"] = group
    launch = graph.call_function(FUNCTIONAL.all_reduce.default, (x, "sum", node))
    graph.output([launch])
    table = read_groups(GraphModule({}, graph))
    assert list(table) == [Group("dp", 4, 2)]
    assert group_argument(launch) is node
    assert table.canonical(node) == table.canonical(group) == table.canonical(group.group_name) == "dp"


@needs_traced_groups
def test_a_traced_process_group_is_read_through_the_attribute_that_holds_it(mesh: DeviceMesh):
    module = trace(mesh.get_group("dp"))
    assert [node.op for node in module.graph.nodes if "opaque" in node.name] == ["get_attr"]
    assert list(read_groups(module)) == [Group("dp", 4, 2)]


def test_sizes_come_from_the_launches_where_there_is_no_process_group():
    graph = Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(FUNCTIONAL.all_gather_into_tensor.default, (x, 16, "weights"))])
    assert list(read_groups(GraphModule({}, graph))) == [Group("weights", 16)]


def test_a_name_that_is_no_identifier_gets_a_canonical_one():
    graph = Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(FUNCTIONAL.all_gather_into_tensor.default, (x, 2, "17"))])
    table = read_groups(GraphModule({}, graph))
    assert list(table) == [Group("g0", 2)]
    assert table.runtime == {"g0": "17"}


def test_names_that_no_process_group_explains_are_in_the_order_in_which_torch_counts_them():
    for order in (("10", "9"), ("9", "10")):
        table = read_groups(trace_without_groups(*order))
        assert table.runtime == {"g0": "9", "g1": "10"}
        assert [group.identity for group in table] == ["9", "10"]
        assert table.unplaced == {"g0", "g1"}


def trace_without_groups(*groups: str) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(FUNCTIONAL.all_gather_into_tensor.default, (x, 2, group)) for group in groups])
    return GraphModule({}, graph)


def test_given_sizes_and_ranks_win():
    module = weft.parse("group('dp', size=2)\ndef graph(x: f32[2]):\n    return [x]\n")
    assert list(read_groups(module, {"dp": 4})) == [Group("dp", 4)]
    assert list(read_groups(module, {"dp": [[0, 2], [1, 3]]})) == [Group("dp", 2, 1, ((0, 2), (1, 3)))]


def test_a_module_carries_its_table():
    module = weft.parse("group('dp', size=4, stride=2)\ndef graph(x: f32[2]):\n    return [x]\n")
    assert list(read_groups(module)) == [Group("dp", 4, 2)]


def test_an_unknown_group_is_refused():
    with pytest.raises(GraphError) as error:
        GroupTable().group("dp")
    assert str(error.value) == "groups: group 'dp' is not in the table\ngive it: groups={'dp': 8}"


def test_what_is_no_group_is_refused():
    with pytest.raises(GraphError) as error:
        runtime_name(3)
    assert str(error.value) == "groups: int is not a process group\npass a name or a group"
