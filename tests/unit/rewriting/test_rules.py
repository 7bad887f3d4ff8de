"""Passes that are rules: what listings cannot show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.fx import Graph

import weft
from tests.tiers import quick_first
from weft.errors import PipelineError
from weft.graph.edit import Edit
from weft.passes.base import Numerics, Pass, all_passes, parse_pass
from weft.passes.pipeline import Pipeline
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason
from weft.plan.plan import Rewrite, Step
from weft.rewriting.draft import Draft
from weft.rewriting.pattern import Match, Var, op
from weft.rewriting.rules import Rule, rewrite

BIASED = """def graph(x: bf16[64, 32], w: bf16[32, 16], b: bf16[16]):
    m: bf16[64, 16] = mm(x, w)
    s: bf16[64, 16] = add(m, b)
    r: bf16[64, 16] = relu(s)
    return [r]
"""


def decided(spec: str, listing: str, cluster: str | None = None) -> list[tuple[Reason, tuple[str, ...]]]:
    run = Pipeline.parse(spec).run(weft.parse(listing), cluster=cluster)
    return [(d.reason, d.nodes) for entry in run.log for d in entry.step.decisions]


def test_on_a_gpu_a_bias_before_pointwise_operators_is_left_to_the_compiler():
    assert decided("fuse-addmms", BIASED) == [(Reason.APPLIED, ("s",))]
    assert decided("fuse-addmms", BIASED, "h100-8") == [(Reason.NO_GAIN, ("s",))]
    fused = BIASED.replace("    m: bf16[64, 16] = mm(x, w)\n    s: bf16[64, 16] = add(m, b)", "    s = addmm(b, x, w)")
    assert decided("decompose-addmms", fused, "h100-8") == [(Reason.APPLIED, ("s",))]
    assert decided("decompose-addmms,fuse-addmms", fused, "h100-8")[-1] == (Reason.NO_GAIN, ("s_add",))


@dataclass(frozen=True)
class CountNodes(Pass):
    """A pass of a user: says how many calls there are, and changes nothing."""

    numerics = Numerics.EXACT

    def plan(self, graph: Graph, context: Context) -> Step:
        count = sum(node.op == "call_function" for node in graph.nodes)
        return self.step([], [self.decision(Reason.ALREADY_DONE, "counted", f"{count} calls")])


def test_passes_of_the_user_run_before_and_after_those_of_weft():
    done = Reason.ALREADY_DONE
    expected = [(done, ("3 calls",)), (Reason.APPLIED, ("s",)), (done, ("2 calls",))]
    assert decided("count-nodes,fuse-addmms,count-nodes", BIASED) == expected


@pytest.mark.parametrize(
    ("rows", "columns", "reason"),
    [
        (4096, 50257, Reason.APPLIED),
        (8, 50257, Reason.NO_GAIN),
    ],
)
def test_padding_is_chosen_by_its_cost(rows: int, columns: int, reason: Reason):
    listing = f"def graph(x: bf16[{rows}, 4096], w: bf16[4096, {columns}]):\n    m = mm(x, w)\n    return [m]\n"
    assert decided("pad-matmuls", listing, "h100-8") == [(reason, ("m",))]
    assert decided("pad-matmuls", listing) == [(Reason.NO_GAIN, ("m",))]


def test_an_assertion_that_does_not_hold_stays():
    module = weft.parse("def graph(x: f32[4]):\n    r = relu(x)\n    return [r]\n")
    x, r, *_ = module.graph.nodes
    with module.graph.inserting_before(r):
        module.graph.call_function(torch.ops.aten._assert_tensor_metadata.default, (x, None, None, torch.float64))
    step = parse_pass("remove-assertions").plan(module.graph, Context())
    assert [(d.reason, d.nodes) for d in step.declined] == [(Reason.HAS_EFFECT, ("_assert_tensor_metadata_default",))]


def test_a_mark_whose_result_is_returned_stays():
    mark = "profiler._record_function_enter_new.default('block', None)"
    module = weft.parse(f"def graph(x: f32[4]):\n    m = {mark}\n    return [x, m]\n")
    step = parse_pass("remove-profiler-marks").plan(module.graph, Context())
    assert [(d.reason, d.nodes) for d in step.declined] == [(Reason.HAS_EFFECT, ("m",))]


def test_a_copy_into_pinned_memory_stays():
    module = weft.parse("def graph(x: f32[4]):\n    h = neg(x)\n    c = _to_copy(h)\n    r = relu(c)\n    return [r]\n")
    copy = next(node for node in module.graph.nodes if node.name == "c")
    copy.kwargs = {"pin_memory": True}
    assert parse_pass("remove-noops").plan(module.graph, Context()).decisions == ()
    copy.kwargs = {}
    assert parse_pass("remove-noops").plan(module.graph, Context()).applied


def test_rules_that_undo_each_other_are_an_error():
    def swapped(draft: Draft, match: Match) -> Any:
        return draft.call("add", match["y"], match["x"], before=match.root)

    module = weft.parse("def graph(x: f32[4], y: f32[4]):\n    s = add(x, y)\n    return [s]\n")
    with pytest.raises(PipelineError) as error:
        rewrite(Draft(module.graph), [Rule(op("add", Var("x"), Var("y")), swapped)])
    assert "undo each other" in str(error.value)


def test_the_plan_of_a_rewrite_is_data_that_can_be_read():
    run = Pipeline.parse("fuse-addmms").run(weft.parse(BIASED))
    (action,) = run.plan.steps[0].actions
    assert action == weft.Plan.from_json(run.plan.to_json()).steps[0].actions[0]
    assert isinstance(action, Rewrite)
    assert (action.calls, action.before, action.heirs, action.erased) == (
        ("s_addmm = addmm(b, x, w)",),
        "s",
        (("s", "s_addmm"),),
        ("s", "m"),
    )


def test_a_new_node_has_the_provenance_of_what_it_stands_for():
    module = weft.parse(BIASED)
    for node in module.graph.nodes:
        node.meta["stack_trace"] = f"of {node.name}"
    made = Pipeline.parse("fuse-addmms").run(module).module
    node = next(n for n in made.graph.nodes if n.name == "s_addmm")
    assert node.meta["stack_trace"] == "of s"
    assert node.meta["weft.members"] == ("s",)


def test_a_new_node_has_the_annotations_of_all_that_was_taken_out_for_it():
    module = weft.parse(BIASED)
    annotations = {"m": {"layer": 3, "kind": "product"}, "s": {"kind": "sum"}}
    for node in module.graph.nodes:
        node.meta |= {"custom": annotations[node.name]} if node.name in annotations else {}
    made = Pipeline.parse("fuse-addmms").run(module).module
    node = next(n for n in made.graph.nodes if n.name == "s_addmm")
    assert node.meta["custom"] == {"kind": "sum", "layer": 3}


NESTED = """def graph(p: b8[()], x: f32[4]):
    def yes(a: f32[4]):
        h: f32[4] = neg(a)
        c: f32[4] = clone(h)
        r: f32[4] = relu(c)
        return [r]
    yes = attribute('yes')
    def no(b: f32[4]):
        n: f32[4] = neg(b)
        return [n]
    no = attribute('no')
    found: (f32[4],) = higher_order.cond(p, yes, no, (x,))
    r: f32[4] = found[0]
    return [r]
