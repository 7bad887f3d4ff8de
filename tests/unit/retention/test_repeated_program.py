"""Programs of choices, put together from rows: the operations of the edited graph, in its order."""

from __future__ import annotations

import pytest

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
    assert Footprint(made).peak(range(len(made.names))) >= Footprint(exact).peak(range(len(exact.names)))
