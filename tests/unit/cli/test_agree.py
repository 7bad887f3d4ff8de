"""`weft agree`: graphs of all ranks, folders of statements, and how they end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.unit.frontends.test_trace_log import event, graph_text
from tests.unit.verification.pipelines import pipeline
from tests.unit.verification.test_rank_record import state
from weft.graph import ops
from weft.verification.agreement.rank_record import FolderBoard, publish

Weft = Callable[..., Result]
needs_transfers = pytest.mark.skipif("send" not in ops.op_names(), reason="torch has isend and irecv from 2.12")


def files(folder: Path, texts: list[str]) -> list[Path]:
    paths = [folder / f"rank{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths


@needs_transfers
def test_four_stages_for_sixteen_ranks_agree(weft: Weft, tmp_path: Path):
    done = weft("agree", *files(tmp_path, pipeline(4, 3)[::4]), "--ranks", 16)
    assert (done.exit_code, done.stdout) == (0, "16 ranks agree: 4 graphs, 232 launches\n")


@needs_transfers
def test_one_graph_per_rank_that_does_not_agree_ends_with_1(weft: Weft, tmp_path: Path):
    paths = files(tmp_path, pipeline(4, 3, batched=False))
    done = weft("agree", *paths)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[1].startswith("launches that may deadlock on NCCL: rank 8 launches ")
    assert weft("agree", *paths, "--backend", "gloo").exit_code == 0
    found = json.loads(weft("agree", *paths, "--json").stdout)
    assert (found["holds"], found["num_ranks"], found["num_graphs"]) == (False, 16, 4)
    (finding,) = found["findings"]
    assert (finding["fault"], finding["group"]) == ("interleaving", "pp")
    assert finding["where"][0] == {"rank": 8, "node": "isend_f1"}


def test_a_folder_of_statements(weft: Weft, tmp_path: Path):
    board = FolderBoard(tmp_path / "said")
    for rank in range(3):
        publish(board, rank, 4, state())
    done = weft("agree", tmp_path / "said")
    assert (done.exit_code, done.stderr) == (
        1,
        "agreement: rank 3 has published nothing yet\ncheck again when all ranks have compiled\n",
    )
    publish(board, 3, 4, state())
    done = weft("agree", tmp_path / "said")
    assert (done.exit_code, done.stdout) == (0, "4 ranks agree: 1 graph, 8 launches\n")


def test_a_folder_that_a_run_of_torchrun_left(weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for rank in range(4):
        publish(FolderBoard(tmp_path), rank, 4, state())
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    done = weft("agree", tmp_path)
    assert (done.exit_code, done.stdout) == (0, "4 ranks agree: 1 graph, 8 launches\n")


@pytest.mark.parametrize("folder", [".", "{}"], ids=["one folder", "a folder for each rank"])
def test_a_folder_of_logs_of_all_ranks(weft: Weft, tmp_path: Path, folder: str):
    logs = [tmp_path / folder.format(r) / f"dedicated_log_torch_trace_rank_{r}_abc.log" for r in range(2)]
    (tmp_path / "torchrun.log").write_text("what a launcher writes is passed over\n")
    for rank, log in enumerate(logs):
        log.parent.mkdir(exist_ok=True)
        log.write_text(event("aot_inference_graph", in_turn("3", "4"), rank=rank))
    done = weft("agree", tmp_path)
    assert (done.exit_code, done.stdout) == (0, "2 ranks agree: 1 graph, 4 launches\n")
    logs[1].write_text(event("aot_inference_graph", in_turn("4", "3"), rank=1))
    done = weft("agree", tmp_path)
    assert done.exit_code == 1
    assert "cyclic wait" in done.stdout
    logs[0].unlink()
    done = weft("agree", tmp_path)
    assert (done.exit_code, done.stderr.splitlines()[0]) == (
        1,
        f"{tmp_path}: it has logs of 1 ranks, but none of rank 0",
    )


def in_turn(*groups: str) -> str:
    """A graph that reduces in each group in turn, as a log has it."""
    lines: list[str] = []
    for k, group in enumerate(groups):
        lines.append(f"a{k}: \"f32[2, 4]\" = torch.ops._c10d_functional.all_reduce.default(x, 'sum', '{group}')")
        lines.append(f'w{k}: "f32[2, 4]" = torch.ops._c10d_functional.wait_tensor.default(a{k})')
    return graph_text(*lines, result=f"(w{len(groups) - 1},)")


def test_graphs_that_do_not_part_the_ranks_are_usage(weft: Weft, tmp_path: Path, listing: Path):
    done = weft("agree", listing, listing, "--ranks", 3)
    assert (done.exit_code, done.stderr) == (
        2,
        "agree: 3 ranks cannot be divided evenly among 2 graphs\ngive one graph, or one for each rank\n",
    )
    assert weft("agree", tmp_path / "none").exit_code == 2
    assert weft("agree", listing, "--ranks", 2).stdout.startswith("2 ranks agree: 1 graph, ")
