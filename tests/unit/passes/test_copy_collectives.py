"""Copies through symmetric memory in planned steps: chosen where the step gets shorter, never where it gets longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.fx import GraphModule

import weft
from weft.passes.pipeline import Pipeline, Run
from weft.streaming.lowerings import sharing

H100 = weft.Cluster.load("h100-8")
PLAN, COPY = "schedule-overlap", "copy-collectives,schedule-overlap"

WEIGHTS = """group('dp', size=8)
device('cuda')

def graph(p: bf16[{rows}, 8192], q: bf16[{rows}, 8192], x: bf16[{tokens}, 8192]):
    ag0 = all_gather(p, 8, 'dp')
    w0 = wait(ag0)
    y = mm(x, w0)
    ag1 = all_gather(q, 8, 'dp')
    w1 = wait(ag1)
    z = mm(y, w1)
    o = mm(z, w0)
    return [o]
"""
BESIDE_PRODUCTS = WEIGHTS.format(rows=1024, tokens=32768)
SHAPES = [(1024, 4096), (1024, 32768), (1024, 131072)]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "has_symmetric_memory", lambda name, enabled: True)


def planned_ns(text: str, spec: str, cluster: weft.Cluster = H100) -> int:
    evidence = weft.optimize(weft.parse(text), cluster=cluster, pipeline=spec).plan.evidence
    assert evidence is not None
    return evidence.step_ns


def copies(module: GraphModule) -> int:
    return weft.listing(module).count("weft.copy_")


@pytest.mark.parametrize(("rows", "tokens"), SHAPES)
def test_the_planned_step_is_never_longer_with_copies(shared: None, rows: int, tokens: int):
    text = WEIGHTS.format(rows=rows, tokens=tokens)
    assert planned_ns(text, COPY) <= planned_ns(text, PLAN)


def test_a_gather_beside_long_products_is_copied_because_copies_do_not_slow_them(shared: None):
    text = BESIDE_PRODUCTS
    result = weft.optimize(weft.parse(text), cluster=H100, pipeline=COPY, verify="equivalence")
    assert copies(result.module) == 2
    assert planned_ns(text, COPY) < planned_ns(text, PLAN)


def test_without_a_slowdown_beside_collectives_nothing_is_copied(shared: None):
    undisturbed = replace(H100, device=replace(H100.device, overlap_slowdown=0.0))
    run = Pipeline.parse(COPY).run(weft.parse(BESIDE_PRODUCTS), cluster=undisturbed)
    assert copies(run.module) == 0
    assert {d.reason.value for d in run.plan.steps[0].decisions} == {"no-gain"}


def test_copies_keep_to_the_memory_limit(shared: None):
    text = BESIDE_PRODUCTS
    program = weft.simulate(weft.parse(text), cluster=H100)
    run = Pipeline.parse(COPY).run(weft.parse(text), cluster=H100, memory_limit_bytes=program.peak_bytes + (1 << 20))
    assert copies(run.module) == 0  # the group's memory would hold a shard of 16 MiB
    assert "holds-memory" in {d.reason.value for d in run.plan.steps[0].decisions}


def test_a_group_whose_other_ranks_hold_other_graphs_is_not_copied(shared: None):
    module = weft.parse(BESIDE_PRODUCTS)
    run = Pipeline.parse(COPY).run(module, cluster=H100, withheld={"dp": "its ranks hold different graphs"})
    assert copies(run.module) == 0
    assert {d.reason.value for d in run.plan.steps[0].decisions} == {"other-ranks"}


def test_a_plan_with_copies_can_be_applied_again(shared: None):
    before = weft.parse(BESIDE_PRODUCTS)
    run = Pipeline.parse(COPY).run(before, cluster=H100)
    assert weft.listing(weft.apply(before, weft.Plan.from_json(run.plan.to_json()))) == run.after


EMBEDDED = """group('tp', size=2)

def graph(x: bf16[4096, 1024](device='cuda'), b: bf16[1024, 64](device='cuda')):
    rs = reduce_scatter(x, 'sum', 2, 'tp')
    w = wait(rs)
    y = mm(w, b)
    return [y]
