"""What is said of a run: when collectives are missing, in the side file, in logs and in the structured trace."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import weft
from tests.integration import functions
from tests.integration.worlds import PYTHONPATH, REPOSITORY
from weft.compat.compilers import settings_of
from weft.frontends.run_report import GraphEntry, read_entries, write_entry
from weft.frontends.session import NO_COLLECTIVES, SESSION
from weft.passes.base import all_passes
from weft.quantities import duration_text

MISSING = NO_COLLECTIVES.format(ranks=2)


def compile_and_run(function: Any, *arguments: Any, backward: bool = False, **options: Any) -> None:
    result: Tensor = torch.compile(function, backend="weft_eager", options=options or None)(*arguments)
    if backward:
        result.sum().backward()


def with_collectives(mesh: DeviceMesh, **options: Any) -> None:
    group = mesh.get_group().group_name
    compile_and_run(functions.gather_and_multiply, *functions.gather_and_multiply_arguments(group), **options)


def messages() -> tuple[str, ...]:
    return SESSION.report().messages


# Graphs without collectives.


def test_a_backward_without_collectives_is_named_once(mesh: DeviceMesh):
    for size in (2, 3):
        compile_and_run(functions.multiply, torch.ones(size, size, requires_grad=True), backward=True)
    assert messages() == (MISSING,)


def test_an_inference_without_collectives_is_named(mesh: DeviceMesh):
    compile_and_run(functions.multiply, torch.ones(2, 2))
    assert messages() == (MISSING,)


def test_a_forward_without_collectives_proves_nothing(mesh: DeviceMesh):
    compile_and_run(functions.multiply, torch.ones(2, 2, requires_grad=True))
    assert messages() == ()


def test_behind_a_graph_with_collectives_one_without_is_a_micro_step(mesh: DeviceMesh):
    with_collectives(mesh)
    compile_and_run(functions.multiply, torch.ones(2, 2, requires_grad=True), backward=True)
    assert messages() == ()


def test_under_the_python_reducer_a_backward_without_collectives_proves_nothing(mesh: DeviceMesh):
    """With dynamic shapes AOTAutograd compiles a backward graph before compiled autograd adds the collectives."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        compile_and_run(functions.multiply, torch.ones(2, 2, requires_grad=True), backward=True)
    assert messages() == ()


def test_one_rank_needs_no_collectives(fresh: None):
    compile_and_run(functions.multiply, torch.ones(2, 2))
    assert messages() == ()


# The report of a run.


def test_forward_backward_and_recompiles_are_in_one_report(mesh: DeviceMesh):
    group = mesh.get_group().group_name
    compiled = torch.compile(functions.attend, backend="weft_eager", dynamic=False)
    for tokens in (4, 6):
        _, shards, _ = functions.attend_arguments(group)
        compiled(torch.randn(2, tokens, functions.DIM), shards, group).backward()
    report = SESSION.report()
    assert [(entry.phase, entry.compile_id) for entry in report.entries] == [
        ("forward", "0/0"),
        ("backward", "0/0"),
        ("forward", "0/1"),
        ("backward", "0/1"),
    ]
    lines = str(report).splitlines()
    assert lines[0].split() == ["graph", "nodes", "collectives", "applied", "declined", "ms"]
    assert lines[1].startswith("forward 0/0 ")
    assert json.loads(report.to_json())["entries"][0]["report"]["before"]["num_collectives"] == 4


def test_the_report_is_written_to_the_folder_that_is_given(mesh: DeviceMesh, tmp_path: Path):
    with_collectives(mesh, **{"weft.report": str(tmp_path / "new")})
    (file,) = (tmp_path / "new").glob("*.jsonl")
    assert list(read_entries(file)) == list(SESSION.report().entries)


