"""Programs of choices, put together from rows: the operations of the edited graph, in its order."""

from __future__ import annotations

import pytest

import weft
from tests.unit.retention.test_decisions import CLUSTER, captured, sites_of
from weft.cost.cluster import Cluster
from weft.graph.dag import Dag
from weft.graph.edit import Edit, copy_graph
from weft.graph.groups import read_groups
from weft.retention.rebuild import rebuild
from weft.retention.repeated_program import repeated_program
from weft.retention.repeats import repeat
from weft.simulation.build import program_of
from weft.simulation.memory import Footprint


@pytest.mark.parametrize("part", [0, 2, 3])
def test_the_rows_are_those_of_the_edited_graph(part: int):
    module = captured()
    sites = sites_of(module)
    kept = {site for site in sites.needed if part == 0 or site % part}
    action = rebuild(sites, kept | sites.stops)
    assert action is not None
    graph = copy_graph(module.graph)
    with Edit(graph, keep_issue_order=False) as edit:
        repeat(edit, {node.name: node for node in graph.nodes}, action)
    exact = program_of(Dag(graph), read_groups(module), Cluster.load(CLUSTER))
    made = repeated_program(sites, action).program
    assert made.names == exact.names
    assert made.kinds == exact.kinds
    data = [{exact.names[j] for j in preds} for preds in exact.preds]
    assert all({made.names[j] for j in preds} <= found for preds, found in zip(made.preds, data, strict=True))
    assert [len(used) for used in made.uses] == [len(used) for used in exact.uses]
    assert Footprint(made).peak(range(len(made.names))) >= Footprint(exact).peak(range(len(exact.names)))


def test_a_late_view_of_a_value_that_is_made_again_does_not_keep_the_first_one():
    text = """def graph(x: f32[256, 256], w: f32[256, 256]):
    a: f32[256, 256] = relu(x)
    b: f32[256, 256] = mm(a, w)
    c: f32[256, 256] = mm(b, w)
    a_t: f32[256, 256] = transpose.int(a, 0, 1)
    d: f32[256, 256] = mm(c, b)
    e: f32[256, 256] = mm(d, a_t)
    return [e]
"""
    module = weft.parse(text)
    sites = sites_of(module)
    assert sites.dag.nodes[sites.cut].name == "a_t"
    action = rebuild(sites, {site for site in sites.needed if sites.dag.nodes[site].name != "a"})
    assert action is not None
    made = repeated_program(sites, action).program
    assert "a_again" in made.names
    order = [made.names.index(name) for name in ("x", "w", "a", "b", "c", "d", "a_again", "a_t", "e", "output")]
    assert Footprint(made).peak(order) == 5 * 256 * 256 * 4  # at the end: x, w, d, a_again, e