"""


def run_auto(cluster: str) -> Run:
    return Pipeline.parse("auto").run(weft.parse(EMBEDDED), cluster=weft.Cluster.load(cluster))


@pytest.mark.parametrize(("cluster", "num_copies"), [("loopback-1x2", 1), ("gloo-1x2", 0)])
def test_auto_copies_a_collective_without_products_where_that_is_quicker(shared: None, cluster: str, num_copies: int):
    assert copies(run_auto(cluster).module) == num_copies


def test_auto_copies_nothing_without_shared_memory():
    run = run_auto("loopback-1x2")
    assert copies(run.module) == 0
    assert not [d for step in run.plan.steps for d in step.decisions if d.pass_name == "copy-collectives"]


def test_a_note_says_once_for_each_group_how_to_enable_symmetric_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sharing, "has_symmetric_memory", lambda name, enabled: not enabled)
    run = Pipeline.parse("copy-collectives{only=enabled}").run(weft.parse(WEIGHTS.format(rows=1024, tokens=4096)))
    (note,) = run.plan.steps[0].decisions
    assert note.sentence.startswith("the group of ag0 does not use symmetric memory: to enable it, call torch")


def test_large_graphs_are_tried_with_less_effort_and_judged_with_the_effort_of_the_plan(
    shared: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("weft.passes.communication.copy_collectives.LARGE", 1)
    text = BESIDE_PRODUCTS
    assert planned_ns(text, COPY) < planned_ns(text, PLAN)


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_values_of_copied_gathers_and_scatters_are_right_on_virtual_ranks(shared: None, reduce_op: str):
    text = f"""group('dp', size=4)

def graph(p: f32[2, 8], x: f32[8, 8]):
    ag = all_gather(p, 4, 'dp')
    w = wait(ag)
    y = mm(x, w)
    rs = reduce_scatter(y, '{reduce_op}', 4, 'dp')
    o = wait(rs)
    return [o]
"""
    link = replace(H100.levels[0].link, hop_us=90.0)
    slow = replace(H100, nccl=None, levels=(replace(H100.levels[0], link=link),))
    result = weft.optimize(weft.parse(text), cluster=slow, pipeline=COPY, verify="values")
    assert copies(result.module) == 2


COALESCED = """group('dp', size=2)
device('{device}')

def graph(p: f32[8, 4], q: f32[8, 4]):
    both = all_gather_coalesced([p, q], 2, 'dp')
    first = both[0]
    second = both[1]
    w0 = wait(first)
    w1 = wait(second)
    return [w0, w1]
"""


@pytest.mark.parametrize("spec", ["auto", "copy-collectives", "copy-collectives{only=enabled}"])
def test_a_launch_of_several_tensors_stays(shared: None, spec: str):
    run = Pipeline.parse(spec).run(weft.parse(COALESCED.format(device="cuda")), cluster=H100)
    decisions = [d for step in run.plan.steps for d in step.decisions if d.pass_name == "copy-collectives"]
    assert [d.reason.value for d in decisions] == ["unsupported-form"]


def test_a_launch_of_several_tensors_on_the_cpu_is_left_alone():
    before = weft.parse(COALESCED.format(device="cpu"))
    run = Pipeline.parse("copy-collectives{only=enabled}").run(before, cluster=H100)
    assert (run.plan.steps[0].decisions, run.after) == ((), weft.listing(before))


def test_with_enabled_memory_a_refusal_that_has_another_reason_is_said(shared: None):
    spec = "copy-collectives{only=enabled}"
    run = Pipeline.parse(spec).run(weft.parse(BESIDE_PRODUCTS), cluster=H100, withheld={"dp": "other graphs"})
    assert [d.reason.value for d in run.plan.steps[0].decisions] == ["other-ranks"] * 2


GATHERED_ROWS = """group('tp', size=2)
device('cuda')

def graph(x: bf16[4096, 1024], b: bf16[1024, 64]):
    ag = all_gather(x, 2, 'tp')
    w = wait(ag)
    y = mm(w, b)
    return [y]
"""


@pytest.mark.parametrize("options", ["chunks=2 kernel=portable", "kernel=low-contention"])
def test_a_group_whose_other_ranks_hold_other_graphs_is_not_streamed(shared: None, options: str):
    before, pipeline = weft.parse(GATHERED_ROWS), Pipeline.parse(f"fuse-all-gather-matmuls{{{options}}}")
    assert pipeline.run(before).after != weft.listing(before)
    run = pipeline.run(before, withheld={"tp": "other graphs"})
    assert run.after == weft.listing(before)
    assert [d.reason.value for d in run.plan.steps[0].decisions] == ["other-ranks"]
