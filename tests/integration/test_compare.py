"""Two real gloo ranks run a planned step under the profiler, and `weft compare` finds the plan in the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule, Interpreter, Node, map_arg
from torch.profiler import ProfilerActivity, profile, schedule
from typer.testing import CliRunner

import weft
from tests.integration.worlds import World
from weft.cli.main import app
from weft.graph import ops
from weft.verification.comparison import example_inputs

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.xdist_group("ranks")]

CLUSTER = "gloo-1x4"


class OnWorld(Interpreter):
    """Runs a graph operator by operator; its one group is the world of this process."""

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function" or not ops.is_communication(n.target):
            return super().run_node(n)
        bound = {name: map_arg(value, self.env.__getitem__) for name, value in ops.bind(n).items()}
        group = next(name for name in ops.GROUP_ARGUMENTS if name in bound)
        target: Any = n.target
        return target(**bound | {group: dist.group.WORLD.group_name})  # type: ignore[union-attr]


def profile_steps(folder: Path) -> None:
    """Plan a step, run it planned and as captured, and write the plan and both traces."""
    rank = dist.get_rank()
    module = weft.zoo.load("llama-debug", "fsdp", ranks=2, layers=1)
    result = weft.optimize(module, CLUSTER)
    result.plan.save(folder / f"plan{rank}.json")
    inputs = example_inputs(module, 2)[rank]
    for name, graph in (("planned", result.module), ("captured", module)):
        _profile(graph, inputs, folder / f"{name}{rank}.json")


def _profile(module: GraphModule, inputs: Any, path: Path) -> None:
    steps = schedule(wait=0, warmup=1, active=2, repeat=1)
    with (
        torch.no_grad(),
        profile(
            activities=[ProfilerActivity.CPU],
            record_shapes=True,
            schedule=steps,
            on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
        ) as profiler,
    ):
        for _ in range(3):
            OnWorld(module).run(*inputs)
            profiler.step()


def compare(*arguments: Any) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["compare", *map(str, arguments), "--json"], catch_exceptions=False)
    return done.exit_code, json.loads(done.stdout)


def test_a_planned_step_runs_as_planned_and_the_captured_one_does_not(two_ranks: World, tmp_path: Path):
    two_ranks.run(profile_steps, folder=tmp_path)
    assert (tmp_path / "plan0.json").read_bytes() == (tmp_path / "plan1.json").read_bytes()
    plan = tmp_path / "plan0.json"
    status, planned = compare(tmp_path / "planned0.json", plan, "--rank", tmp_path / "planned1.json")
    assert (status, planned["is_as_planned"], planned["rank"], planned["step"]) == (0, True, 0, 2)
    assert planned["num_planned"] == planned["num_ran"] == len(planned["collectives"])
    assert all(row["measured_us"] > 0 and row["late_us"] >= 0 for row in planned["collectives"])
    totals = {total["name"]: total["measured_us"] for total in planned["totals"]}
    assert totals["compute"] + totals["exposed"] <= totals["step"]

    status, captured = compare(tmp_path / "captured0.json", plan)
    assert (status, captured["is_as_planned"]) == (1, False)
    assert captured["num_ran"] > captured["num_planned"]
    assert len(captured["regrouped"]) > 0  # the plan merged what ran as single launches