def test_a_run_tells_the_times_of_each_graph_and_of_the_whole_step(mesh: DeviceMesh):
    group = mesh.get_group().group_name
    compiled = torch.compile(functions.attend, backend="weft_eager", options={"weft.cluster": "h100-8"})
    arguments = functions.attend_arguments(group)
    compiled(*arguments).backward()
    optimizer = torch.optim.AdamW(arguments[1])
    torch.compile(optimizer.step, backend="weft_eager", options={"weft.cluster": "h100-8"})()
    report = weft.run_report()
    assert [entry.role for entry in report.entries] == ["forward", "backward", "optimizer"]
    why, head, *rows = str(report).splitlines()
    assert head.split()[-5:] == ["step", "exposed", "bound", "peak", "memory"]
    assert [row.split()[0] for row in rows] == ["forward", "backward", "optimizer", "whole", "simulated"]
    phases = [{row[1] for row in entry.figures["layers"]} for entry in report.entries]
    assert phases == [{"forward"}, {"backward"}, set()]
    steps = [entry.figures["after"]["step_us"] for entry in report.entries]
    bounds = [entry.figures["after"]["lower_bound_us"] for entry in report.entries]
    assert all(0 < bound <= step for bound, step in zip(bounds, steps, strict=True))
    whole = report.whole_step
    assert whole["after"]["step_us"] == pytest.approx(sum(steps), rel=0.05)
    assert why == whole["why"]
    assert why.startswith(f"Of the {duration_text(whole['after']['step_us'])} step, ")
    assert {row[1] for row in whole["layers"]} == {"forward", "backward"}
    assert report.whole_step["after"]["peak_bytes"] >= max(e.figures["after"]["peak_bytes"] for e in report.entries[:2])


