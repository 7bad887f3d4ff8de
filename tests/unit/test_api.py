"""The public functions: optimize, apply, verify, listing, parse, and the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule

import weft
from tests.tiers import quick_first
from weft.bounds import checker
from weft.cost.cluster import Cluster
from weft.errors import ClusterError, PipelineError, PlanError, RefusedError, VerificationError, WeftError
from weft.graph.groups import read_groups
from weft.graph.listings.text import digest
from weft.graph.output_names import result_names
from weft.simulation.build import program_of
from weft.verification.symbolic.equivalence import Proof

LISTING = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4]):
    a: f32[4, 4] = mm(x, x)
    unused: f32[4, 4] = neg(a)
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    w: f32[4, 4] = wait(ag)
    w2: f32[4, 4] = wait(ag)
    b: f32[4, 4] = relu(a)
    r: f32[4, 4] = add(b, w)
    s: f32[4, 4] = add(r, w2)
    return [s]
"""
OPTIMIZED = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4]):
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    a: f32[4, 4] = mm(x, x)
    b: f32[4, 4] = relu(a)
    w: f32[4, 4] = wait(ag)
    r: f32[4, 4] = add(b, w)
    s: f32[4, 4] = add(r, w)
    return [s]
"""


def module_of(text: str = LISTING) -> GraphModule:
    return weft.parse(text)


# optimize


def test_optimize_merges_nothing_of_groups_that_are_withheld():
    module = module_of("""group('dp', size=2)

def graph(x: f32[2, 4], y: f32[2, 4]):
    a: f32[4, 4] = all_gather(x, 2, 'dp')
    b: f32[4, 4] = all_gather(y, 2, 'dp')
    wa: f32[4, 4] = wait(a)
    wb: f32[4, 4] = wait(b)
    return [wa, wb]
""")
    merged = weft.optimize(module, pipeline="bucket-all-gathers")
    apart = weft.optimize(module, pipeline="bucket-all-gathers", withheld={"dp": "other ranks differ"})
    assert len(merged.plan.steps[0].actions) == 1
    assert weft.listing(apart.module) == weft.listing(module)
    assert [d.sentence for d in apart.plan.steps[0].decisions] == [f"{n} stays: other ranks differ" for n in "ab"]


def test_optimize_returns_a_new_module_and_leaves_its_argument_as_it_was():
    module = module_of()
    code = module.code
    result = weft.optimize(module)
    assert weft.listing(result.module) == OPTIMIZED
    assert weft.listing(module) == LISTING
    assert module.code == code
    assert result.module is not module


def test_optimize_shares_parameters_and_constants():
    module = module_of(
        "tensor('c', f32[2], [1.0, 2.0])\n\ndef graph(x: f32[2]):\n"
        "    c = attribute('c')\n    r = mul(x, c)\n    return [r]\n"
    )
    result = weft.optimize(module)
    assert result.module.c is module.c


def test_optimize_of_an_optimized_module_changes_nothing():
    once = weft.optimize(module_of()).module
    again = weft.optimize(once)
    assert weft.listing(again.module) == weft.listing(once)
    assert again.report.applied == ()


@pytest.mark.parametrize("pipeline", ["sink-waits", weft.Pipeline.parse("sink-waits")])
def test_a_pipeline_is_given_as_text_or_as_a_value(pipeline: str | weft.Pipeline):
    result = weft.optimize(module_of(), pipeline=pipeline)
    assert [record.spec for record in result.report.passes] == ["sink-waits"]


def test_the_empty_pipeline_changes_nothing():
    result = weft.optimize(module_of(), pipeline="none")
    assert weft.listing(result.module) == LISTING
    assert result.report.before == result.report.after
    assert result.report.before.digest == digest(LISTING)


def test_the_cluster_is_recorded():
    assert weft.optimize(module_of(), cluster="h100-8x8").report.cluster == "h100-8x8"


def test_values_are_verified_where_asked_for():
    result = weft.optimize(module_of(), verify="values")
    assert result.report.witnesses == (
        "structure: every invariant holds after every pass",
        "values: bitwise equal on 2 virtual ranks",
    )


def test_no_witness_is_named_that_was_not_called():
    assert weft.optimize(module_of()).report.witnesses == ("structure: every invariant holds after every pass",)
    assert weft.optimize(module_of(), verify="off").report.witnesses == ()


def test_a_witness_that_does_not_exist_is_refused():
    with pytest.raises(VerificationError) as error:
        weft.optimize(module_of(), verify="hope")  # type: ignore[arg-type]
    assert str(error.value) == (
        "optimize: no witness is called 'hope'\nuse one of 'structure', 'equivalence', 'values', 'off'"
    )


def test_equivalence_is_proved_and_named():
    report = weft.optimize(module_of(), verify="equivalence").report
    assert report.witnesses[1].startswith("equivalence: proved equal (")


def test_a_proof_in_real_arithmetic_says_so():
    text = """group('dp', size=4)

