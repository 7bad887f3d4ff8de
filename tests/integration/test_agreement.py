"""Ranks compare what they did: real processes on a mesh, and results that a compiler takes from its cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import weft
from tests.integration.functions import DIM, gather_and_multiply, gather_and_multiply_arguments
from tests.integration.worlds import World
from weft.errors import VerificationError
from weft.frontends.options import Options
from weft.frontends.session import SESSION
from weft.verification.agreement.rank_record import FolderBoard, digests
from weft.zoo.parallel.collectives import ALL_GATHER, ALL_REDUCE, WAIT


def step(x: Tensor, shards: list[Tensor], dp: str, tp: str) -> Tensor:
    """Weights gathered over one axis of a mesh, activations summed over the other."""
    for shard in shards:
        x = torch.relu(x @ WAIT(ALL_GATHER(shard, 2, dp)))
        x = WAIT(ALL_REDUCE(x, "sum", tp))
    return x


def run_on_a_mesh(folder: str) -> dict[str, Any]:
    """Compile and run on this rank; what it and the others have said of their graphs."""
    torch._dynamo.reset()
    SESSION.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = [mesh.get_group(axis).group_name for axis in ("dp", "tp")]
    options = {"weft.agreement": folder, "weft.strict": True, "weft.pipeline": "bucket-all-gathers,sink-waits"}
    shards = [torch.randn(DIM // 2, DIM) for _ in range(3)]
    torch.compile(step, backend="weft_eager", options=options)(torch.randn(4, DIM), shards, *groups)
    dist.barrier()
    agreement = weft.check_agreement()
    said = digests(FolderBoard(folder), 4)
    return {"said": said, "agreement": str(agreement), "groups": tuple(groups), "messages": SESSION.report().messages}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_four_ranks_on_a_mesh_of_two_by_two_print_one_digest(four_ranks: World, tmp_path: Path):
    results = four_ranks.run(run_on_a_mesh, folder=str(tmp_path / "said"))
    assert len({result["groups"] for result in results}) > 1  # run-time names of groups differ by rank
    assert all(result["said"] == results[0]["said"] for result in results)
    printed = {digest for graphs in results[0]["said"].values() for digest in graphs.values()}
    assert len(printed) == 1
    assert [list(graphs) for graphs in results[0]["said"].values()] == [["inference 0/0"]] * 4
    assert {result["agreement"] for result in results} == {"4 ranks agree: 1 graph, 16 launches"}
    assert {result["messages"] for result in results} == {()}


LISTING = """group('dp', size=4)

def graph(x: f32[4], y: f32[8]):
    a: f32[16] = all_gather(x, 4, 'dp')
    wa: f32[16] = wait(a)
    b: f32[32] = all_gather(y, 4, 'dp')
    wb: f32[32] = wait(b)
    return [wa, wb]
