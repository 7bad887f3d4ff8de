"""Nested graphs that run once and communicate: their values, their constants, and the order of their launches."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.errors import VerificationError
from weft.graph.groups import read_groups
from weft.verification.agreement.issue_order import read_order
from weft.verification.inlining import inlined_graph
from weft.verification.rank import RankResult
from weft.verification.virtual.cluster import VirtualCluster

ORDERED = """group('dp', size=2)

def graph(x: f32[2], y: f32[2, 2]):
    def done(a: f32[4], b: f32[2, 2]):
        def last(c: f32[4]):
            u: f32[4] = wait(c)
            return u
        last = attribute('last')
        v: f32[4] = view(a, [4])
        w: f32[4] = higher_order.control_deps((b,), last, v)
        s: f32[4] = neg(w)
        return (w, s)
    ag: f32[4] = all_gather(x, 2, 'dp')
    m: f32[2, 2] = mm(y, y)
    done = attribute('done')
    both: (f32[4], f32[4]) = higher_order.control_deps((m,), done, ag, m)
    w: f32[4] = both[0]
    s: f32[4] = both[1]
    r: f32[4] = add(w, s)
    return [w, s, r]
"""
REPEATED = """group('dp', size=2)
tensor('c', f32[2], [1.0, 1.0])

def graph(x: f32[2]):
    def layer(a: f32[2]):
        c: f32[2] = attribute('c')
        p: f32[2] = add_(c, a)
        l: f32[2] = all_reduce(p, 'sum', 'dp')
        w: f32[2] = wait(l)
        return (w,)
    layer = attribute('layer')
    o: (f32[2],) = higher_order.invoke_subgraph(layer, 'layer', x)
    h: f32[2] = o[0]
    o2: (f32[2],) = higher_order.invoke_subgraph(layer, 'layer', h)
    h2: f32[2] = o2[0]
    return [h2]
"""


def run(module: torch.fx.GraphModule, *rest: torch.Tensor) -> list[RankResult]:
    inputs = [[torch.arange(2.0) + 10 * rank, *rest] for rank in range(2)]
    return VirtualCluster(2).run(module, inputs, read_groups(module))


def test_values_are_computed_through_waits_in_nested_control_deps():
    module = weft.parse(ORDERED)
    for found in run(module, torch.eye(2)):
        assert [output.tolist() for output in found.outputs] == [
            [0.0, 1.0, 10.0, 11.0],
            [-0.0, -1.0, -10.0, -11.0],
            [0.0] * 4,
        ]
    assert weft.verify(module, weft.parse(ORDERED))


def test_a_read_between_the_launch_and_the_nested_wait_is_found():
    module = weft.parse(
        ORDERED.replace("    m: f32[2, 2] = mm(y, y)", "    early = neg(ag)\n    m: f32[2, 2] = mm(y, y)")
    )
    with pytest.raises(VerificationError, match="early reads"):
        run(module, torch.eye(2))


def test_the_module_stays_as_it_was():
    module = weft.parse(ORDERED)
    before = weft.listing(module)
    assert inlined_graph(module) is not module.graph
    assert weft.listing(module) == before


def test_a_constant_of_a_repeated_graph_is_one_tensor_on_each_rank():
    module = weft.parse(REPEATED)
    first, second = run(module)
    # c is [1, 2] and [11, 12] on the two ranks after the first layer, and h is their sum: [12, 14].
    assert first.outputs[0].tolist() == second.outputs[0].tolist() == [13.0 + 23.0, 16.0 + 26.0]
    assert [{name: c.tolist() for name, c in found.constants.items()} for found in (first, second)] == [
        {"layer.c": [13.0, 16.0]},
        {"layer.c": [23.0, 26.0]},
    ]


def test_the_order_of_launches_contains_those_of_nested_graphs_that_run_once():
    order = read_order(weft.parse(REPEATED))
    assert [type(event).__name__ for event in order.events] == ["IssuedLaunch", "IssuedWait"] * 2
    (launch, wait) = read_order(weft.parse(ORDERED)).events
    assert (launch.node, wait.node) == ("ag", "u")
