"""Contraction: what merged nodes need and what needs them, against brute force on random graphs."""

from __future__ import annotations

import random

import pytest
from torch.fx import Node

import weft
from tests.unit.graph.test_dag import LISTING, SEEDS, ancestors, random_graph
from weft.graph.contraction import Contraction
from weft.graph.dag import Dag


def cycles(contraction: Contraction, nodes: list[Node]) -> bool:
    return contraction.why_not_merge([contraction.dag.index[node] for node in nodes]) is not None


def merge(contraction: Contraction, nodes: list[Node]) -> None:
    contraction.merge([contraction.dag.index[node] for node in nodes])


def needs(contraction: Contraction, node: Node) -> set[Node]:
    dag = contraction.dag
    supernode, before = contraction.supernode(dag.index[node]), contraction.before(dag.index[node])
    return {dag.nodes[i] for i, bit in dag.bits.items() if before & ~supernode.members & 1 << bit}


@pytest.mark.parametrize("seed", SEEDS)
def test_nodes_cannot_merge_exactly_if_one_needs_another(seed: int):
    graph = random_graph(seed)
    draw = random.Random(seed + 2000)
    candidates = [n for n in graph.nodes if n.op == "call_function"]
    contraction, before = Contraction(Dag(graph, register=candidates)), ancestors(list(graph.nodes))
    for size in (2, 3, 4):
        for _ in range(20):
            chosen = draw.sample(candidates, size)
            expected = any(a in before[b] for a in chosen for b in chosen if a is not b)
            assert cycles(contraction, chosen) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_merged_nodes_need_what_each_of_them_needs(seed: int):
    """Merge one bucket after another, as long as none closes a cycle; ask about every node after each."""
    graph = random_graph(seed)
    nodes = list(graph.nodes)
    draw = random.Random(seed + 3000)
    candidates = [n for n in nodes if n.op == "call_function"]
    contraction = Contraction(Dag(graph, register=candidates))
    merged: list[set[Node]] = []
    for _ in range(12):
        chosen = draw.sample(candidates, 2)
        chosen = [n for n in chosen if not any(n in group for group in merged)]
        before = ancestors(nodes, merged)
        assert cycles(contraction, chosen) == any(a in before[b] for a in chosen for b in chosen if a is not b)
        if len(chosen) < 2 or cycles(contraction, chosen):
            continue
        merge(contraction, chosen)
        merged.append(set(chosen))
        before = ancestors(nodes, merged)
        for node in candidates:
            assert needs(contraction, node) == {n for n in before[node] if n in candidates}, node


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_grow_by_nodes_and_by_blocks(seed: int):
    """Random merges of what is merged already, as pinned buckets and growing ones are."""
    graph = random_graph(seed)
    nodes = list(graph.nodes)
    draw = random.Random(seed + 4000)
    candidates = [n for n in nodes if n.op == "call_function"]
    contraction = Contraction(Dag(graph, register=candidates))
    merged: list[set[Node]] = []
    for _ in range(20):
        chosen = draw.sample(candidates, 2)
        union = set(chosen).union(*(group for group in merged if group & set(chosen)))
        others = [group for group in merged if not group & union]
        before = ancestors(nodes, others)
        expected = any(a in before[b] for a in union for b in union if a is not b)
        assert cycles(contraction, chosen) == expected
        if not expected:
            merge(contraction, chosen)
            merged = [*others, union]


def test_what_keeps_nodes_apart_is_named():
    dag = Dag(weft.parse(LISTING).graph)
    nodes = {node.name: node for node in dag.nodes}
    found = Contraction(dag).why_not_merge([dag.index[nodes["a"]], dag.index[nodes["b"]]])
    assert found is not None
    assert dag.nodes[found].name == "a"


def test_the_issue_order_keeps_nothing_apart():
    dag = Dag(weft.parse(LISTING.replace("    c = copy_(x, y)\n", "")).graph)
    nodes = {node.name: node for node in dag.nodes}
    assert not cycles(Contraction(dag), [nodes["a"], nodes["b"]])
