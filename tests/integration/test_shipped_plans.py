"""Plans recorded in one run and applied in another, under torch.compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from typer.testing import CliRunner

import weft
import weft.frontends.options
from tests.integration.functions import attend, attend_arguments, gather_and_multiply, gather_and_multiply_arguments
from tests.integration.training import Trained, same, train
from tests.integration.worlds import World
from weft.cli.main import app
from weft.errors import PlanError
from weft.frontends.fake_world import fake_world
from weft.frontends.run_report import RunReport
from weft.frontends.session import SESSION
from weft.frontends.trace_log import read_log
from weft.passes.pipeline import identity_of
from weft.plan.folder import PlanFolder

REPOSITORY = Path(__file__).parents[2]


def compile_and_run(mesh: DeviceMesh, scale: float = 1.0, **options: Any) -> RunReport:
    """Forward and backward of one function, as a new process would compile it."""
    torch._dynamo.reset()
    SESSION.reset()
    named = {f"weft.{name}": value for name, value in options.items()}
    compiled = torch.compile(
        lambda x, shards, group: attend(x, shards, group) * scale, backend="weft_eager", options=named
    )
    compiled(*attend_arguments(mesh.get_group().group_name)).backward()
    return SESSION.report()


def forbid_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*_args: Any, **_keywords: Any) -> None:
        raise AssertionError("planned anew")

    monkeypatch.setattr(weft.Pipeline, "run", plan)


def test_a_recorded_plan_is_applied_without_planning(mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recorded = compile_and_run(mesh, record=tmp_path, cluster="h100-8")
    assert len([*tmp_path.glob("*.json")]) == 2
    forbid_planning(monkeypatch)
    applied = compile_and_run(mesh, plan=tmp_path, strict=True)
    assert [entry.phase for entry in applied.entries] == ["forward", "backward"]
    for first, second in zip(recorded.entries, applied.entries, strict=True):
        assert second.report["applied"] == first.report["applied"] != []
        assert second.report["after"] == first.report["after"]
    assert applied.messages == ()


def test_a_plan_for_a_graph_with_other_names_is_applied(mesh: DeviceMesh, tmp_path: Path):
    """Only the names of nodes differ: the plan is found by the canonical digest, and the values stay equal."""
    arguments = attend_arguments(mesh.get_group().group_name)
    module = weft.capture(attend, arguments)
    renamed = weft.capture(attend, arguments)
    for number, node in enumerate(renamed.graph.nodes):
        node.name = f"other_{number}" if node.op == "call_function" else node.name
    renamed.recompile()
    (listing, identity), (other_listing, other) = identity_of(module), identity_of(renamed)
    assert listing != other_listing
    assert identity == other
    plan = weft.optimize(module, "h100-8").plan
    folder = PlanFolder(tmp_path)
    folder.record(plan, identity)
    found = weft.apply(renamed, folder.find(other_listing, other))
    assert any(entry.applied for entry in plan.steps)
    assert "other_" in weft.listing(found)
    assert weft.verify(renamed, found, ranks=2)


def test_a_graph_without_a_plan_is_planned_anew_and_the_warning_names_the_nodes(mesh: DeviceMesh, tmp_path: Path):
    compile_and_run(mesh, record=tmp_path)
    report = compile_and_run(mesh, scale=2.0, plan=tmp_path)
    assert all(entry.report["applied"] for entry in report.entries)
    forward, backward = report.messages
    assert "first different node here: mul" in forward
    assert "mul(" in backward
    with pytest.raises(Exception, match="no plan is for this graph"):
        compile_and_run(mesh, scale=3.0, plan=tmp_path, strict=True)


def test_a_folder_without_plans_is_named(mesh: DeviceMesh, tmp_path: Path):
    (message,) = compile_and_run(mesh, plan=tmp_path).messages
    assert f"the folder {tmp_path} has no plans" in message
    with pytest.raises(PlanError, match="is missing"):
        PlanFolder(tmp_path / "nowhere").find("", "")
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match="cannot be created"):
        PlanFolder(tmp_path / "file").record(weft.Plan(()), "x")


def test_an_edited_plan_is_not_applied(mesh: DeviceMesh, tmp_path: Path):
    compile_and_run(mesh, record=tmp_path)
    for file in tmp_path.glob("*.json"):
        file.write_text(file.read_text().replace('"num_nodes": ', '"num_nodes": 1'))
    messages = compile_and_run(mesh, plan=tmp_path).messages
    assert all("edited" in message or "not a valid plan" in message for message in messages)
    assert messages


@pytest.mark.needs_cpp
def test_plans_are_recorded_again_although_inductor_has_the_graph_in_its_cache(mesh: DeviceMesh, tmp_path: Path):
    for _ in range(2):
        torch._dynamo.reset()
        SESSION.reset()
        compiled = torch.compile(gather_and_multiply, backend="weft", options={"weft.record": tmp_path / "plans"})
        compiled(*gather_and_multiply_arguments(mesh.get_group().group_name))
        files = [*(tmp_path / "plans").glob("*.json")]
        assert files != []
        for file in files:
            file.unlink()


def test_other_plans_in_the_folder_give_another_identity(tmp_path: Path):
    first = weft.frontends.options.Options(plan=tmp_path).identity
    PlanFolder(tmp_path).record(weft.Plan(()), "x")
    assert weft.frontends.options.Options(plan=tmp_path).identity != first


PROGRAM = """
import torch, weft
from tests.integration.functions import attend, attend_arguments
from weft.frontends.fake_world import fake_world
from weft.frontends.session import SESSION

