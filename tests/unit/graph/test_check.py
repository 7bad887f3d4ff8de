"""The invariants that listings cannot break: order, names, outputs. The others are golden, in invalid-graphs.md."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

import weft
from weft.errors import GraphError
from weft.graph import check
from weft.graph.dag import Dag

aten = torch.ops.aten
LISTING = "def graph(x: f32[2], y: f32[2]):\n    a: f32[2] = relu(x)\n    b: f32[2] = neg(a)\n    return [b]\n"


def nodes() -> dict[str, torch.fx.Node]:
    module = weft.parse(LISTING)
    found = {node.name: node for node in module.graph.nodes}
    found["x"].graph._module = module  # the graph lives as long as its module
    return found


def fault(order: list[torch.fx.Node]) -> str:
    with pytest.raises(GraphError) as error:
        check.validate(Dag(order))
    return str(error.value)


def test_a_valid_graph_passes_every_check():
    check.validate(Dag(list(nodes().values())))


def test_every_check_is_named_and_explained():
    assert all(invariant.__doc__ and invariant.__name__.count("_") >= 2 for invariant in check.INVARIANTS)
    assert len({invariant.__name__ for invariant in check.INVARIANTS}) == len(check.INVARIANTS) >= 6


def test_an_input_behind_another_node_is_refused():
    n = nodes()
    assert fault([n["x"], n["a"], n["y"], n["b"], n["output"]]) == (
        "graph: input y stands after a\n    y: f32[2]\n    ^\nput inputs first"
    )


def test_a_use_before_its_definition_is_refused():
    n = nodes()
    assert fault([n["x"], n["y"], n["b"], n["a"], n["output"]]) == (
        "graph: b uses a, which a later line defines\n    b: f32[2] = neg(a)\n    ^\nmove it after a"
    )


def test_an_argument_of_another_graph_is_refused():
    mine, others = nodes(), nodes()
    mine["b"].args = (others["a"],)
    dag = Dag.__new__(Dag)
    dag.nodes = list(mine.values())
    dag.index = {node: i for i, node in enumerate(dag.nodes)}
    with pytest.raises(GraphError) as error:
        check.definitions_come_before_uses(dag)
    assert str(error.value) == (
        "graph: b uses a, which another graph defines\n    b: f32[2] = neg(a)\n    ^\nmove it after a"
    )


def test_two_nodes_of_one_name_are_refused():
    n = nodes()
    n["b"].name = "a"
    assert fault([n["x"], n["y"], n["a"], n["b"], n["output"]]) == (
        "graph: two nodes are called a\n    a: f32[2] = neg(a)\n    ^\nrename one of them"
    )


def test_a_graph_without_an_output_is_refused():
    graph = Graph()
    graph.placeholder("x")
    assert fault(list(graph.nodes)) == "graph: it has 0 outputs, one at the end is needed"


def test_an_output_that_is_not_last_is_refused():
    n = nodes()
    order = [n["x"], n["y"], n["a"], n["output"], n["b"]]
    with pytest.raises(GraphError) as error:
        check.inputs_come_first_and_the_output_last(Dag(order))
    assert str(error.value) == "graph: it has 1 outputs, one at the end is needed"


def test_the_error_shows_the_source_line_of_the_user():
    module = weft.parse(
        "group('dp', size=2)\n\ndef graph(w3: f32[2, 4]):\n"
        "    ag3: f32[4, 4] = all_gather(w3, 2, 'dp')\n    return [w3]\n"
    )
    launch = next(node for node in module.graph.nodes if node.name == "ag3")
    launch.meta["stack_trace"] = 'File "/home/me/model.py", line 41, in forward\n    q = self.wq(x)\n'
    assert fault(list(module.graph.nodes)) == (
        "graph: ag3 is never waited for and is not an output of the graph\n"
        "    ag3: f32[4, 4] = all_gather(w3, 2, 'dp')\n"
        "    ^^^  model.py:41 in forward: q = self.wq(x)\n"
        "wait for it, return it, or delete the launch"
    )