class Products(nn.Module):
    """A module with two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.up) @ self.down


@pytest.mark.parametrize(
    "backend", ["weft_eager", pytest.param("weft", marks=[pytest.mark.slow, pytest.mark.needs_cpp])]
)
def test_collectives_of_a_compiled_run_are_named_after_parameters(mesh: DeviceMesh, backend: str):
    model = weft.simple_fsdp(nn.Sequential(Products(), Products()), mesh)
    torch.compile(model, backend=backend)(torch.randn(4, 8)).sum().backward()
    parameters = [f"{layer}.{name}" for layer in range(2) for name in ("up", "down")]
    sides = [each for report in SESSION._simulated.values() for each in report.graphs]
    phases = ["forward", "forward", "backward", "backward"]
    for side, phase in zip(sides, phases, strict=True):
        origins = [origin for record in side.records for origin in record.origins]
        assert {(origin.subject, origin.phase) for origin in origins} == {(name, phase) for name in parameters}
    whole = weft.run_report().whole_step
    layer, phase, *_ = whole["layers"][0]
    assert f"; the largest part is {layer} in {phase}, " in whole["why"]


def test_only_rank_0_tells_times(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    with_collectives(mesh)
    report = weft.run_report()
    assert len(report.entries) == 1
    assert not report.entries[0].figures
    assert "step" not in str(report)


def test_one_page_has_all_graphs_of_a_run_and_their_recompiles(mesh: DeviceMesh, tmp_path: Path):
    group = mesh.get_group().group_name
    options: dict[str, Any] = {"weft.cluster": "h100-8", "weft.report": str(tmp_path)}
    compiled = torch.compile(functions.attend, backend="weft_eager", dynamic=False, options=options)
    for tokens in (4, 6):
        _, shards, _ = functions.attend_arguments(group)
        compiled(torch.randn(2, tokens, functions.DIM), shards, group).backward()
    page = (tmp_path / "run.html").read_text()
    for name in ("forward 0/0", "backward 0/0", "forward 0/1", "backward 0/1", "recompile 1", "whole step"):
        assert f"<td>{name}</td>" in page
    assert page.count("Of the ") == 6, "each graph says why it takes so long, and so does the whole step, twice"
    assert page.index("Of the ") < page.index("<table")
    assert "<script" not in page
    (file,) = tmp_path.glob("*.jsonl")
    assert all(entry.figures for entry in read_entries(file))


def test_a_folder_that_cannot_be_written_stops_nothing(mesh: DeviceMesh, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with_collectives(mesh, **{"weft.report": str(tmp_path / "file")})
    (message,) = messages()
    assert message.startswith("no report is written: ")
    assert len(SESSION.report().entries) == 1


def test_lines_that_cannot_be_read_are_passed_over(tmp_path: Path):
    path = tmp_path / "side.jsonl"
    entry = GraphEntry("identity", "frame", "0/0", "forward", skipped="why")
    write_entry(path, entry)
    with path.open("a") as file:
        file.write('{"identity": "torn\n{"another": "version"}\n[]\n')
    write_entry(path, GraphEntry("identity", "frame", "0/1", "forward", skipped="why"))
    assert [found.compile_id for found in read_entries(path)] == ["0/0", "0/1"]


def test_what_the_file_has_is_not_written_again(tmp_path: Path):
    path = tmp_path / "side.jsonl"
    for rank in range(2):
        write_entry(path, GraphEntry("identity", "frame", "0/0", "forward", skipped="why", rank=rank))
    assert [found.rank for found in read_entries(path)] == [0]


def test_there_is_nothing_in_a_file_that_is_not_there(tmp_path: Path):
    assert list(read_entries(tmp_path / "none.jsonl")) == []


# Where users of the compiler stack look.


def test_counters_tell_what_the_passes_did(mesh: DeviceMesh):
    with_collectives(mesh)
    counters = torch._dynamo.utils.counters["weft"]
    assert counters["graphs"] == 1
    assert (counters["collectives before"], counters["collectives after"]) == (1, 1)
    assert counters["declined exposed-by-dependency"] == 1
    assert "weft" in torch._dynamo.utils.compile_times(repr="csv")[0]


@pytest.mark.slow
def test_logs_and_the_structured_trace_hold_the_listings_and_the_report(tmp_path: Path):
    code = (
        "import torch\n"
        "from tests.integration import functions\n"
        "from weft.frontends.fake_world import fake_world\n"
        "with fake_world({'dp': 2}) as mesh:\n"
        "    arguments = functions.gather_and_multiply_arguments(mesh.get_group().group_name)\n"
        "    torch.compile(functions.gather_and_multiply, backend='weft_eager')(*arguments)\n"
    )
    environment = {**os.environ, "TORCH_LOGS": "weft", "TORCH_TRACE": str(tmp_path), "PYTHONPATH": PYTHONPATH}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"weft: forward 0/0: nodes \d+ -> \d+, collectives 1 -> 1, \d+ applied, ", done.stderr)
    (trace,) = tmp_path.iterdir()
    text = trace.read_text()
    found = re.findall(r'"artifact": \{"name": "(weft_\w+)"', text)
    changed = re.findall(r"^weft_\d\d_(\w+)$", "\n".join(found), re.MULTILINE)
    assert changed, "no pass changed the graph"  # the listing behind each that did, in the order in which they ran
    assert {name.replace("_", "-") for name in changed} <= set(all_passes())
    assert found == ["weft_before", *found[1:-2], "weft_after", "weft_report"]
    assert found[1:-2] == sorted(found[1:-2])
    assert "= all_gather(" in text


# The witnesses.


@pytest.mark.parametrize("witness", ["structure", "equivalence", "values", "off"])
def test_every_witness_is_heard_while_a_compiler_traces(mesh: DeviceMesh, witness: str):
    with_collectives(mesh, **{"weft.verify": witness, "weft.strict": True})
    said = " ".join(SESSION.report().entries[0].report["witnesses"])
    assert ("bitwise equal on 2 virtual ranks" in said) == (witness == "values")
    assert messages() == ()


@pytest.mark.needs_cpp
def test_values_are_compared_under_inductor_too(mesh: DeviceMesh):
    group = mesh.get_group().group_name
    options = {"weft.verify": "values", "weft.strict": True, "weft.cluster": "h100-2x8"}
    compiled = torch.compile(functions.gather_and_multiply, backend="weft", options=options)
    compiled(*functions.gather_and_multiply_arguments(group)).sum().backward()
    assert messages() == ()


def test_a_graph_without_collectives_is_forgotten_once_one_with_them_is_seen(mesh: DeviceMesh):
    compile_and_run(functions.multiply, torch.ones(2, 2))
    assert messages() == (MISSING,)
    with_collectives(mesh)
    assert messages() == ()


def test_a_graph_that_was_left_as_it_was_has_its_collectives(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> Any:
        raise KeyError("injected")

    monkeypatch.setattr("weft.frontends.session.optimize", fail)
    with_collectives(mesh)
    (message,) = messages()
    assert message.startswith("a graph is left as it was: KeyError: 'injected'")
    assert SESSION.report().entries[0].num_collectives == 1


def test_ddp_puts_its_all_reduces_into_the_graphs(mesh: DeviceMesh):
    del mesh
    settings, fusion = settings_of("inductor"), "_fuse_ddp_communication"  # which DDP switches on
    with (
        torch._dynamo.config.patch(optimize_ddp=True, compiled_autograd=False),
        settings.patch({fusion: getattr(settings, fusion)}),
    ):
        model = weft.ddp(torch.nn.Linear(4, 4))

        @torch.compile(backend="weft_eager")
        def compute_gradients(x: Tensor) -> None:
            model(x).sum().backward()

        compute_gradients(torch.ones(2, 4))
    assert sum(entry.num_collectives for entry in SESSION.report().entries) == 2
