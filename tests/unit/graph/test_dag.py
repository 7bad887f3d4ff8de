"""Dag: reachability, cycles and contraction, against brute force on random graphs."""

from __future__ import annotations

import random

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


def ancestors(nodes: list[Node], merged: list[set[Node]] | None = None) -> dict[Node, set[Node]]:
    """For each node all that must come before it, where the nodes of each merged set count as one."""
    of = {node: frozenset(group) for group in merged or [] for node in group}
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


@pytest.mark.parametrize("seed", SEEDS)
def test_nodes_would_cycle_exactly_if_one_needs_another(seed: int):
    graph = random_graph(seed)
    draw = random.Random(seed + 2000)
    candidates = [n for n in graph.nodes if n.op == "call_function"]
    dag, before = Dag(graph, register=candidates), ancestors(list(graph.nodes))
    for size in (2, 3, 4):
        for _ in range(20):
            chosen = draw.sample(candidates, size)
            expected = any(a in before[b] for a in chosen for b in chosen if a is not b)
            assert dag.would_cycle(chosen) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_merged_nodes_reach_what_each_of_them_reaches(seed: int):
    """Merge one bucket after another, as long as none closes a cycle; ask about every pair after each."""
    graph = random_graph(seed)
    nodes = list(graph.nodes)
    draw = random.Random(seed + 3000)
    candidates = [n for n in nodes if n.op == "call_function"]
    dag = Dag(graph, register=candidates)
    merged: list[set[Node]] = []
    free = list(candidates)
    for _ in range(6):
        chosen = draw.sample(free, 2)
        before = ancestors(nodes, merged)
        assert dag.would_cycle(chosen) == any(a in before[b] for a in chosen for b in chosen if a is not b)
        if dag.would_cycle(chosen):
            continue
        dag.merge(chosen)
        merged.append(set(chosen))
        free = [node for node in free if node not in chosen]
        before = ancestors(nodes, merged)
        for a in candidates:
            for b in candidates:
                same = any(a in group and b in group for group in merged)
                assert same or a is b or dag.reaches(a, b) == (a in before[b]), (a, b)


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_merged_nodes_reach_nodes_that_are_not_registered(seed: int):
    graph = random_graph(seed)
    nodes = list(graph.nodes)
    registered = random.Random(seed).sample([n for n in nodes if n.op == "call_function"], 10)
    dag = Dag(graph, register=registered)
    pair = next([a, b] for k, a in enumerate(registered) for b in registered[k + 1 :] if not dag.would_cycle([a, b]))
    dag.merge(pair)
    before = ancestors(nodes, [set(pair)])
    for first in registered:
        others = [node for node in nodes if node not in pair]
        assert [n for n in others if dag.reaches(first, n) != (first in before[n])] == []
        assert [n for n in others if dag.reaches(n, first) != (n in before[first])] == []


@pytest.mark.parametrize("seed", SEEDS)
def test_merged_buckets_grow(seed: int):
    """A bucket takes one more member at a time, as bucketing does."""
    graph = random_graph(seed)
    nodes = list(graph.nodes)
    candidates = [n for n in nodes if n.op == "call_function"]
    dag = Dag(graph, register=candidates)
    bucket = [random.Random(seed).choice(candidates)]
    for node in candidates:
        before = ancestors(nodes, [set(bucket)])
        expected = node in bucket or any(node in before[b] for b in bucket) or any(b in before[node] for b in bucket)
        if node in bucket:
            continue
        assert dag.would_cycle([*bucket, node]) == expected
        if not expected:
            bucket.append(node)
            dag.merge(bucket)
    before = ancestors(nodes, [set(bucket)])
    outside = [node for node in candidates if node not in bucket]
    for a in bucket:
        assert [dag.reaches(a, b) for b in outside] == [a in before[b] for b in outside]
        assert [dag.reaches(b, a) for b in outside] == [b in before[a] for b in outside]


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
    assert dag.would_cycle([nodes["a"], nodes["b"]])


def test_the_issue_order_is_kept_apart():
    text = LISTING.replace("    c = copy_(x, y)\n", "")
    dag = Dag(weft.parse(text).graph)
    nodes = {node.name: node for node in dag.nodes}
    assert [(dag.nodes[i].name, dag.nodes[j].name) for i, j in dag.queue] == [("a", "b")]
    assert not dag.reaches(nodes["a"], nodes["b"])
    assert not dag.would_cycle([nodes["a"], nodes["b"]])


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
