"""Orders: topological sorts by rank, groups side by side, and the error where no order exists."""

from __future__ import annotations

import random

import pytest

import weft
from weft.errors import GraphError
from weft.graph.dag import Dag
from weft.graph.orders import contracted, topological

CHAIN = """
def graph(x: f32[4], y: f32[4]):
    a: f32[4] = relu(x)
    b: f32[4] = neg(a)
    c: f32[4] = neg(y)
    d: f32[4] = relu(b)
    return [c, d]
"""


def test_the_lowest_rank_of_the_free_nodes_goes_first_and_equal_ranks_go_by_number():
    succs = [[3], [3], [], []]
    assert topological(succs, [1, 1, 0, 0]) == [2, 0, 1, 3]


def test_an_edge_may_be_named_twice():
    assert topological([[1, 1], []], [1, 0]) == [0, 1]


def test_nodes_in_a_cycle_and_those_that_need_one_are_left_out():
    assert topological([[1], [2], [1, 3], []], [0, 0, 0, 0]) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_each_node_is_the_lowest_of_those_that_were_free(seed: int):
    draw = random.Random(seed)
    size = 20
    succs = [sorted(draw.sample(range(i + 1, size), min(2, size - i - 1))) for i in range(size)]
    rank = [draw.randrange(8) for _ in range(size)]
    preds = {j: [i for i in range(size) if j in succs[i]] for j in range(size)}
    expected: list[int] = []
    while len(expected) < size:
        free = [i for i in range(size) if i not in expected and all(p in expected for p in preds[i])]
        expected.append(min(free, key=lambda i: (rank[i], i)))
    assert topological(succs, rank) == expected


def test_a_group_stands_where_its_last_node_stood():
    dag = Dag(weft.parse(CHAIN).graph)
    named = {node.name: node for node in dag.nodes}
    order = contracted(dag, [[named["a"], named["c"]]])
    assert [node.name for node in order] == ["x", "y", "a", "c", "b", "d", "output"]


def test_a_group_that_another_node_has_to_stand_inside_is_refused_with_the_cycle():
    dag = Dag(weft.parse(CHAIN).graph)
    named = {node.name: node for node in dag.nodes}
    with pytest.raises(GraphError, match="b before a and d before b"):
        contracted(dag, [[named["a"], named["d"]]])
