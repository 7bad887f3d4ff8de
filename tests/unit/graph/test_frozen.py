"""Frozen graphs: analyses that are made later see the graph as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

import weft
from weft.graph.dag import Dag
from weft.graph.frozen import FrozenGraph

LISTING = """group('dp', size=2)

tensor('c', f32[4, 4])

def graph(x: f32[4, 4], p: f32[2, 4]):
    a: f32[4, 4] = mm(x, x)
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    w: f32[4, 4] = wait(ag)
    k: f32[4, 4] = attribute('c')
    r: f32[4, 4] = add(a, w)
    s: f32[4, 4] = add(r, k)
    return [s]
"""


def rename(module: GraphModule) -> None:
    next(iter(module.graph.nodes)).name = "y"


def swap(module: GraphModule) -> None:
    a, _, *_ = (node for node in module.graph.nodes if node.op == "call_function")
    list(module.graph.nodes)[-2].append(a)


def replace_input(module: GraphModule) -> None:
    a = next(node for node in module.graph.nodes if node.name == "a")
    a.args = (a.args[1], next(node for node in module.graph.nodes if node.name == "p"))


def change_value(module: GraphModule) -> None:
    a = next(node for node in module.graph.nodes if node.name == "a")
    a.meta["val"] = a.meta["val"].new_empty(8, 8)


def change_constant(module: GraphModule) -> None:
    module.c = torch.zeros(8, 8)


def erase(module: GraphModule) -> None:
    module.graph.erase_node(next(node for node in reversed(module.graph.nodes) if node.op == "output"))


@pytest.mark.parametrize("edit", [rename, swap, replace_input, change_value, change_constant, erase])
def test_an_edit_changes_nothing(edit: Callable[[GraphModule], None]):
    module = weft.parse(LISTING, {"c": torch.ones(4, 4)})
    frozen, before = FrozenGraph(module, Dag(module.graph)), weft.listing(module)
    edit(module)
    assert frozen.module is not module
    assert weft.listing(frozen.module) == before
    assert [node.name for node in frozen.dag.nodes] == [node.name for node in frozen.module.graph.nodes]


def test_a_graph_that_nobody_edited_serves_as_it_is():
    module = weft.parse(LISTING, {"c": torch.ones(4, 4)})
    frozen = FrozenGraph(module, dag := Dag(module.graph))
    assert (frozen.module, frozen.dag) == (module, dag)


def test_a_report_tells_of_the_graphs_as_they_were():
    told: list[str] = []
    for is_edited in (False, True):
        module = weft.parse(LISTING, {"c": torch.ones(4, 4)})
        result = weft.optimize(module, "h100-8")
        if is_edited:
            for each in (module, result.module):
                change_value(each)
                change_constant(each)
                swap(each)
        told.append(f"{result.plan.to_json()}{result.report.summary_lines()}{result.report.notes}")
    assert told[0] == told[1]
