"""Statements of ranks: what they compare without a collective, through folders and stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import weft
from tests.unit.verification.pipelines import pipeline
from tests.versions import needs_transfers
from weft.errors import VerificationError
from weft.passes.pipeline import Pipeline
from weft.verification.agreement.agreement import AgreementFault
from weft.verification.agreement.issue_order import read_order
from weft.verification.agreement.rank_record import (
    Board,
    FolderBoard,
    Statement,
    StoreBoard,
    check_published,
    digests,
    publish,
)

LISTING = """group('dp', size=2, stride=2)
group('tp', size=2)

def graph(x: f32[4], y: f32[8]):
    a: f32[8] = all_gather(x, 2, 'dp')
    wa: f32[8] = wait(a)
    b: f32[16] = all_gather(y, 2, 'dp')
    wb: f32[16] = wait(b)
    c: f32[8] = all_reduce(y, 'sum', 'tp')
    wc: f32[8] = wait(c)
    return [wa, wb, wc]
"""
DO = "give all ranks the same Weft, torch, cluster and options; or make one plan and apply it on all with weft.apply"


def state(text: str = LISTING, pipeline: str = "bucket-all-gathers", name: str = "forward 0/0") -> Statement:
    result = weft.optimize(weft.parse(text), pipeline=pipeline)
    report = result.report
    decisions = tuple(decision.sentence for decision in (*report.applied, *report.declined))
    graphs = (report.before.digest, report.plan_digest, report.after.digest)
    return Statement(name, *graphs, result.plan.facts, decisions, read_order(result.module))


def folder_board(folder: Path) -> Board:
    return FolderBoard(folder / "run")


def file_store_board(folder: Path) -> Board:
    return StoreBoard(dist.FileStore(str(folder / "store"), 4))


def tcp_store_board(_folder: Path) -> Board:
    store = dist.TCPStore("127.0.0.1", 0, 4, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    return StoreBoard(store)


@pytest.fixture(params=[folder_board, file_store_board, tcp_store_board])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Board:
    make: Callable[[Path], Board] = request.param
    return make(tmp_path)


def test_ranks_that_do_the_same_have_one_digest(board: Board):
    for rank in range(4):
        assert publish(board, rank, 4, state()) == []
    said = digests(board, 4)
    assert {digest for graphs in said.values() for digest in graphs.values()} == {state().digest}
    assert str(check_published(board, 4)) == "4 ranks agree: 1 graph, 8 launches"


def test_nobody_waits_for_a_rank_that_has_said_nothing(board: Board):
    assert publish(board, 1, 4, state()) == []
    with pytest.raises(VerificationError) as error:
        check_published(board, 4)
    assert (
        str(error.value)
        == "agreement: ranks 0, 2, 3 have published nothing yet\ncheck again when all ranks have compiled"
    )


def test_another_plan_for_the_same_graph_is_named_with_its_first_decision_and_launch(board: Board):
    publish(board, 0, 4, state())
    (conflict,) = publish(board, 2, 4, state(pipeline="bucket-all-gathers{max-bytes=8}"))
    assert conflict.ranks == (0, 2)
    lines = str(conflict).splitlines()
    assert lines[0] == "agreement: rank 0 and rank 2 disagree on graph 'forward 0/0'"
    assert lines[1] == (
        "    decision 1: \"merged 2 all-gathers of group 'dp' into one of 96 B: a to b\" on rank 0, "
        "'a stays alone: its 32 B fill a bucket of at most 8 B' on rank 2"
    )
    assert lines[2] == (
        "    launch 1 in group 'dp': a_bucket (all_gather of 12 f32) on rank 0, a (all_gather of 4 f32) on rank 2"
    )
    assert lines[3:] == [DO]


def test_facts_that_differ_are_named(board: Board):
    publish(board, 0, 4, state())
    other = state(pipeline="none")
    (conflict,) = publish(board, 1, 4, replace(other, facts={**other.facts, "torch": "2.0.0"}))
    assert conflict.differences[0] == f"torch: {state().facts['torch']!r} on rank 0, '2.0.0' on rank 1"


def test_ranks_that_hold_different_graphs_need_agree_on_the_groups_they_share(board: Board):
    publish(board, 0, 4, state())
    other = state(
        LISTING.replace("[wa, wb, wc]", "[wa, wb]").replace("    return", "    z: f32[4] = neg(x)\n    return")
    )
    assert publish(board, 2, 4, other) == []  # 'dp' is shared, and the same is launched in it
    fewer = state(LISTING.replace("all_reduce(y, 'sum', 'tp')", "all_reduce(y, 'max', 'tp')"))
    assert publish(board, 3, 4, fewer)[0].ranks == (2, 3)  # 'tp' is shared with rank 2 alone
    assert [finding.fault for finding in _with_all(board, fewer).findings] == [
        AgreementFault.ORDER,
        AgreementFault.ORDER,
    ]


def _with_all(board: Board, first: Statement) -> Any:
    publish(board, 1, 4, replace(first, name="inference 1/0"))
    publish(board, 1, 4, replace(first, name="inference 1/0"))  # said twice, it counts once
    return check_published(board, 4)


@needs_transfers
def test_stages_of_a_pipeline_agree(board: Board):
    orders = {text: read_order(text) for text in pipeline(4, 3)}
    for rank, text in enumerate(pipeline(4, 3)):
        digest = orders[text].digest
        assert publish(board, rank, 16, Statement("inference 0/0", digest, "", digest, order=orders[text])) == []
    assert check_published(board, 16).holds


def test_forward_and_backward_are_checked_one_behind_the_other(board: Board):
    for rank in range(4):
        publish(board, rank, 4, state())
        publish(board, rank, 4, state(name="backward 0/0"))
    assert check_published(board, 4).num_launches == 16


def test_pages_of_another_run_and_what_is_no_page_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    board = FolderBoard(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    publish(board, 0, 2, state())
    assert board.runs == {"first": 2}
    assert board.last_run() == "first"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    assert digests(board, 2) == {0: {}, 1: {}}
    assert board.last_run() is None
    for text in ("", "[]", "{", '{"graphs": [3]}', '{"graphs": [{"name": "a", "digest": "b", "part": "../x"}]}'):
        (tmp_path / "rank1.json").write_text(text)
        assert digests(board, 2)[1] == {}
    assert FolderBoard(tmp_path / "none").last_run() is None


def test_whoever_comes_after_a_run_finds_what_its_last_restart_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    board = FolderBoard(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for restart, num_ranks in ((9, 8), (10, 4)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        for rank in range(num_ranks):
            publish(board, rank, num_ranks, state())
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert board.runs == {"none 9": 8, "none 10": 4}
    assert board.last_run() == "none 10"
    assert check_published(board, 4, "none 10").num_ranks == 4
    publish(board, 1, 4, state())
    with pytest.raises(VerificationError, match="holds pages of 2 runs: '', 'none'\ngive each run a folder of its"):
        board.last_run()


def test_a_long_part_is_written_once(tmp_path: Path):
    for rank in range(4):
        publish(FolderBoard(tmp_path), rank, 4, state())
    assert sorted(path.name[:5] for path in tmp_path.iterdir()) == ["part-", "rank0", "rank1", "rank2", "rank3"]


def test_a_statement_comes_back_from_its_text_and_what_is_none_is_refused(tmp_path: Path):
    said = state()
    assert Statement.from_json(said.to_json()) == replace(said, facts=json.loads(json.dumps(said.facts)))
    for text in ("", "[]", "{}", json.dumps({"order": "{}"})):
        with pytest.raises(VerificationError, match="this is not"):
            Statement.from_json(text)


def test_a_plan_from_a_file_gives_all_ranks_one_digest(tmp_path: Path):
    run = Pipeline.parse("auto").run(weft.parse(LISTING))
    run.plan.save(tmp_path / "plan.json")
    made = [weft.apply(weft.parse(LISTING), weft.Plan.load(tmp_path / "plan.json")) for _ in range(2)]
    assert {read_order(module).digest for module in made} == {read_order(run.module).digest}
