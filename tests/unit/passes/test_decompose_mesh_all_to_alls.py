"""All-to-alls in two steps: the same values on meshes of several shapes, and made only where they are faster."""

from __future__ import annotations

import pytest
from torch.fx import GraphModule

import weft
from weft.plan.decision import Reason

HEAD = """
group('inner', size={inner}{inner_stride})
group('outer', size={outer}{outer_stride})
group('ep', size={ranks})

def graph(x: f32[{rows}, 3], g: f32[4], h: f32[4]):
    ar: f32[4] = all_reduce(g, 'sum', 'inner')
    g1: f32[4] = wait(ar)
    ar1: f32[4] = all_reduce(h, 'sum', 'outer')
    h1: f32[4] = wait(ar1)
    a2a: f32[{rows}, 3] = all_to_all(x, {parts}, {parts}, 'ep')
    w: f32[{rows}, 3] = wait(a2a)
    return [g1, h1, w]
"""


def exchange(inner: int, outer: int, rows_per_part: int = 2, is_swapped: bool = False) -> GraphModule:
    """An all-to-all over `inner * outer` ranks; swapped: the ranks of `inner` are those across the others."""
    ranks = inner * outer
    strides = ("", f", stride={inner}") if not is_swapped else (f", stride={outer}", "")
    text = HEAD.format(
        inner=inner,
        outer=outer,
        inner_stride=strides[0],
        outer_stride=strides[1],
        ranks=ranks,
        rows=ranks * rows_per_part,
        parts=[rows_per_part] * ranks,
    )
    return weft.parse(text)


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(2, 2), (2, 3), (4, 2)])
def test_two_steps_deliver_the_same_parts(inner: int, outer: int, is_swapped: bool):
    module = exchange(inner, outer, is_swapped=is_swapped)
    result = weft.optimize(module, pipeline="decompose-mesh-all-to-alls{always=true}")
    assert [decision.nodes for decision in result.report.applied] == [("a2a",)]
    assert weft.listing(result.module).count("= all_to_all(") == 2
    assert weft.verify(module, result.module, ranks=inner * outer).bitwise


def test_small_messages_between_nodes_take_two_steps_and_are_faster():
    module = exchange(8, 4)
    result = weft.optimize(module, "h100-4x8", pipeline="decompose-mesh-all-to-alls")
    assert result.report.applied
    assert weft.simulate(result.module, "h100-4x8").step_us < weft.simulate(module, "h100-4x8").step_us


def test_inside_of_a_node_the_exchange_stays_whole():
    result = weft.optimize(exchange(4, 2), "h100-1x8", pipeline="decompose-mesh-all-to-alls")
    assert [decision.reason for decision in result.report.declined] == [Reason.NO_GAIN]


def test_groups_that_are_no_axes_of_the_exchange_are_not_used():
    """Two groups of neighbours do not reach all ranks."""
    text = HEAD.format(inner=2, outer=2, inner_stride="", outer_stride="", ranks=4, rows=4, parts=[1] * 4)
    result = weft.optimize(weft.parse(text), pipeline="decompose-mesh-all-to-alls{always=true}")
    assert not result.report.applied
