"""Which values are found, what may be made again, and how a memory limit is met on captured steps."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import weft
import weft.zoo
from weft.cost.cluster import Cluster
from weft.errors import MemoryLimitError
from weft.graph import ops
from weft.graph.dag import Dag
from weft.graph.groups import read_groups
from weft.graph.host_copies import OFFLOAD
from weft.graph.operator_effects import profile_of
from weft.passes.pipeline import Pipeline
from weft.report.simulated import SimulatedReport
from weft.retention.chain import Estimator, Rates, chain, kept_sites
from weft.retention.rebuild import rebuild
from weft.retention.repeated_program import repeated_program
from weft.retention.sites import Sites
from weft.simulation.build import program_of
from weft.simulation.memory import Footprint
from weft.simulation.timeline import Timeline

CLUSTER = "h100-8"


@functools.cache
def captured(layers: int = 2, **changes: Any) -> GraphModule:
    return weft.zoo.load("llama-1b", parallel="fsdp", ranks=8, layers=layers, part="step", **changes)


def sites_of(module: GraphModule) -> Sites:
    groups = read_groups(module)
    dag = Dag(module.graph)
    return Sites(dag, program_of(dag, groups, Cluster.load(CLUSTER)), groups, {})


@functools.cache
def captured_with_tp(layers: int = 2, **changes: Any) -> GraphModule:
    options: dict[str, Any] = {"parallel": "fsdp-tp", "mesh": {"dp": 8, "tp": 8}, "part": "step"}
    return weft.zoo.load("llama-8b", layers=layers, **options, **changes)


def peak_of(module: GraphModule) -> int:
    return weft.simulate(module, CLUSTER).peak_bytes


def optimized(module: GraphModule, limit_bytes: int, **options: Any) -> weft.Result:
    return weft.optimize(module, CLUSTER, memory_limit_bytes=limit_bytes, effort="fast", **options)


def test_the_same_tensor_of_each_layer_is_one_group():
    few, more = sites_of(captured(2)).groups, sites_of(captured(3)).groups
    layered = {group.name: len(group.sites) for group in more if "layers.*" in group.name}
    assert set(layered.values()) == {3}
    assert {group.name for group in few if "layers.*" in group.name} == set(layered)


def test_weights_that_are_gathered_twice_are_repeated_values():
    always = [group for group in sites_of(captured()).groups if group.is_gathered]
    never = [group for group in sites_of(captured(reshard="never")).groups if group.is_gathered]
    assert always
    assert all(group.repeated == set(group.sites) for group in always)
    assert never
    assert not any(group.repeated for group in never)


def test_a_limit_at_the_captured_peak_does_not_return_the_captured_order():
    module = captured()
    before = weft.simulate(module, CLUSTER)
    result = optimized(module, before.peak_bytes)
    after = result.plan.evidence
    assert after is not None
    assert after.peak_bytes <= before.peak_bytes
    assert after.step_ns < before.step_ns * 0.9


def test_a_limit_below_every_order_is_met_exactly_and_proved():
    module = captured()
    passes = Pipeline.parse("fsdp").without(["decide-memory"])
    with pytest.raises(MemoryLimitError) as by_order:
        passes.run(module, cluster=CLUSTER, memory_limit_bytes=1, effort="fast")
    limit = int(by_order.value.least_bytes * 0.9)
    result = optimized(module, limit, verify="equivalence")
    assert peak_of(result.module) <= limit
    made = {row.choice for row in result.report.memory if row.is_new}
    assert "recomputed" in made


@pytest.mark.slow
def test_the_error_names_a_limit_that_works_and_its_step():
    with pytest.raises(MemoryLimitError, match="with a step of") as error:
        optimized(captured(), 1)
    assert peak_of(optimized(captured(), error.value.least_bytes).module) <= error.value.least_bytes


def planned(module: GraphModule, limit_bytes: int | None = None) -> Timeline:
    result = weft.optimize(module, CLUSTER, memory_limit_bytes=limit_bytes, effort="fast")
    return weft.simulate(result.module, CLUSTER)


@pytest.mark.slow
def test_a_larger_limit_gives_no_longer_step():
    peak = peak_of(captured())
    steps = [planned(captured(), int(peak * share)).step_ns for share in (0.9, 0.95, 1.0, 1.1, 1.3)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0]


@pytest.mark.slow
def test_under_tensor_parallelism_a_larger_limit_gives_no_longer_step():
    module = captured_with_tp()
    peak = weft.simulate(module, "h100-8x8").peak_bytes
    steps: list[int] = []
    for share in (0.75, 0.85, 1.0, 1.15):
        limit = int(peak * share)
        result = weft.optimize(module, "h100-8x8", memory_limit_bytes=limit, effort="fast")
        made = weft.simulate(result.module, "h100-8x8")
        assert made.peak_bytes <= limit
        steps.append(made.step_ns)
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0]


@pytest.mark.slow
def test_steps_with_experts_are_about_as_short_with_slightly_more_room():
    module = weft.zoo.load("moe-8x7b", parallel="ep-fsdp", mesh={"dp": 8, "ep": 8}, layers=4, part="step")
    steps: list[int] = []
    for limit in (10_076_601_264, 10_512_055_216):  # the first choices that fit the larger one have very long steps
        run = Pipeline.parse("auto").run(module, cluster="h100-8x8", memory_limit_bytes=limit)
        made = weft.simulate(run.module, "h100-8x8")
        assert made.peak_bytes <= limit
        steps.append(made.step_ns)
    assert steps[1] < steps[0] * 1.01


@pytest.mark.slow
def test_the_gather_of_an_activation_runs_again_where_that_pays():
    module = captured_with_tp()
    limit = int(weft.simulate(module, "h100-8x8").peak_bytes * 0.8)
    result = weft.optimize(module, "h100-8x8", memory_limit_bytes=limit, effort="fast")
    rows = [row for row in result.report.memory if row.group == "layers.*.attention all_gather"]
    assert ("recomputed", "kept") in {(row.choice, row.given) for row in rows}
    assert weft.simulate(result.module, "h100-8x8").peak_bytes <= limit


@pytest.mark.slow
def test_sums_of_residuals_under_tensor_parallelism_are_not_all_made_again():
    module = captured_with_tp()
    groups, cluster = read_groups(module), Cluster.load("h100-8x8")
    dag = Dag(module.graph)
    sites = Sites(dag, program_of(dag, groups, cluster), groups, {})
    choices = list(chain(Estimator(sites), Rates()))
    made = repeated_program(sites, rebuild(sites, kept_sites(sites, choices[-1]))).program
    checkpointed = weft.simulate(captured_with_tp(checkpoint="full"), cluster)
    assert Footprint(made).peak(range(len(made.names))) <= checkpointed.peak_bytes
    assert len(set(choices)) == len(choices)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [{}, {"reshard": "default"}, {"reshard": "never"}, {"checkpoint": "full", "reshard": "never"}], ids=str
)
def test_within_the_peak_of_a_policy_the_step_is_no_longer(policy: dict[str, Any]):
    by_hand = planned(captured(**policy))
    found = planned(captured(), by_hand.peak_bytes)
    assert found.peak_bytes <= by_hand.peak_bytes
    assert found.step_ns <= by_hand.step_ns


@pytest.mark.slow
def test_with_room_a_weight_is_gathered_once():
    module = captured()
    result = optimized(module, 2 * peak_of(module))
    kept = [row for row in result.report.memory if row.given == "made again" and row.choice == "kept"]
    assert kept
    assert result.report.after.num_collectives < result.report.before.num_collectives


@pytest.mark.slow
def test_text_json_and_page_of_the_report_have_the_table(tmp_path: Path):
    module = captured()
    report = optimized(module, peak_of(module)).report
    rows = json.loads(report.to_json())["memory"]
    assert [row["group"] for row in rows] == [row.group for row in report.memory]
    assert "in the given graph" in str(report)
    report.save_html(tmp_path / "report.html")
    page = unescape((tmp_path / "report.html").read_text())
    assert all(f'<tr><th scope="row">{row.group}</th><td>{row.choice}</td>' in page for row in report.memory)


@pytest.mark.slow
def test_the_report_bounds_every_choice_within_the_limit():
    module = captured()
    loose, tight = (optimized(module, int(peak_of(module) * share)).report for share in (1.2, 0.9))
    bounds: list[int] = []
    for report in (loose, tight):
        assert isinstance(report, SimulatedReport)
        assert report.choices_bound is not None
        bounds.append(report.choices_bound.bound_ns)
        assert bounds[-1] <= report.graphs[1].timeline.step_ns
        assert report.summary.after.choices_bound_us == bounds[-1] / 1000
        assert report.summary.before.choices_bound_us is None
    assert bounds[0] <= bounds[1]


def test_a_run_that_decides_nothing_has_no_bound_of_choices():
    report = weft.optimize(captured(), CLUSTER, effort="fast").report
    assert isinstance(report, SimulatedReport)
    assert report.choices_bound is None


def test_without_a_limit_no_pass_decides_about_memory():
    names = [step.spec for step in weft.optimize(captured(), CLUSTER, effort="fast").plan.steps]
    assert "decide-memory" not in names


def bytes_offloaded(module: GraphModule) -> int:
    return sum(ops.value_of(node).nbytes for node in module.graph.nodes if node.target is OFFLOAD)


@pytest.mark.slow
def test_copies_in_host_memory_stay_within_its_limit():
    module, given = captured(), Cluster.load(CLUSTER)
    memory, limit = given.device.host_memory, int(peak_of(module) * 0.9)
    assert memory is not None
    sizes: list[int] = []
    for most in (1 << 40, 100 << 20):
        device = replace(given.device, host_memory=replace(memory, limit_bytes=most))
        passes = Pipeline.parse("decide-memory{offload=true},schedule-overlap")
        run = passes.run(module, cluster=replace(given, device=device), memory_limit_bytes=limit, effort="fast")
        sizes.append(bytes_offloaded(run.module))
    assert sizes[0] > 100 << 20
    assert sizes[1] <= 100 << 20


def dropped_out(probability: float) -> GraphModule:
    """Forward and backward of attention with dropout between two products."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x).view(4, 2, 16, 32)
            z = torch.nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=probability)
            return self.second(z.reshape(64, 64)).square().mean()

    return weft.capture(Model(), (torch.randn(64, 64),), part="joint")


@pytest.mark.parametrize(("probability", "is_free"), [(0.0, True), (0.5, False)])
def test_attention_is_made_again_only_without_dropout(probability: float, is_free: bool):
    sites = sites_of(dropped_out(probability))
    random = [i for i, node in enumerate(sites.dag.nodes[: sites.cut]) if profile_of(node).random]
    assert random
    assert all(sites.is_free(sites.site_of[i]) is is_free for i in random)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_values_can_be_made_again_on_any_device(device: str):
    sites = sites_of(
        weft.parse(
            f"device('{device}')\n\ndef graph(x: bf16[64, 64], w: bf16[64, 64]):\n    y = mm(x, w)\n    z = silu(y)\n"
            "    a = mm(z, w)\n    b = mm(a, w)\n    c = mm(b, z)\n    return [c]\n"
        )
    )
    assert sites.why_fixed == {}