def graph(x: f32[8], y: f32[8]):
    a: f32[2] = reduce_scatter(x, 'sum', 4, 'dp')
    b: f32[2] = wait(a)
    c: f32[2] = reduce_scatter(y, 'sum', 4, 'dp')
    d: f32[2] = wait(c)
    r: f32[2] = add(b, d)
    return [r]
"""
    found = weft.optimize(weft.parse(text), pipeline="dedupe-reduce-scatters", verify="equivalence").report
    assert [each.changed for each in found.passes] == [True]
    assert found.witnesses[1].startswith("equivalence: proved equal in real arithmetic (")


def test_what_is_not_proved_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weft.api.prove", lambda *_, **__: Proof(False, "outputs[0] may differ", 1))
    with pytest.raises(VerificationError) as error:
        weft.optimize(module_of(), verify="equivalence")
    assert str(error.value) == (
        "optimize: the optimized graph is not proved equal: outputs[0] may differ\n"
        "compare values with verify='values'; if they differ, please report the listing"
    )


def test_strict_refusals_reach_the_caller():
    text = LISTING.replace("w2: f32[4, 4] = wait(ag)", "w2: f32[4, 4] = wait(ag)\n    n: f32[4, 4] = rand_like(x)")
    with pytest.raises(RefusedError) as error:
        weft.optimize(module_of(text), pipeline="remove-dead-code", strict=True)
    assert str(error.value) == (
        "remove-dead-code: n is unused and stays: it draws random numbers\nleave strict off to accept this"
    )


def test_an_unknown_pass_leaves_the_module_as_it_was():
    module = module_of()
    with pytest.raises(PipelineError) as error:
        weft.optimize(module, pipeline="sink-wates")
    assert str(error.value) == "pipeline: no pass is called 'sink-wates'\ndid you mean 'sink-waits'?"
    assert weft.listing(module) == LISTING


def test_sizes_of_groups_are_given_where_nobody_knows_them():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    launch = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "tp"))
    wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (launch,))
    graph.output([wait])
    launch.meta["val"] = wait.meta["val"] = torch.empty(4, device="meta")
    module = GraphModule({}, graph)
    facts = weft.optimize(module, groups={"tp": 8}).plan.facts
    assert facts["groups"] == {"tp": {"size": 8, "stride": 1}}


# The report.


def test_the_report_counts_and_tells():
    report = weft.optimize(module_of()).report
    assert (report.before.num_nodes, report.after.num_nodes) == (11, 9)
    assert (report.before.num_collectives, report.after.num_collectives) == (1, 1)
    assert [record.spec for record in report.passes] == str(weft.Pipeline.parse("fsdp")).split(",")
    assert [(d.pass_name, d.nodes) for d in report.applied][:2] == [
        ("remove-dead-code", ("unused",)),
        ("dedupe-collectives", ("w2", "w")),
    ]
    assert {decision.pass_name for decision in (*report.applied, *report.declined)} >= {"schedule-overlap"}


def test_the_text_of_the_report_holds_the_table_and_the_decisions():
    text = str(
        weft.optimize(module_of(), pipeline="remove-dead-code,dedupe-collectives,hoist-launches,sink-waits").report
    )
    lines = text.splitlines()
    assert lines[0] == "nodes       11 -> 9"
    assert lines[1] == "collectives 1 -> 1"
    assert lines[3].split() == ["pass", "applied", "declined", "ms"]
    assert "+ sink-waits: moved w down to its first use, r" in lines
    assert lines[-1] == "checked: structure: every invariant holds after every pass"


def test_a_cluster_with_too_few_ranks_is_an_error_before_anybody_looks_at_the_report():
    with pytest.raises(ClusterError, match="it has 8 ranks, group 'dp' needs 64"):
        weft.optimize(module_of(), cluster="h100-8", pipeline="sink-waits", groups={"dp": 64})


def test_the_report_as_json_is_complete():
    report = weft.optimize(module_of(), cluster="h100-8").report
    data = json.loads(report.to_json())
    assert data["cluster"] == "h100-1x8"
    assert data["simulated"]["after"]["step_us"] <= data["simulated"]["before"]["step_us"]
    assert json.loads(report.to_json(simulate=False))["simulated"] is None
    assert data["version"] == weft.__version__
    assert [entry["spec"] for entry in data["passes"]] == [record.spec for record in report.passes]
    assert len(data["applied"]) == len(report.applied)
    assert data["plan_digest"] == weft.optimize(module_of(), cluster="h100-8").report.bare_plan.digest


def test_a_report_with_a_cluster_is_drawn_and_one_without_says_what_to_do(tmp_path: Path):
    report = weft.optimize(module_of(), cluster="h100-8").report
    report.save_html(tmp_path / "report.html")
    report.save_trace(tmp_path / "trace.json")
    assert "h100-1x8" in (tmp_path / "report.html").read_text()
    assert str(report).splitlines()[0].split() == ["before", "after", "change"]
    with pytest.raises(WeftError) as error:
        weft.optimize(module_of()).report.save_html(tmp_path / "none.html")
    assert str(error.value) == (
        'report: timelines need a cluster, and none was given\ngive one: weft.optimize(gm, cluster="h100-8x8")'
    )


def test_a_step_is_simulated_and_held_against_a_bound():
    timeline = weft.simulate(module_of(), cluster="h100-8")
    assert 0 < timeline.lower_bound_us <= timeline.step_us
    assert timeline.compute_us + timeline.exposed_us <= timeline.step_us
    both = weft.simulate([module_of(), module_of()], cluster="h100-8")
    assert both.step_us > timeline.step_us


# apply


def test_apply_repeats_a_plan_from_a_file(tmp_path: Path):
    result = weft.optimize(module_of())
    result.plan.save(tmp_path / "plan.json")
    module = module_of()
    applied = weft.apply(module, weft.Plan.load(tmp_path / "plan.json"))
    assert weft.listing(applied) == weft.listing(result.module)
    assert weft.listing(module) == LISTING


def test_apply_refuses_another_graph_and_leaves_it_as_it_was():
    plan = weft.optimize(module_of()).plan
    other = module_of(OPTIMIZED)
    with pytest.raises(PlanError) as error:
        weft.apply(other, plan)
    assert str(error.value) == (
        "plan: step 'remove-noops' was made for another graph\n"
        "    num_nodes: 9 here, 11 in the plan\n"
        "    first different node here: ag: f32[4, 4] = all_gather(p, 2, 'dp')\n"
        "    in the plan: a: f32[4, 4] = mm(x, x)\n"
        "    1 nodes only here, 3 only in the plan\n"
        "make the plan again for this graph with weft.optimize"
    )
    assert weft.listing(other) == OPTIMIZED


def test_apply_refuses_a_plan_of_another_torch():
    plan = weft.optimize(module_of()).plan
    old = weft.Plan(plan.steps, {**plan.facts, "torch": "2.0.0"})
    with pytest.raises(PlanError, match=r"another version of torch\n    torch: '.*' here, '2\.0\.0' in the plan"):
        weft.apply(module_of(), old)


# verify


def test_verify_finds_equal_graphs_equal():
    verdict = weft.verify(module_of(), weft.optimize(module_of()).module)
    assert verdict
    assert verdict.bitwise
    assert str(verdict) == "bitwise equal on 2 virtual ranks"


def test_verify_finds_the_first_difference():
    verdict = weft.verify(module_of(), module_of(LISTING.replace("relu(a)", "neg(a)")))
    assert not verdict
    assert verdict.difference.rank == 0
    assert verdict.difference.position == "outputs[0]"


def test_verify_tiles_more_ranks_than_a_group_has():
    assert weft.verify(module_of(), module_of(), ranks=4).num_ranks == 4


def test_verify_takes_a_mesh():
    text = LISTING.replace("group('dp', size=2)\n", "group('dp', size=2, stride=2)\ngroup('tp', size=2)\n")
    assert weft.verify(module_of(text), module_of(text), mesh={"dp": 2, "tp": 2}).num_ranks == 4


def test_verify_takes_one_module_for_each_rank():
    assert weft.verify([module_of(), module_of()], [module_of(OPTIMIZED), module_of()], ranks=2).bitwise


def test_verify_takes_inputs():
    inputs = [[torch.full((4, 4), float(rank)), torch.ones(2, 4)] for rank in range(2)]
    other = module_of(LISTING.replace("relu(a)", "alias(a)"))
    assert weft.verify(module_of(), other, inputs=inputs).bitwise  # no value is negative, so relu changes none
    assert not weft.verify(module_of(), other).bitwise


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ranks": 3},
            "group 'dp': groups of 2 ranks with stride 1 do not tile 3 ranks",
        ),
        ({"backend": "smoke"}, "verify: no backend is called 'smoke'\nuse 'virtual' or 'gloo'"),
        (
            {"mesh": {"dp": 4}},
            "verify: group 'dp' has 2 ranks in the graph, 4 in the mesh\ncapture the graph for this mesh",
        ),
        ({"ranks": 1}, "verify: group 'dp' has 2 ranks, the cluster 1\nuse ranks=2 or more"),
    ],
)
def test_verify_refuses_what_cannot_be(options: dict[str, object], message: str):
    with pytest.raises(WeftError) as error:
        weft.verify(module_of(), module_of(), **options)
    assert message in str(error.value)


def test_verify_refuses_a_group_of_unknown_size():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    launch = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "tp"))
    graph.output([graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (launch,))])
    module = GraphModule({}, graph)
    with pytest.raises(VerificationError) as error:
        weft.verify(module, module)
    assert str(error.value) == "verify: the size of group 'tp' is unknown\ngive it: groups={'tp': 8}"
    assert weft.verify(module, module, groups={"tp": 4}).num_ranks == 4


# The package.


def test_every_public_name_is_there():
    assert all(getattr(weft, name) is not None for name in weft.__all__)
    assert dir(weft) == weft.__all__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'weft' has no attribute 'weave'"):
        _ = weft.weave


def test_the_package_is_imported_without_torch():
    code = "import sys, weft; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# What proves a plan.


def test_a_plan_carries_its_step_and_a_bound_that_its_certificate_proves(tmp_path: Path):
    module = weft.zoo.load("llama-debug", parallel="fsdp", ranks=4, part="joint")
    result = weft.optimize(module, cluster="h100-8")
    result.plan.save(tmp_path / "plan.json")
    plan = weft.Plan.load(tmp_path / "plan.json")
    assert plan == result.plan
    assert plan.evidence is not None
    timeline = weft.simulate(result.module, "h100-8")
    assert (plan.evidence.step_ns, plan.evidence.peak_bytes) == (timeline.step_ns, timeline.peak_bytes)
    assert plan.evidence.gap == plan.evidence.step_ns / plan.evidence.bound_ns - 1 >= 0
    program = program_of(module, read_groups(module), Cluster.load("h100-8"))
    assert checker.check(program, dict(plan.evidence.certificate)) >= plan.evidence.bound_ns
    assert weft.optimize(module).plan.evidence is None


@pytest.mark.parametrize("parallel", quick_first(["fsdp", "tp"]))
def test_graphs_that_are_planned_each_are_faster_as_a_sequence(parallel: str):
    parts = [weft.zoo.load("llama-debug", parallel=parallel, ranks=4, part=part) for part in ("forward", "backward")]
    planned = [weft.optimize(module, cluster="h100-8").module for module in parts]
    before, after = weft.simulate(parts, "h100-8"), weft.simulate(planned, "h100-8")
    assert after.step_ns < before.step_ns
    # What one graph hands to the next is found under its name, so that it is not counted twice.
    assert handed_on(*planned) == handed_on(*parts)
    assert after.peak_bytes < sum(weft.simulate(module, "h100-8").peak_bytes for module in planned)


def handed_on(first: GraphModule, second: GraphModule) -> int:
    """How many inputs of the second graph are outputs or inputs of the first, by name."""
    (output,) = (node for node in first.graph.nodes if node.op == "output")
    returned = {name for node in output.all_input_nodes for name in result_names(node)}
    known = returned | {node.name for node in first.graph.nodes if node.op == "placeholder"}
    return sum(node.op == "placeholder" and node.name in known for node in second.graph.nodes)
