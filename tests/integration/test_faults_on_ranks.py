"""A fault of Weft on real ranks: training goes on with the same losses, and all ranks run the same graph."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule

import weft
from tests.integration.functions import DIM, attend, attend_arguments, share_a_read, share_a_read_arguments
from tests.integration.test_order import code_of
from tests.integration.worlds import World
from weft.frontends.session import ALL_RANKS, SESSION
from weft.passes.base import all_passes, parse_pass
from weft.plan.cache import VARIABLE, forget_all
from weft.zoo.parallel.collectives import ALL_GATHER, ALL_REDUCE, WAIT

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

STEPS = 3
PARTS = {
    "planner": "weft.passes.communication.schedule_overlap.search",
    "explanation of the plan": "weft.passes.communication.schedule_overlap.explain_exposed",
    "cost model": "weft.cost.cluster.Cluster.estimate",
    "plan cache, finding": "weft.plan.cache.PlanCache.find",
    "plan cache, keeping": "weft.plan.cache.PlanCache.keep",
    "applying": "weft.graph.edit.Edit.commit",
    "applying in place": "weft.passes.pipeline.refresh_names",
    "checking": "weft.graph.check.validate",
}
"""Where a fault is injected besides passes."""
OF_THE_CUT = {
    "tagging": "weft.frontends.partitioner._tag",
    "sorting": "weft.frontends.partitioner._put_forward_first",
    "cutting": "weft.compat.compilers.cut_by_order",
}
"""Where a fault is injected between planning a joint graph and cutting it into forward and backward."""
OF_PASSES = {name: f"pass {name}" for name in sorted(all_passes())}


def fail(*_: Any, **__: Any) -> Any:
    raise KeyError("injected")


def faulty(case: str) -> tuple[Any, dict[str, Any]]:
    """What injects the fault of a case, and the options that make Weft meet it."""
    if case in PARTS:
        return mock.patch(PARTS[case], fail), {"weft.cluster": "h100-8"}
    if case in OF_THE_CUT:
        return mock.patch(OF_THE_CUT[case], fail), {"weft.memory_limit": "1GB"}
    name = case.removeprefix("pass ")
    return mock.patch.object(type(parse_pass(name)), "plan", fail), {"weft.pipeline": name, "weft.cache": False}


def train(case: str, on: Sequence[int], folder: str, compiled: bool = True, **options: Any) -> dict[str, Any]:
    """Train a few steps with the fault of a case on some ranks; the losses, and what became of the graphs."""
    torch._dynamo.reset()
    SESSION.reset()
    forget_all()
    torch.manual_seed(dist.get_rank())
    x, shards, group = attend_arguments(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    injected, given = faulty(case) if compiled else (contextlib.nullcontext(), {})
    given = {"weft.report": folder, "weft.cache": folder, **given, **{f"weft.{k}": v for k, v in options.items()}}
    ran: list[str] = []
    weave = SESSION.weave

    def noted(module: GraphModule, *args: Any, **keywords: Any) -> bool:
        before = weft.listing(module)
        is_woven = weave(module, *args, **keywords)
        ran.append("left" if weft.listing(module) == before else weft.listing(module))
        return is_woven

    step = torch.compile(attend, backend="weft_eager", options=given) if compiled else attend
    losses: list[float] = []
    with (
        mock.patch.dict(os.environ, {VARIABLE: "1"}),
        injected if dist.get_rank() in on else contextlib.nullcontext(),
        mock.patch.object(SESSION, "weave", noted),
    ):
        for _ in range(STEPS):
            loss: Tensor = step(x, shards, group)
            loss.backward()
            for shard in shards:
                shard.data -= 0.01 * shard.grad  # type: ignore[operator]
                shard.grad = None
            losses.append(loss.item())
    report = SESSION.report()
    skipped = [entry.skipped for entry in report.entries]
    return {"losses": losses, "ran": ran, "skipped": skipped, "messages": report.messages}


def train_each(cases: Sequence[str], on: Sequence[int], folder: str) -> dict[str, dict[str, Any]]:
    """The cases one after the other, and the same steps without a compiler."""
    found = {case: train(case, on, f"{folder}/{number}") for number, case in enumerate(cases)}
    return found | {"eager": train("", (), folder, compiled=False)}


def assert_alike(results: list[dict[str, dict[str, Any]]], cases: Sequence[str], on: Sequence[int]) -> None:
    for case in cases:
        for rank, result in enumerate(results):
            assert result[case]["losses"] == pytest.approx(result["eager"]["losses"], rel=1e-5), (case, rank)
            assert result[case]["ran"] == ["left", "left"], (case, rank)
            said = "\n".join(result[case]["messages"])
            told = (
                "KeyError: 'injected'" if rank in on else "agreement: rank 1 leaves it as it was: KeyError: 'injected'"
            )
            assert all(told in skipped for skipped in result[case]["skipped"]), (case, rank)
            assert f"a graph is left as it was: {told}" in said, (case, rank)
            assert ALL_RANKS in said, (case, rank)
            assert ("weft-fault-" in said) == (rank in on), "the rank with the fault writes a file to report"


@pytest.mark.parametrize(
    "on",
    [pytest.param((1,), id="on rank 1 only"), pytest.param((0, 1), id="on both ranks", marks=pytest.mark.slow)],
)
def test_a_fault_of_a_part_leaves_the_graph_as_it_was_on_all_ranks(
    two_ranks: World, tmp_path: Path, on: tuple[int, ...]
):
    assert_alike(two_ranks.run(train_each, cases=[*PARTS], on=on, folder=str(tmp_path)), [*PARTS], on)


@pytest.mark.slow
def test_a_fault_of_any_pass_on_one_rank_leaves_the_graph_as_it_was_on_all_ranks(two_ranks: World, tmp_path: Path):
    cases = [*OF_PASSES.values()]
    assert_alike(two_ranks.run(train_each, cases=cases, on=(1,), folder=str(tmp_path)), cases, (1,))


def test_a_fault_of_one_rank_while_it_cuts_the_step_lets_torch_cut_it_on_all(two_ranks: World, tmp_path: Path):
    cases = [*OF_THE_CUT]
    results = two_ranks.run(train_each, cases=cases, on=(1,), folder=str(tmp_path))
    for case in cases:
        first, second = (result[case] for result in results)
        assert first["ran"] == second["ran"], case
        assert first["ran"][0] == "left", "the joint graph"
        assert "left" not in first["ran"][1:], "forward and backward"
        assert second["skipped"][0].startswith("KeyError: 'injected'")
        assert first["skipped"][0].startswith("agreement: rank 1 leaves it as it was: KeyError: 'injected'")
        for result in results:
            assert result[case]["losses"] == pytest.approx(result["eager"]["losses"], rel=1e-5), case


def codes_in_order(on: Sequence[int]) -> dict[str, Any]:
    """The order of the code that Inductor makes, with a fault on some ranks while Weft fixes that order."""
    torch._dynamo.reset()
    SESSION.reset()
    torch.manual_seed(dist.get_rank())
    arguments = share_a_read_arguments(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    step = torch.compile(share_a_read, backend="weft", options={"weft.pipeline": "sink-waits"})
    found: list[Tensor] = []
    fault = mock.patch("weft.compat.compilers.keep_kernel_order", fail)
    no_caches = torch._inductor.config.patch(force_disable_caches=True)
    with no_caches, fault if dist.get_rank() in on else contextlib.nullcontext():
        (order,) = code_of(lambda: found.append(step(*arguments)))
    torch.testing.assert_close(found[0], share_a_read(*arguments))
    return {"order": order, "messages": SESSION.report().messages}


@pytest.mark.slow
@pytest.mark.needs_cpp
def test_ranks_fix_the_order_in_the_code_of_inductor_together(two_ranks: World):
    fixed, both, one = (two_ranks.run(codes_in_order, on=on) for on in ((), (0, 1), (1,)))
    assert fixed[0]["order"] == fixed[1]["order"] != both[0]["order"]
    assert [rank["order"] for rank in one] == [rank["order"] for rank in both] == [both[0]["order"]] * 2
    assert fixed[0]["messages"] == ()
    assert "KeyError: 'injected'" in one[1]["messages"][0]
    assert "rank 1 leaves it as it was: KeyError: 'injected'" in one[0]["messages"][0]


def train_with_another_pipeline(folder: str) -> dict[str, Any]:
    """Rank 1 merges less than rank 0 does."""
    pipeline = "bucket-all-gathers,bucket-reduce-scatters" if dist.get_rank() == 0 else "sink-waits"
    with mock.patch.dict(PARTS, {"none": "tests.integration.functions.DIM"}):
        return train("none", (), folder, pipeline=pipeline)


def test_ranks_with_different_plans_leave_the_graph_as_it_was(two_ranks: World, tmp_path: Path):
    results = two_ranks.run(train_with_another_pipeline, folder=str(tmp_path))
    eager = two_ranks.run(train, case="", on=(), folder=str(tmp_path), compiled=False)
    for rank, result in enumerate(results):
        assert result["ran"] == ["left", "left"]
        assert "rank 1 made another plan than rank 0 for the same graph" in "\n".join(result["messages"])
        assert result["losses"] == pytest.approx(eager[rank]["losses"], rel=1e-5)


def train_disabled_on_rank_1(folder: str) -> dict[str, Any]:
    """The environment of rank 1 switches Weft off."""
    environment = {"WEFT_DISABLE": "1"} if dist.get_rank() == 1 else {}
    with mock.patch.dict(PARTS, {"none": "tests.integration.functions.DIM"}), mock.patch.dict(os.environ, environment):
        return train("none", (), folder, pipeline="sink-waits")


@pytest.mark.slow
def test_weft_that_is_switched_off_on_one_rank_changes_no_graph_on_any(two_ranks: World, tmp_path: Path):
    results = two_ranks.run(train_disabled_on_rank_1, folder=str(tmp_path))
    eager = two_ranks.run(train, case="", on=(), folder=str(tmp_path), compiled=False)
    for rank, result in enumerate(results):
        assert result["ran"] == ["left", "left"]
        assert all("WEFT_DISABLE is set" in skipped for skipped in result["skipped"])
        assert result["losses"] == pytest.approx(eager[rank]["losses"], rel=1e-5)
    assert "agreement: rank 1 leaves it as it was: WEFT_DISABLE is set" in "\n".join(results[0]["messages"])


def count_alike_again() -> None:
    """The ranks of this world go on to other tests, after some did not take part in a vote."""
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, (SESSION._num_compilations, SESSION._num_votes))
    for compilations, votes in counts:
        SESSION._num_compilations |= compilations
        SESSION._num_votes |= votes


def train_where_rank_1_is_silent(folder: str) -> dict[str, Any]:
    """Rank 1 takes part in the collectives without Weft, as if its compiler had taken the graphs from a cache."""
    with (
        mock.patch.dict(PARTS, {"none": "tests.integration.functions.DIM"}),
        mock.patch("weft.frontends.session.WAIT_S", 0.5),
        mock.patch("weft.verification.agreement.consensus.WAIT_S", 0.5),
    ):
        result = train("none", (), folder, compiled=dist.get_rank() == 0, pipeline="sink-waits")
    count_alike_again()
    return result


def test_a_rank_that_says_nothing_does_not_hang_the_others(two_ranks: World, tmp_path: Path):
    first, second = two_ranks.run(train_where_rank_1_is_silent, folder=str(tmp_path))
    assert any(message.startswith("rank 1 said nothing about graph 'forward 0/0") for message in first["messages"])
    assert len(first["losses"]) == len(second["losses"]) == STEPS


def train_with_cache(folder: str, **options: Any) -> dict[str, Any]:
    """Train through Inductor with caches in a folder of this rank."""
    torch._dynamo.reset()
    SESSION.reset()
    x, shards, group = attend_arguments(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{dist.get_rank()}"}):
        named = {f"weft.{name}": value for name, value in options.items()}
        step = torch.compile(attend, backend="weft", options={"weft.pipeline": "sink-waits", **named})
        for _ in range(2):
            step(x, shards, group).backward()
    report = SESSION.report()
    return {"from_cache": [entry.from_cache for entry in report.entries], "messages": report.messages}


@pytest.mark.slow
@pytest.mark.needs_cpp
@pytest.mark.parametrize("options", [{}, {"memory_limit": "1GB"}], ids=["", "with a joint graph"])
def test_a_rank_with_graphs_from_a_cache_says_so(two_ranks: World, tmp_path: Path, options: dict[str, str]):
    two_ranks.run(train_with_cache, folder=str(tmp_path), **options)
    shutil.rmtree(tmp_path / "0")
    first, second = two_ranks.run(train_with_cache, folder=str(tmp_path), **options)
    assert second["from_cache"].count(True) == 2  # forward and backward
    assert first["from_cache"].count(True) == 0
    assert first["messages"] == second["messages"] == ()


def reduce_and_gather(x: Tensor, shards: list[Tensor], dp: str, tp: str) -> Tensor:
    """Weights gathered over one axis of a mesh, activations summed over the other."""
    for shard in shards:
        x = torch.relu(x @ WAIT(ALL_GATHER(shard, 2, dp)))
        x = WAIT(ALL_REDUCE(x, "sum", tp))
    return x


def run_on_a_mesh(on: Sequence[int]) -> dict[str, Any]:
    """A graph on a mesh of 2 x 2, with a fault on some ranks; what became of it."""
    torch._dynamo.reset()
    SESSION.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = [mesh.get_group(axis).group_name for axis in ("dp", "tp")]
    torch.manual_seed(0)
    shards = [torch.randn(DIM // 2, DIM) for _ in range(3)]
    x = torch.randn(4, DIM)
    step = torch.compile(reduce_and_gather, backend="weft_eager", options={"weft.pipeline": "bucket-all-gathers"})
    fault = mock.patch(PARTS["checking"], fail) if dist.get_rank() in on else contextlib.nullcontext()
    with fault:
        found = step(x, shards, *groups)
    (entry,) = SESSION.report().entries
    torch.testing.assert_close(found, reduce_and_gather(x, shards, *groups))
    return {"skipped": entry.skipped, "messages": SESSION.report().messages}


@pytest.mark.slow
def test_a_fault_on_a_mesh_reaches_the_rank_that_shares_no_group_with_the_faulty_one(four_ranks: World):
    assert [result["skipped"] for result in four_ranks.run(run_on_a_mesh, on=())] == [""] * 4
    results = four_ranks.run(run_on_a_mesh, on=(3,))
    assert "KeyError: 'injected'" in results[3]["skipped"]
    for result in results[:3]:
        assert result["skipped"].startswith("agreement: rank 3 leaves it as it was: KeyError: 'injected'")
        assert ALL_RANKS in "\n".join(result["messages"])


def error_where_one_rank_is_strict(rank: int) -> tuple[str, list[str]]:
    """The error of this rank, and what became of its graphs, after a fault on rank 1, if only `rank` is strict."""
    torch._dynamo.reset()
    SESSION.reset()
    x, shards, group = attend_arguments(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    options = {"weft.pipeline": "sink-waits", "weft.strict": dist.get_rank() == rank}
    fault = mock.patch(PARTS["checking"], fail) if dist.get_rank() == 1 else contextlib.nullcontext()
    error = ""
    with torch.no_grad():
        try:
            with fault:
                torch.compile(attend, backend="weft_eager", options=options)(x, shards, group)
        except Exception as found:
            error = str(found)
            attend(x, shards, group)  # a job would end here; the other rank is in the same collectives
    count_alike_again()
    return error, [entry.skipped for entry in SESSION.report().entries]


@pytest.mark.parametrize("strict", [0, 1])
def test_only_the_strict_rank_raises_an_error_and_the_others_do_not_wait(two_ranks: World, strict: int):
    results = two_ranks.run(error_where_one_rank_is_strict, rank=strict)
    error, _ = results[strict]
    assert "injected" in error
    assert ("rank 1 leaves it as it was" in error) == (strict == 0)
    other, (skipped,) = results[1 - strict]
    assert other == ""
    assert "KeyError: 'injected'" in skipped


def error_beside_a_rewritten_graph(folder: str, backend: str, late_s: float = 0.0, on: Sequence[int] = ()) -> str:
    """The error of a rank that meets a fault, after `late_s`, while the other rank runs the rewritten graph."""
    torch._dynamo.reset()
    SESSION.reset()
    x, shards, group = attend_arguments(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    with torch.no_grad():

        def fail_late(*_: Any, **__: Any) -> Any:
            time.sleep(late_s)
            raise KeyError("injected")

        faulty = dist.get_rank() in on
        wait_s = 0.5 if late_s else 60.0
        with (
            mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{dist.get_rank()}"}),
            mock.patch("weft.verification.agreement.consensus.WAIT_S", wait_s),
            mock.patch(PARTS["checking"], fail_late) if faulty else contextlib.nullcontext(),
        ):
            try:
                torch.compile(attend, backend=backend, options={"weft.pipeline": "sink-waits"})(x, shards, group)
                error = ""
            except Exception as found:
                error = str(found)
        if error:  # the other rank is in the same collectives
            attend(x, shards, group)
    count_alike_again()
    return error


@pytest.mark.slow
@pytest.mark.needs_cpp
def test_a_fault_beside_a_rank_with_the_rewritten_graph_from_a_cache_is_an_error(two_ranks: World, tmp_path: Path):
    given = {"folder": str(tmp_path), "backend": "weft"}
    assert two_ranks.run(error_beside_a_rewritten_graph, **given) == ["", ""]
    shutil.rmtree(tmp_path / "0")
    first, second = two_ranks.run(error_beside_a_rewritten_graph, **given, on=(0,))
    told = first + second  # whichever rank is later learns of it
    assert "runs the rewritten graph 'inference" in told
    assert "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1" in told


def test_a_fault_long_after_the_others_have_rewritten_the_graph_is_an_error(two_ranks: World, tmp_path: Path):
    first, second = two_ranks.run(
        error_beside_a_rewritten_graph, folder=str(tmp_path), backend="weft_eager", late_s=2.0, on=(1,)
    )
    assert first == ""
    assert "later than others, which have rewritten it" in second