"""


def test_a_nested_graph_of_the_caller_is_left_as_it_was():
    module = weft.parse(NESTED)
    run = Pipeline.parse("remove-noops").run(module)
    assert weft.listing(module) == NESTED
    assert weft.listing(run.module) != NESTED
    assert run.log[0].changed
    assert weft.listing(weft.apply(module, weft.Plan.from_json(run.plan.to_json()))) == weft.listing(run.module)


def test_an_edit_that_is_rolled_back_brings_the_nested_graph_back():
    module = weft.parse(NESTED)
    edit = Edit(module.graph)
    inner = edit.inside(["yes"])
    nodes = {node.name: node for node in inner.graph.nodes}
    inner.replace(nodes["c"], nodes["h"])
    inner.erase(nodes["c"])
    edit.rollback()
    assert weft.listing(module) == NESTED


def test_an_edit_that_is_rolled_back_takes_away_the_graph_that_it_nested():
    module = weft.parse(NESTED)
    found = next(node for node in module.graph.nodes if node.name == "found")
    edit = Edit(module.graph)
    first, second = (edit.nest("yes", weft.parse(BIASED), before=found) for _ in range(2))
    assert (first.target, second.target) == ("yes_1", "yes_2")
    edit.rollback()
    assert weft.listing(module) == NESTED
    assert not hasattr(module, "yes_1")


def test_every_pass_of_rules_declares_rules():
    for cls in all_passes().values():
        if issubclass(cls, RewritePass):
            assert list(cls().rules(Context()))


EXACT = (
    "remove-noops,remove-redundant-casts,cancel-views,simplify-arithmetic,cancel-splits-and-cats,dedupe-sizes,"
    "fold-constant-cumsums,remove-assertions,remove-profiler-marks,remove-dead-code"
)


@pytest.mark.parametrize(
    ("model", "parallel"), quick_first([("llama-debug", "fsdp-tp"), ("moe-debug", "fsdp"), ("vision-debug", "ddp")])
)
def test_training_steps_of_the_zoo_are_shorter_and_bitwise_the_same(model: str, parallel: str):
    module = weft.zoo.load(model, parallel=parallel, ranks=4)
    made = Pipeline.parse(EXACT).run(module).module
    assert len(made.graph.nodes) < len(module.graph.nodes)
    assert weft.verify(module, made, ranks=4).bitwise


def test_a_running_sum_of_bools_stays():
    """No kernel of the CPU sums bools, so no golden file can run it."""
    listing = "def graph():\n    a = ones([4], dtype=i64)\n    n = cumsum(a, 0, dtype=b8)\n    return [n]\n"
    assert decided("fold-constant-cumsums", listing) == [(Reason.UNSUPPORTED_FORM, ("n",))]
