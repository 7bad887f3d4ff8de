"""`weft agree`: graphs of all ranks, folders of statements, and how they end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.unit.verification.pipelines import pipeline
from tests.unit.verification.test_statement import state
from weft.graph import ops
from weft.verification.statement import FolderBoard, publish

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
    assert done.stdout.splitlines()[1].startswith("launches that may hold each other up on NCCL: rank 8 launches ")
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
        "agreement: rank 3 has said nothing yet\nask again when all have compiled\n",
    )
    publish(board, 3, 4, state())
    done = weft("agree", tmp_path / "said")
    assert (done.exit_code, done.stdout) == (0, "4 ranks agree: 1 graph, 8 launches\n")


def test_graphs_that_do_not_part_the_ranks_are_usage(weft: Weft, tmp_path: Path, listing: Path):
    done = weft("agree", listing, listing, "--ranks", 3)
    assert (done.exit_code, done.stderr) == (
        2,
        "agree: 2 graphs do not part 3 ranks\ngive one graph for all ranks, or one for each\n",
    )
    assert weft("agree", tmp_path / "none").exit_code == 2
    assert weft("agree", listing, "--ranks", 2).stdout.startswith("2 ranks agree: 1 graph, ")
