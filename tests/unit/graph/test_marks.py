"""A listing and its marks carry a captured graph to another process."""

from __future__ import annotations

import pickle

import weft.zoo
from weft.graph.edit import IN_POLICY_KEY, MEMBERS_KEY
from weft.graph.listings.text import parse, render
from weft.graph.marks import marks_of, put_marks

LISTING = """def graph(x: f32[4, 4]):
    a: f32[4, 4] = relu(x)
    b: f32[4, 4] = relu(a)
    return [b]
"""


def test_phases_and_modules_of_a_captured_step_arrive():
    module = weft.zoo.load("llama-debug", "fsdp", ranks=2, layers=1)
    marks = pickle.loads(pickle.dumps(marks_of(module)))
    copy = parse(render(module))
    put_marks(copy, marks)
    assert marks_of(copy) == marks
    assert {mark[1] for mark in marks} >= {"is_forward", "is_backward"}
    assert any(path == "layers.0.attention" for mark in marks for _, path, _ in mark[2])


def test_operators_under_a_checkpointing_policy_arrive():
    module = weft.zoo.load("llama-debug", "fsdp", ranks=2, layers=1, checkpoint="full")
    copy = parse(render(module))
    put_marks(copy, marks_of(module))
    asked = [node.name for node in copy.graph.nodes if node.meta.get(IN_POLICY_KEY)]
    assert asked == [node.name for node in module.graph.nodes if node.meta.get(IN_POLICY_KEY)]
    assert asked


def test_nodes_that_a_bucket_replaced_arrive():
    module = parse(LISTING)
    node = next(node for node in module.graph.nodes if node.name == "b")
    node.meta[MEMBERS_KEY] = ("c", "d")
    copy = parse(LISTING)
    put_marks(copy, marks_of(module))
    assert [(node.name, node.meta.get(MEMBERS_KEY)) for node in copy.graph.nodes][2] == ("b", ("c", "d"))


def test_a_graph_without_marks_has_none():
    assert marks_of(parse(LISTING)) == ()
