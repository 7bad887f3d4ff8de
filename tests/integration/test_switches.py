"""Switches for production: the environment turns Weft or single passes off, and a fault leaves a file to report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import weft
from tests.integration.functions import attend, attend_arguments
from weft.errors import PipelineError
from weft.frontends.fault_file import write_fault
from weft.frontends.options import Options
from weft.frontends.run_report import RunReport
from weft.frontends.session import SESSION


def compile_and_run(mesh: DeviceMesh, **options: object) -> RunReport:
    torch._dynamo.reset()
    SESSION.reset()
    named = {f"weft.{name}": value for name, value in options.items()}
    torch.compile(attend, backend="weft_eager", options=named)(
        *attend_arguments(mesh.get_group().group_name)
    ).backward()
    return SESSION.report()


def passes_in(report: RunReport) -> set[str]:
    return {record["spec"].partition("{")[0] for entry in report.entries for record in entry.report["passes"]}


def test_weft_can_be_switched_off(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WEFT_DISABLE", "1")
    report = compile_and_run(mesh)
    assert [(entry.skipped, entry.num_collectives) for entry in report.entries] == [("WEFT_DISABLE is set", 4)] * 2
    assert "WEFT_DISABLE is set, so no graph is changed" in report.messages
    monkeypatch.setenv("WEFT_DISABLE", "0")
    assert all(entry.report["applied"] for entry in compile_and_run(mesh).entries)


def test_single_passes_can_be_switched_off(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch):
    every = passes_in(compile_and_run(mesh, cluster="h100-8"))
    monkeypatch.setenv("WEFT_DISABLE_PASSES", "schedule-overlap, remove-dead-code")
    assert passes_in(compile_and_run(mesh, cluster="h100-8")) == every - {"schedule-overlap", "remove-dead-code"}


def test_a_pass_that_does_not_exist_cannot_be_switched_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WEFT_DISABLE_PASSES", "schedule-overlab")
    with pytest.raises(PipelineError, match="did you mean 'schedule-overlap'"):
        Options()


@pytest.mark.parametrize("name", ["WEFT_DISABLE", "WEFT_DISABLE_PASSES"])
def test_switches_are_part_of_the_identity(monkeypatch: pytest.MonkeyPatch, name: str):
    before = Options().identity
    monkeypatch.setenv(name, "1" if name == "WEFT_DISABLE" else "schedule-overlap")
    assert Options().identity != before


def test_a_fault_leaves_a_file_to_report_without_data(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise KeyError("injected")

    monkeypatch.setattr(weft.Pipeline, "run", fail)
    report = compile_and_run(mesh, report=tmp_path)
    files = [*tmp_path.glob("weft-fault-*.txt")]
    assert len(files) == 2  # forward and backward
    assert all(any(str(file) in message for message in report.messages) for file in files)
    for file in files:
        text = file.read_text()
        assert "def graph(" in text
        assert "KeyError: 'injected'" in text
        assert f"torch {torch.__version__}" in text


def test_a_file_to_report_has_no_values(tmp_path: Path):
    listing = (
        "tensor('secret', f32[3], [1.25, 2.5, 3.75])\ntensor('tail', f32[2](offset=1, base='secret'), [2.5, 3.75])\n"
    )
    text = write_fault(lambda: listing, Options(), "", tmp_path).read_text()
    assert "tensor('secret', f32[3])" in text
    assert "tensor('tail', f32[2](offset=1, base='secret'))" in text
    assert not any(value in text for value in ("1.25", "2.5", "3.75"))
