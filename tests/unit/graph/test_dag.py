"""Dag: edges and reachability, against brute force on random graphs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch.fx import Graph, Node

import weft
from weft.graph.dag import Dag

SEEDS = range(40)
aten = torch.ops.aten


def random_graph(seed: int, size: int = 30) -> Graph:
    """A graph of additions, each of one or two earlier nodes."""
    draw = random.Random(seed)
    graph = Graph()
    nodes = [graph.placeholder(f"x{k}") for k in range(3)]
    for k in range(size):
        nodes.append(graph.call_function(aten.add.Tensor, tuple(draw.choices(nodes[-8:], k=2)), name=f"n{k}"))
    graph.output(nodes[-3:])
    return graph


def ancestors(nodes: list[Node], merged: Sequence[set[Node]] = ()) -> dict[Node, set[Node]]:
    """For each node all that must come before it, where the nodes of each merged set count as one."""
    of = {node: frozenset(group) for group in merged for node in group}
    classes = {node: of.get(node, frozenset([node])) for node in nodes}
    found: dict[Node, set[Node]] = {}
    for node in nodes:
        seen: set[Node] = set()
        stack = [source for member in classes[node] for source in member.all_input_nodes if source not in classes[node]]
        while stack:
            source = stack.pop()
            if source in seen:
                continue
            seen |= classes[source]
            stack += [s for member in classes[source] for s in member.all_input_nodes]
        found[node] = seen
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_reaches_is_the_transitive_closure(seed: int):
    graph = random_graph(seed)
    nodes = list(graph.nodes)
    draw = random.Random(seed + 1000)
    registered = draw.sample([n for n in nodes if n.op == "call_function"], 8)
    dag, before = Dag(graph, register=registered), ancestors(nodes)
    for first in registered:
        for other in nodes:
            assert dag.reaches(first, other) == (first in before[other])
            assert dag.reaches(other, first) == (other in before[first])


LISTING = """group('dp', size=2)

def graph(x: f32[4], y: f32[4]):
    a = all_reduce(x, 'sum', 'dp')
    w = wait(a)
    c = copy_(x, y)
    b = all_reduce(x, 'sum', 'dp')
    v = wait(b)
    r = add(w, v)
    return [r]
"""


def test_launches_are_registered_by_themselves():
    dag = Dag(weft.parse(LISTING).graph)
    nodes = {node.name: node for node in dag.nodes}
    assert sorted(dag.nodes[i].name for i in dag.bits) == ["a", "b"]
    assert dag.reaches(nodes["a"], nodes["r"])


def test_effects_count_as_edges():
    """No data leads from the first launch to the second: the write in between does."""
    dag = Dag(weft.parse(LISTING).graph)
    nodes = {node.name: node for node in dag.nodes}
    assert dag.reaches(nodes["a"], nodes["b"])


def test_the_issue_order_is_kept_apart():
    text = LISTING.replace("    c = copy_(x, y)\n", "")
    dag = Dag(weft.parse(text).graph)
    nodes = {node.name: node for node in dag.nodes}
    assert [(dag.nodes[i].name, dag.nodes[j].name) for i, j in dag.queue] == [("a", "b")]
    assert not dag.reaches(nodes["a"], nodes["b"])


def test_a_dag_of_some_nodes_is_in_the_order_given():
    graph = random_graph(0)
    nodes = list(graph.nodes)
    assert Dag(nodes).nodes == nodes
    assert Dag(graph).index == {node: i for i, node in enumerate(nodes)}


def test_every_edge_stands_once():
    dag = Dag(weft.parse(LISTING).graph)
    assert all(len(preds) == len(set(preds)) for preds in dag.preds)
    pairs = sorted((i, j) for j, preds in enumerate(dag.preds) for i in preds)
    assert pairs == sorted((i, j) for i, succs in enumerate(dag.succs) for j in succs)
