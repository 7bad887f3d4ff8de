"""The graphs of simple pipelines as candidates of the planner: what leads to them, and what stays as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch.fx import GraphModule

import weft
from weft.errors import WeftError
from weft.graph.dag import Dag
from weft.graph.edit import copy_module
from weft.graph.groups import read_groups
from weft.graph.listings.text import render
from weft.passes.base import parse_pass
from weft.passes.communication.schedule_overlap import KINDS, ScheduleOverlap
from weft.passes.pipeline import Pipeline, replay
from weft.passes.portfolio import all_choices, variants
from weft.plan.context import Context
from weft.plan.plan import Arrange, Merge, Plan, Settle, Step

MIXED = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4], q: bf16[2, 4], g: f32[4, 4]):
    ag0: f32[4, 4] = all_gather(p, 2, 'dp')
    w0: f32[4, 4] = wait(ag0)
    a: f32[4, 4] = mm(x, w0)
    ag1: bf16[4, 4] = all_gather(q, 2, 'dp')
    w1: bf16[4, 4] = wait(ag1)
    c: f32[4, 4] = _to_copy(w1, dtype=f32)
    b: f32[4, 4] = mm(a, c)
    rs0: f32[2, 4] = reduce_scatter(g, 'sum', 2, 'dp')
    v0: f32[2, 4] = wait(rs0)
    rs1: f32[2, 4] = reduce_scatter(a, 'sum', 2, 'dp')
    v1: f32[2, 4] = wait(rs1)
    return [b, v0, v1]
"""

TWO_WAITS = """group('dp', size=2)

def graph(x: f32[4, 4], y: f32[4, 4]):
    a: f32[4, 4] = all_reduce(x, 'sum', 'dp')
    w: f32[4, 4] = wait(a)
    m: f32[4, 4] = mm(y, y)
    again: f32[4, 4] = wait(a)
    b: f32[4, 4] = all_reduce_(w, 'max', 'dp')
    n: f32[4, 4] = mm(m, y)
    v: f32[4, 4] = wait(b)
    k: f32[4, 4] = mm(again, y)
    p: f32[4, 4] = mm(n, y)
    return [k, p, v]
"""
"""Hoisted, `b` is in flight when its memory is waited for again: from then on `k` needs `again` and not `v`."""


def without_starts() -> weft.Cluster:
    """Eight H100 whose kernels take no time to start, so that packing these few bytes pays."""
    found = weft.Cluster.load("h100-8")
    return replace(found, device=replace(found.device, kernel_us=0.0))


def context_of(module: GraphModule) -> Context:
    return Context(read_groups(module), without_starts())


@pytest.mark.parametrize("text", [MIXED, TWO_WAITS])
def test_the_actions_of_a_variant_lead_to_it_and_the_graph_stays_as_it_was(text: str):
    module = weft.parse(text)
    context = context_of(module)
    choices = all_choices(module.graph, KINDS["all"], None)
    found = list(variants(module.graph, Dag(module.graph), context, choices))
    assert render(module) == text
    assert len({render_of(variant.nodes) for variant in found}) == len(found)
    for variant in found:
        made = copy_module(module)
        step = Step("schedule-overlap", tuple(variant.actions(range(len(variant.nodes)))))
        ScheduleOverlap().run(made.graph, context, step)
        assert [node.name for node in made.graph.nodes] == [node.name for node in variant.nodes]
        weft.verify(module, made, ranks=2)


def render_of(nodes: Sequence[object]) -> str:
    return " ".join(map(str, nodes))


def test_variants_are_what_their_pipelines_leave():
    module = weft.parse(MIXED)
    choices = [(), (parse_pass("bucket-all-gathers{strategy=pack}"), parse_pass("bucket-reduce-scatters"))]
    found = variants(module.graph, Dag(module.graph), context_of(module), choices)
    buckets, hoisted = "bucket-all-gathers{strategy=pack},bucket-reduce-scatters", "hoist-launches,sink-waits"
    for variant, spec in zip(found, ("sink-waits", hoisted, buckets, f"{buckets},{hoisted}"), strict=True):
        made = Pipeline.parse(spec).run(module, cluster="h100-8")
        assert [node.name for node in made.module.graph.nodes] == [node.name for node in variant.nodes]


@pytest.mark.parametrize("merge", ["gathers", "none"])
def test_only_the_kinds_that_may_merge_are_merged(merge: str):
    module = weft.parse(MIXED)
    choices = all_choices(module.graph, KINDS[merge], None)
    for variant in variants(module.graph, Dag(module.graph), context_of(module), choices):
        merged = [action.launches for action in variant.steps if isinstance(action, Merge)]
        assert merged in ([], [("ag0", "ag1")] if merge == "gathers" else [])


def test_a_plan_of_several_stages_is_proved_and_replays():
    module = weft.parse(MIXED)
    result = weft.optimize(module, cluster=without_starts(), pipeline="schedule-overlap", verify="equivalence")
    actions = result.plan.steps[0].actions
    assert any(isinstance(action, Merge) and action.strategy == "pack" for action in actions)
    assert any(isinstance(action, Settle) for action in actions)
    again = replay(module, Plan.from_json(result.plan.to_json()))
    assert render(again.module) == weft.listing(result.module)
    assert weft.verify(module, result.module, ranks=2).bitwise


def test_sinking_may_break_an_edge_of_the_order_before_hoisting():
    module = weft.parse(TWO_WAITS)
    _sunk, variant = variants(module.graph, Dag(module.graph), context_of(module), [()])
    made = Pipeline.parse("hoist-launches,sink-waits").run(module, cluster="h100-8")
    assert [node.name for node in variant.nodes] == [node.name for node in made.module.graph.nodes]
    assert [type(step) for step in variant.steps] == [Arrange, Settle, Arrange]
    weft.optimize(module, cluster="h100-8", pipeline="schedule-overlap", verify="equivalence")


def test_where_a_later_stage_fails_the_graph_stays_as_it_was():
    module = weft.parse(MIXED)
    merge = Merge(("ag0", "ag1"), "pack")
    step = Step("schedule-overlap", (merge, Settle(), Arrange((("output", "output"), ("x", "v1")))))
    with pytest.raises(WeftError):
        ScheduleOverlap().run(module.graph, context_of(module), step)
    assert render(module) == MIXED


def test_names_of_earlier_nodes_do_not_change_the_names_of_a_plan():
    """A bucket made by an earlier pass, and taken out again, leaves its name behind in the graph."""
    module = weft.parse(MIXED)
    module.graph.erase_node(module.graph.create_node("call_function", abs, (), {}, "packed"))
    context = context_of(module)
    step, changed = ScheduleOverlap().run(module.graph, context)
    assert changed
    assert "packed" in {node.name for node in module.graph.nodes}
    assert any(isinstance(action, Settle) for action in step.actions)
