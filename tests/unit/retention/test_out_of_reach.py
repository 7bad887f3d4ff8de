"""Graphs that a compiler has cut: the report says what no choice reaches."""

from __future__ import annotations

import pytest
from torch.fx import GraphModule

import weft
from weft.graph.origins import PHASE_KEY
from weft.plan.decision import Decision

FORWARD = """
def graph(primals_1: f32[1024, 1024], primals_2: f32[1024, 1024]):
    mm: f32[1024, 1024] = mm(primals_1, primals_2)
    relu: f32[1024, 1024] = relu(mm)
    sum_1: f32[()] = sum(relu)
    return [sum_1, primals_1, mm, relu]
"""
BACKWARD = """
def graph(primals_1: f32[1024, 1024], mm: f32[1024, 1024], relu: f32[1024, 1024], tangents_1: f32[()]):
    expand: f32[1024, 1024] = expand(tangents_1, [1024, 1024])
    mul: f32[1024, 1024] = mul(expand, relu)
    t: f32[1024, 1024] = t(primals_1)
    mm_1: f32[1024, 1024] = mm(t, mul)
    mul_1: f32[1024, 1024] = mul(mm_1, mm)
    return [mul_1]
"""


def without_nodes(module: GraphModule) -> list[Decision]:
    """The decisions about the graph as a whole."""
    report = weft.optimize(module, "h100-8", pipeline="decide-memory", memory_limit_bytes=1 << 30).report
    return [each for each in report.refusals if each.pass_name == "decide-memory" and not each.nodes]


@pytest.mark.parametrize(
    ("phase", "listing", "found"),
    [("forward", FORWARD, "3 values, 8.00 MiB"), ("backward", BACKWARD, "2 values, 8.00 MiB")],
)
def test_one_decision_counts_the_values_between_the_parts(phase: str, listing: str, found: str):
    module = weft.parse(listing)
    assert without_nodes(module) == []
    module.meta[PHASE_KEY] = phase
    (decision,) = without_nodes(module)
    assert found in decision.sentence
    assert phase in decision.sentence


def test_a_graph_whose_nodes_all_belong_to_backward_is_backward():
    module = weft.parse(BACKWARD)
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta["partitioner_tag"] = "is_backward"
    (decision,) = without_nodes(module)
    assert "backward" in decision.sentence