"""


def weave_in_turn(folder: str, pipelines: list[str], strict: bool) -> dict[str, Any]:
    """Rewrite a graph on one rank behind the other; what is said of it, and what a check of all ranks finds."""
    SESSION.reset()
    raised = ""
    for turn, pipeline in enumerate(pipelines):
        if turn == dist.get_rank():
            try:
                options = Options(pipeline=pipeline, strict=strict, agreement=folder)
                SESSION.weave(weft.parse(LISTING), options, "identity", None)
            except VerificationError as error:
                raised = str(error)
        dist.barrier()
    return {"raised": raised, "messages": SESSION.report().messages, "agreement": str(weft.check_agreement())}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("strict", [False, True])
def test_a_rank_with_another_option_is_named_by_itself_or_by_those_behind_it(
    four_ranks: World, tmp_path: Path, strict: bool
):
    merge, leave = "bucket-all-gathers", "bucket-all-gathers{max-bytes=8}"
    results = four_ranks.run(
        weave_in_turn, folder=str(tmp_path / "said"), pipelines=[merge, merge, leave, merge], strict=strict
    )
    texts = [result["raised"] if strict else "\n".join(result["messages"]) for result in results]
    assert texts[:2] == ["", ""]
    assert "rank 0 and rank 2 disagree on graph 'inference'" in texts[2]
    assert "rank 2 and rank 3 disagree on graph 'inference'" in texts[3]
    assert (
        "launch 1 in group 'dp': a_bucket (all_gather of 12 f32) on rank 0, a (all_gather of 4 f32) on rank 2"
        in (texts[2])
    )
    assert (
        "the ranks of group 'dp' disagree on launch 1: the number of elements is 12 on rank 0, 4 on rank 2"
        in (results[0]["agreement"])
    )


def test_a_check_without_the_option_says_what_to_do(fresh: None):
    with pytest.raises(VerificationError) as error:
        weft.check_agreement()
    assert str(error.value) == (
        "agreement: no graph was compiled for it\ncompile with the option weft.agreement, a folder that all ranks see"
    )


def test_a_graph_that_is_left_as_it_was_is_said_too(fresh: None, tmp_path: Path):
    text = LISTING.replace("    wb: f32[32] = wait(b)\n", "").replace(", wb]", "]")
    SESSION.weave(weft.parse(text), Options(agreement=tmp_path, groups={"dp": 1}), "identity", None)
    assert "b is never waited for" in SESSION.report().entries[0].skipped
    assert list(digests(FolderBoard(tmp_path), 1)[0]) == ["inference"]


def test_a_folder_that_cannot_be_written_is_named_and_stops_nothing(fresh: None, tmp_path: Path):
    (tmp_path / "file").write_text("")
    SESSION.weave(weft.parse(LISTING), Options(agreement=tmp_path / "file"), "identity", None)
    assert SESSION.report().messages[0].startswith("a graph was not published to the other ranks: ")


@pytest.mark.slow
@pytest.mark.needs_cpp
@pytest.mark.parametrize("is_hook", [False, True], ids=["backend", "hook"])
def test_a_graph_from_the_cache_of_inductor_is_said(mesh: DeviceMesh, tmp_path: Path, *, is_hook: bool):
    """The backend learns of it and says it at once; the hook is not called, so its rank says it when it checks."""
    said: list[dict[str, str]] = []
    config = torch._inductor.config
    for turn in range(2):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        SESSION.reset()
        folder = tmp_path / f"run{turn}"
        given = {"agreement": str(folder), "report": str(tmp_path), "cluster": "h100-9x8"}
        hook = weft.inductor_pass(**given) if is_hook else config.post_grad_custom_post_pass
        options = {} if is_hook else {"options": {f"weft.{name}": value for name, value in given.items()}}
        with config.patch(post_grad_custom_post_pass=hook):
            function = torch.compile(gather_and_multiply, backend="inductor" if is_hook else "weft", **options)
            function(*gather_and_multiply_arguments(mesh.get_group().group_name))
        assert SESSION.report().entries[0].from_cache == bool(turn)
        assert digests(FolderBoard(folder), 2)[0].keys() == (set() if turn and is_hook else {"forward 0/0"})
        with pytest.raises(VerificationError, match="rank 1 has published nothing yet"):
            weft.check_agreement()
        said.append(digests(FolderBoard(folder), 2)[0])
    assert said[0] == said[1]
    assert list(said[0]) == ["forward 0/0"]


PROGRAM = """
import os, torch, torch.distributed as dist

dist.init_process_group("gloo")
first, second = (dist.new_group([0, 1]).group_name for _ in range(2))
functional = torch.ops._c10d_functional


def step(x):
    x = functional.wait_tensor(functional.all_reduce(x, "sum", second))
    return functional.wait_tensor(functional.all_reduce(x, "sum", first))


torch.compile(step, backend="aot_eager")(torch.ones(4))
options = {"weft.agreement": os.environ["SAID"]}
torch.compile(step, backend="weft_eager", options=options)(torch.ones(4))
dist.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_what_a_run_of_torchrun_left_is_read_after_it(tmp_path: Path):
    (tmp_path / "train.py").write_text(PROGRAM)
    left = {"TORCH_TRACE": str(tmp_path / "log"), "SAID": str(tmp_path / "said"), "OMP_NUM_THREADS": "1"}
    launcher = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", *launcher, str(tmp_path / "train.py")]
    done = subprocess.run(command, env=os.environ | left, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    for folder, launches in (("said", 4), ("log", 8)):
        command = [sys.executable, "-m", "weft", "agree", str(tmp_path / folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stdout) == (0, f"2 ranks agree: 1 graph, {launches} launches\n"), done.stderr
