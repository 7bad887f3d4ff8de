"""The plan cache under torch.compile: a second compilation plans nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.integration.functions import attend, attend_arguments
from tests.integration.training import Trained, same, train
from tests.integration.worlds import World
from weft.frontends.options import Options
from weft.frontends.run_report import RunReport
from weft.frontends.session import SESSION
from weft.passes.communication.schedule_overlap import ScheduleOverlap
from weft.plan import cache


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in memory and on disk."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "plans"))
    cache.forget_all()
    return tmp_path / "plans"


def compile_and_run(mesh: DeviceMesh, **options: Any) -> RunReport:
    """Forward and backward of one function, as a new process would compile it."""
    torch._dynamo.reset()
    SESSION.reset()
    named = {f"weft.{name}": value for name, value in options.items()}
    compiled = torch.compile(attend, backend="weft_eager", options=named)
    compiled(*attend_arguments(mesh.get_group().group_name)).backward()
    return SESSION.report()


def test_a_second_compilation_carries_out_the_plans_of_the_first(
    mesh: DeviceMesh, plans: Path, monkeypatch: pytest.MonkeyPatch
):
    first = compile_and_run(mesh, cluster="h100-8")
    assert len([*plans.iterdir()]) == 2
    cache.forget_all()
    monkeypatch.setattr(ScheduleOverlap, "plan", None)
    second = compile_and_run(mesh, cluster="h100-8")
    assert [entry.report["from_cache"] for entry in (*first.entries, *second.entries)] == [False, False, True, True]
    for before, after in zip(first.entries, second.entries, strict=True):
        assert after.report["applied"] == before.report["applied"] != []
        assert after.report["after"] == before.report["after"]
        assert after.report["plan_digest"] == before.report["plan_digest"]
    assert second.messages == ()


def test_the_option_switches_the_cache_off_and_is_no_part_of_the_identity(mesh: DeviceMesh, plans: Path):
    for _ in range(2):
        report = compile_and_run(mesh, cache=False)
        assert [entry.report["from_cache"] for entry in report.entries] == [False, False]
    assert not plans.exists()
    assert Options(cache=False).identity == Options(cache=plans).identity == Options().identity


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_ranks_train_alike_whether_their_plans_are_found_or_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "plans"))

    def trained(name: str) -> list[Trained]:
        (tmp_path / name).mkdir()
        with World(2, tmp_path / name) as world:
            return world.run(train, parallel="simple-fsdp", mesh={"dp": 2}, backend="weft_eager", options={})

    searched = trained("searched")
    files = sorted((tmp_path / "plans").iterdir())
    assert len(files) > 1
    files[0].unlink()  # some plans are found, others searched again
    found = trained("found")
    assert sorted((tmp_path / "plans").iterdir()) == files
    for first, second in zip(searched, found, strict=True):
        assert same(first, second)
        assert [graph["after"] for graph in second.graphs] == [graph["after"] for graph in first.graphs]
        assert second.messages == ()
    assert {graph["from_cache"] for rank in found for graph in rank.graphs} == {True, False}
