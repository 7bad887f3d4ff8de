"""Defaults of the options: by `weft.configure` and by the environment, under options that are given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import weft
from tests.integration.functions import (
    attend,
    attend_arguments,
    gather_and_multiply,
    gather_and_multiply_arguments,
)
from weft.errors import PipelineError
from weft.frontends.options import Options, make_options, split_options
from weft.frontends.run_report import RunReport
from weft.frontends.session import SESSION

VARIABLE = "WEFT_OPTIONS"


@pytest.fixture(autouse=True)
def no_defaults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    weft.configure()


def specs_of(report: RunReport) -> set[str]:
    return {record["spec"].partition("{")[0] for entry in report.entries for record in entry.report["passes"]}


def test_given_options_win_over_configured_ones_and_those_over_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, '{"cluster": "h100-8", "effort": "best", "memory_limit": "1GiB"}')
    weft.configure(effort="fast", memory_limit_bytes=2)
    found, rest = split_options({"weft.cluster": "h100-2x8", "max_autotune": True})
    assert (found.cluster, found.effort, found.memory_limit_bytes, rest) == (
        "h100-2x8",
        "fast",
        2,
        {"max_autotune": True},
    )
    assert make_options({"memory_limit_bytes": None}).memory_limit_bytes is None


def test_each_call_replaces_the_defaults_of_earlier_ones():
    weft.configure(effort="fast")
    weft.configure(strict=True)
    assert make_options({}) == Options(strict=True)
    weft.configure()
    assert make_options({}) == Options()


def test_caches_tell_defaults_apart(monkeypatch: pytest.MonkeyPatch):
    plain = weft.inductor_pass().options.identity
    weft.configure(pipeline="sink-waits")
    configured = weft.inductor_pass().options.identity
    weft.configure()
    monkeypatch.setenv(VARIABLE, '{"pipeline": "sink-waits"}')
    assert plain != configured == weft.inductor_pass().options.identity


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clustr": "h100-8"}, "options: no option is called 'weft.clustr'\ndid you mean 'weft.cluster'?"),
        ({"effort": "bst"}, "options: weft.effort is 'bst', expected one of fast, default, best"),
    ],
)
def test_wrong_defaults_are_told_at_once_and_change_nothing(options: dict[str, Any], message: str):
    weft.configure(strict=True)
    with pytest.raises(PipelineError) as error:
        weft.configure(**options)
    assert str(error.value) == message
    assert make_options({}).strict


@pytest.mark.parametrize("text", ["[1]", "{", "h100-8"])
def test_a_variable_that_holds_no_options_is_told(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(PipelineError, match="write a JSON object"):
        make_options({})


def test_a_backend_and_the_compiled_backward_get_the_defaults(mesh: DeviceMesh):
    weft.configure(pipeline="sink-waits")
    torch.compile(attend, backend="weft_eager")(*attend_arguments(mesh.get_group().group_name)).backward()
    assert specs_of(SESSION.report()) == {"sink-waits"}
    SESSION.reset()
    x = torch.ones(2, 2, requires_grad=True)
    with weft.compiled_backward("weft_eager"):
        (x @ x).sum().backward()
    (entry,) = SESSION.report().entries
    assert (entry.role, specs_of(SESSION.report())) == ("backward", {"sink-waits"})


@pytest.mark.slow
@pytest.mark.needs_cpp
def test_a_mode_of_inductor_goes_together_with_the_defaults(mesh: DeviceMesh, tmp_path: Path):
    weft.configure(pipeline="sink-waits", report=tmp_path)
    function = torch.compile(gather_and_multiply, backend="weft", mode="reduce-overhead")
    function(*gather_and_multiply_arguments(mesh.get_group().group_name))
    assert specs_of(SESSION.report()) == {"sink-waits"}


@pytest.mark.slow
@pytest.mark.needs_cpp
def test_the_hook_records_plans_and_applies_them(mesh: DeviceMesh, tmp_path: Path):
    arguments = attend_arguments(mesh.get_group().group_name)
    merge: dict[str, Any] = {"record": tmp_path, "pipeline": "bucket-all-gathers"}
    replay: dict[str, Any] = {"plan": tmp_path, "pipeline": "sink-waits", "strict": True}
    found: list[tuple[int, int]] = []
    for options in (merge, replay):
        torch._dynamo.reset()
        SESSION.reset()
        hook = weft.inductor_pass(**options, cache=False)
        with torch.no_grad():
            torch.compile(attend, options={"post_grad_custom_post_pass": hook})(*arguments)
        (entry,) = SESSION.report().entries
        found.append((entry.report["before"]["num_collectives"], entry.report["after"]["num_collectives"]))
    assert found[0][1] < found[0][0]
    assert found[0] == found[1]