options = {options}
with fake_world({{"dp": 2}}) as mesh:
    compiled = torch.compile(attend, **options)
    compiled(*attend_arguments(mesh.get_group().group_name)).backward()
print([bool(entry.report["applied"]) for entry in SESSION.report().entries], SESSION.report().messages)
"""


def run_program(folder: Path, options: dict[str, Any], **environment: str) -> str:
    """What the program prints in a process of its own."""
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(options=options)],
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'src'}"} | environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.needs_cpp
def test_plans_made_from_the_log_of_plain_torch_compile_fit_the_backend(tmp_path: Path):
    (log := tmp_path / "log").mkdir()
    (plans := tmp_path / "plans").mkdir()
    run_program(tmp_path, {}, TORCH_TRACE=str(log))
    logged = [graph for graph in read_log(log) if graph.kind == "inductor_post_grad_graph"]
    assert len(logged) == 2
    for graph in logged:
        source = f"{graph.path}:{graph.line}"
        assert CliRunner().invoke(app, ["optimize", source, "--cluster", "h100-8", "--plan", str(plans)]).exit_code == 0
        assert CliRunner().invoke(app, ["apply", source, str(plans)]).exit_code == 0
    options = {"backend": "weft", "options": {"weft.plan": str(plans), "weft.strict": True}}
    assert run_program(tmp_path, options).strip() == "[True, True] ()"


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("parallel", "axis", "backend"),
    [
        ("ddp-reducer", "dp", "weft_eager"),
        ("simple-fsdp", "dp", "weft_eager"),
        ("tp", "tp", "weft_eager"),
        pytest.param("simple-fsdp", "dp", "weft", marks=pytest.mark.needs_cpp),
    ],
)
def test_ranks_train_alike_with_plans_of_other_processes(tmp_path: Path, parallel: str, axis: str, backend: str):
    def trained(**options: Any) -> list[Trained]:
        named = {f"weft.{name}": str(value) for name, value in options.items()}
        folder = tmp_path / "-".join(options)
        folder.mkdir()
        with World(2, folder) as world:
            return world.run(train, parallel=parallel, mesh={axis: 2}, backend=backend, options=named)

    plans = tmp_path / "plans"
    recorded, applied = trained(record=plans), trained(plan=plans)
    assert [*plans.glob("*.json")] != []
    for first, second in zip(recorded, applied, strict=True):
        assert same(first, second)
        assert {graph["role"] for graph in second.graphs} == {"forward", "backward"}
        changed = {graph["role"] for graph in second.graphs if graph["applied"]}
        assert changed >= {"backward"} | ({"forward"} if parallel != "ddp-reducer" else set())
        assert [graph["after"] for graph in second.graphs] == [graph["after"] for graph in first.graphs]
        assert second.messages == ()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("parallel", ["simple-fsdp", "ddp-reducer"])
def test_plans_of_one_process_without_other_ranks_fit_real_ranks(
    fresh: None, two_ranks: World, tmp_path: Path, parallel: str
):
    given: dict[str, Any] = {"parallel": parallel, "mesh": {"dp": 2}}
    with fake_world({"dp": 2}):
        train(**given, backend="weft_eager", steps=1, options={"weft.record": str(tmp_path)})
    options = {"weft.plan": str(tmp_path), "weft.strict": True}
    plain = two_ranks.reference(train, **given, backend="aot_eager")
    for first, second in zip(plain, two_ranks.run(train, **given, backend="weft_eager", options=options), strict=True):
        assert second.losses == pytest.approx(first.losses, rel=1e-5)
        assert {graph["role"] for graph in second.graphs if graph["applied"]} >= {"backward"}
        assert second.messages == ()
