"""The plan cache: a second run carries out the plan of the first, in this process or in another."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import weft
import weft.version
from weft.compat import refresh_names
from weft.cost.cluster import Cluster
from weft.graph.groups import read_groups
from weft.graph.listings.text import canonical_digest
from weft.passes.base import Numerics, Pass
from weft.passes.communication.schedule_overlap import ScheduleOverlap
from weft.passes.pipeline import replay_in_place
from weft.plan import cache
from weft.plan.cache import VARIABLE, PlanCache
from weft.plan.context import Context
from weft.plan.plan import Step

REPOSITORY = Path(__file__).parents[3]
LISTING = """group('dp', size=2)

def graph(x: f32[64, 64], p: f32[32, 64], q: f32[32, 64]):
    a: f32[64, 64] = mm(x, x)
    ag: f32[64, 64] = all_gather(p, 2, 'dp')
    w: f32[64, 64] = wait(ag)
    b: f32[64, 64] = relu(a)
    r: f32[64, 64] = mm(b, w)
    ag2: f32[64, 64] = all_gather(q, 2, 'dp')
    w2: f32[64, 64] = wait(ag2)
    s: f32[64, 64] = mm(r, w2)
    return [s]
"""
CLUSTER = "h100-8"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in memory and on disk."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plans"))
    cache.forget_all()
    return tmp_path / "plans"


def module_of(listing: str = LISTING) -> GraphModule:
    return weft.parse(listing)


def forbid_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*_args: Any, **_keywords: Any) -> None:
        raise AssertionError("planned anew")

    monkeypatch.setattr(ScheduleOverlap, "plan", plan)


def entry_in(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def is_hit(module: GraphModule | None = None, cluster: str | Cluster | None = CLUSTER, **options: Any) -> bool:
    return weft.optimize(module or module_of(), cluster, **options).report.from_cache


@pytest.mark.parametrize("from_disk", [False, True])
def test_a_second_run_carries_out_the_plan_of_the_first(folder: Path, monkeypatch: pytest.MonkeyPatch, from_disk: bool):
    first = weft.optimize(module_of(), CLUSTER)
    if from_disk:
        cache.forget_all()
    else:
        entry_in(folder).unlink()
    forbid_planning(monkeypatch)
    second = weft.optimize(module_of(), CLUSTER)
    assert (first.report.from_cache, second.report.from_cache) == (False, True)
    assert weft.listing(second.module) == weft.listing(first.module) != LISTING
    assert second.plan == first.plan
    assert second.report.applied == first.report.applied != ()
    assert "the plan comes from the plan cache" in str(second.report)


def test_a_graph_with_other_names_gets_the_same_plan_under_its_own_names(folder: Path):
    pipeline = "hoist-launches,sink-waits"  # which add no node
    weft.optimize(module_of(), CLUSTER, pipeline=pipeline)
    renamed = LISTING.replace("ag2", "later").replace("ag:", "w7:").replace("wait(ag)", "wait(w7)").replace("w2", "ag")
    found, anew = (weft.optimize(module_of(renamed), CLUSTER, pipeline=pipeline, cache=how) for how in (True, False))
    assert found.report.from_cache
    assert weft.listing(found.module) == weft.listing(anew.module) != renamed
    assert found.report.applied == anew.report.applied != ()
    in_place = module_of(renamed)
    replay_in_place(in_place, found.report.bare_plan)
    assert weft.listing(in_place) == weft.listing(anew.module)


def test_new_nodes_never_take_the_name_of_a_node_of_the_graph(folder: Path):
    pipeline = "bucket-all-gathers"
    first = weft.optimize(module_of(), CLUSTER, pipeline=pipeline)
    new = {node.name for node in first.module.graph.nodes} - {node.name for node in module_of().graph.nodes}
    other = module_of()
    for node, name in zip(other.graph.nodes, sorted(new), strict=False):
        node.name = name
    refresh_names(other.graph)
    found = weft.optimize(other, CLUSTER, pipeline=pipeline)
    names = [node.name for node in found.module.graph.nodes]
    assert found.report.from_cache
    assert len(names) == len({*names})
    assert {node.name for node in other.graph.nodes if node.op == "placeholder"} <= {*names}
    groups = read_groups(found.module)
    anew = weft.optimize(other, CLUSTER, pipeline=pipeline, cache=False)
    assert canonical_digest(found.module, groups) == canonical_digest(anew.module, groups)


@pytest.mark.parametrize(
    "options",
    [
        {"cluster": None},
        {"cluster": "h100-8x8"},
        {"pipeline": "sink-waits"},
        {"pipeline": weft.Pipeline.parse("auto").without(["sink-waits"])},
        {"effort": "fast"},
        {"memory_limit_bytes": 10**9},
        {"strict": True},
        {"groups": {"dp": 4}},
        {"withheld": {"dp": "other ranks hold another graph"}},
    ],
)
def test_another_option_misses(folder: Path, options: dict[str, Any]):
    weft.optimize(module_of(), CLUSTER)
    assert not is_hit(**options)
    assert is_hit()


@pytest.mark.parametrize("name", ["weft.version.VERSION", "torch.__version__"])
def test_another_version_misses(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    weft.optimize(module_of(), CLUSTER)
    monkeypatch.setattr(name, "0.0.0")
    assert not is_hit()


def test_another_graph_misses(folder: Path):
    weft.optimize(module_of(), CLUSTER)
    assert not is_hit(module_of(LISTING.replace("relu", "neg")))
    tagged = module_of()
    next(iter(tagged.graph.nodes)).meta["partitioner_tag"] = "is_backward"
    assert not is_hit(tagged)
    strided = module_of()
    product = next(node for node in strided.graph.nodes if node.name == "b")
    product.meta["val"] = product.meta["val"].t()
    assert not is_hit(strided)


def test_a_graph_with_symbolic_sizes_is_planned_each_time(folder: Path):
    text = "symbol('s0', hint=4)\n\ndef graph(x: f32[s0, 4]):\n    y: f32[s0, 4] = relu(x)\n    return [y]\n"
    weft.optimize(module_of(text))
    assert not is_hit(module_of(text), None)


@dataclass(frozen=True)
class KeepEverything(Pass):
    """A pass of another package."""

    numerics = Numerics.EXACT

    def plan(self, graph: torch.fx.Graph, context: Context) -> Step:
        return self.step((), ())


def test_a_pass_from_another_package_is_planned_each_time(folder: Path):
    assert not KeepEverything.__module__.startswith("weft.")
    for _ in range(2):
        assert not is_hit(pipeline="sink-waits,keep-everything")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[: len(text) // 2], "its contents do not match their digest"),
        (lambda text: text.replace(b'"torch"', b'"toroh"'), "its contents do not match their digest"),
        (lambda _: b"", "it is for another graph, cluster or option"),
        (lambda text: b"0" * 32 + text[32:], "it is for another graph, cluster or option"),
    ],
)
def test_a_damaged_entry_is_refused_with_its_reason_and_written_anew(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Any, reason: str
):
    first = weft.optimize(module_of(), CLUSTER)
    whole = entry_in(folder).read_bytes()
    entry_in(folder).write_bytes(damage(whole))
    cache.forget_all()
    with caplog.at_level(logging.WARNING, "weft"):
        second = weft.optimize(module_of(), CLUSTER)
    assert f"{entry_in(folder).name} is refused: {reason}" in caplog.text
    assert not second.report.from_cache
    assert weft.listing(second.module) == weft.listing(first.module)
    assert entry_in(folder).read_bytes() == whole


def test_an_entry_that_no_longer_leads_to_its_result_is_refused(folder: Path, caplog: pytest.LogCaptureFixture):
    weft.optimize(module_of(), CLUSTER)
    key = entry_in(folder).stem
    for wrong in (weft.optimize(module_of(LISTING.replace("relu", "neg")), CLUSTER, cache=False), None):
        plan = weft.Plan(()) if wrong is None else wrong.report.bare_plan
        PlanCache().keep(key, plan)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "weft"):
            assert not is_hit()
        assert "a graph is planned anew" in caplog.text
        assert is_hit()


def test_the_cache_is_switched_off_by_an_argument_or_by_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert not is_hit(cache=tmp_path / "elsewhere")
    assert len([*(tmp_path / "elsewhere").iterdir()]) == 1
    assert not folder.exists()
    assert is_hit()
    assert not is_hit(cache=False)
    monkeypatch.setenv(VARIABLE, "0")
    assert not is_hit()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert PlanCache().folder == tmp_path / "home" / "weft" / "plans"
    with pytest.raises(weft.WeftError, match="cache is 3, a folder, True or False is needed"):
        weft.optimize(module_of(), cache=3)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_keeps_plans_in_memory_only(folder: Path):
    folder.touch()  # a file where the folder should be
    assert not is_hit()
    assert is_hit()
    cache.forget_all()
    assert not is_hit()


def test_old_plans_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "MOST_FILES", 2)
    monkeypatch.setattr(cache, "MOST_KEPT", 2)
    plans = PlanCache()
    for age, key in enumerate("abc"):
        plans.keep(key, weft.Plan(()))
        os.utime(folder / f"{key}.plan", (age, age))
    assert sorted(file.name for file in folder.iterdir()) == ["b.plan", "c.plan"]
    assert plans.find("a") is None


PROGRAM = """
import sys, weft
from pathlib import Path

result = weft.optimize(weft.parse(Path(sys.argv[1]).read_text()), "h100-8")
print(result.report.from_cache, result.plan.digest)
print(weft.listing(result.module))
"""


@pytest.mark.slow
def test_processes_share_plans_and_end_with_the_same_graph(folder: Path, tmp_path: Path):
    (tmp_path / "step.txt").write_text(LISTING)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "step.txt")]
    path = {"PYTHONPATH": str(REPOSITORY / "src")}

    def start(seed: str) -> subprocess.Popen[str]:
        environment = os.environ | path | {"PYTHONHASHSEED": seed}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    together = [start("1"), start("2")]
    outputs = [process.communicate(timeout=200) for process in together]
    outputs.append(start("3").communicate(timeout=200))
    assert [error for _, error in outputs if "Error" in error] == []
    hits = [text.split()[0] for text, _ in outputs]
    assert hits[2] == "True"
    assert "False" in hits[:2]
    assert len({text.partition(" ")[2] for text, _ in outputs}) == 1
    assert is_hit()  # the file, here
