"""Reads and writes by storage and by node."""

from __future__ import annotations

import weft
from weft.graph.dag import Dag

LISTING = """
def graph(x: f32[4], y: f32[4]):
    ag: f32[8] = all_gather(x, 2, 'dp')
    w: f32[8] = wait(ag)
    e: f32[8] = neg_(w)
    a: f32[4] = relu(y)
    c: f32[4] = copy_(y, x)
    v: f32[4] = view(y, [4])
    b: f32[4] = relu(v)
    d: f32[4] = copy_(y, b)
    return [w, a, b]
"""


def memory_of() -> tuple[Dag, dict[str, int], int]:
    dag = Dag(weft.parse(LISTING).graph)
    ids = {node.name: i for i, node in enumerate(dag.nodes)}
    return dag, ids, dag.effects.held(ids["y"])[0]


def test_writes_are_found_strictly_between_two_positions():
    dag, ids, y = memory_of()
    memory = dag.effects.memory
    assert memory.writes[y] == [ids["c"], ids["d"]]
    assert memory.first_write(y, -1) == ids["c"]
    assert memory.first_write(y, ids["c"]) == ids["d"]
    assert memory.first_write(y, ids["c"], ids["d"]) is None
    assert memory.first_write(y, ids["d"]) is None
    assert memory.num_writes_before(y, ids["c"]) == 0
    assert memory.num_writes_before(y, ids["b"]) == 1


def test_the_result_of_a_launch_is_written_but_not_directly():
    dag, ids, y = memory_of()
    memory, result = dag.effects.memory, dag.effects.held(ids["w"])[0]
    assert memory.writes[result] == [ids["ag"], ids["w"], ids["e"]]
    assert memory.direct_writes[result] == [ids["e"]]
    assert memory.first_direct_write(result, -1, ids["e"]) is None
    assert memory.first_direct_write(y, -1, ids["d"]) == ids["c"]
    assert memory.written == {result, y}


def test_a_read_through_a_view_is_an_access_to_the_storage():
    dag, ids, y = memory_of()
    memory = dag.effects.memory
    assert list(memory.accesses_after(y, ids["a"], ids["b"])) == [ids["c"], ids["b"]]
    assert memory.by_node[ids["b"]] == [(y, False)]


def test_a_storage_that_nothing_writes_is_not_listed():
    dag, ids, _ = memory_of()
    x = dag.effects.held(ids["x"])[0]
    assert x not in dag.effects.memory.writes
    assert x not in dag.effects.memory.by_storage
