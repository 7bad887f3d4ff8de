"""Consensus: what ranks decide together from their votes on a graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.verification.agreement import consensus
from weft.verification.agreement.consensus import FROM_CACHE, Vote, cast, collect, objection
from weft.verification.agreement.rank_record import FolderBoard

MINE = Vote("graph", "plan")


def test_ranks_with_the_same_plan_do_not_object(tmp_path: Path):
    board = FolderBoard(tmp_path)
    for rank in range(3):
        cast(board, "forward 0/0 1", rank, MINE)
    votes = collect(board, "forward 0/0 1", [1, 2])
    assert votes == {1: MINE, 2: MINE}
    assert objection(MINE, votes) is None


def test_one_rank_that_leaves_the_graph_ends_the_wait_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(consensus, "WAIT_S", 3600.0)
    cast(FolderBoard(tmp_path), "forward", 2, Vote("", why="KeyError: 'x'"))
    votes = collect(FolderBoard(tmp_path), "forward", [1, 2])
    assert objection(MINE, votes) == "rank 2 leaves it as it was: KeyError: 'x'"


def test_another_plan_for_the_same_graph_is_an_objection_and_for_another_graph_it_is_none():
    assert objection(MINE, {1: Vote("graph", "other")}) == (
        "rank 1 made another plan for the same graph: other instead of plan"
    )
    assert objection(MINE, {1: Vote("another graph", "other")}) is None


def test_a_silent_rank_is_missing_after_the_time_and_does_not_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(consensus, "WAIT_S", 0.05)
    cast(FolderBoard(tmp_path), "forward", 1, MINE)
    votes = collect(FolderBoard(tmp_path), "forward", [1, 2])
    assert list(votes) == [1]
    assert objection(MINE, votes) is None


def test_a_rank_that_was_silent_before_is_not_waited_for_but_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(consensus, "WAIT_S", 3600.0)
    board = FolderBoard(tmp_path)
    cast(board, "forward", 1, MINE)
    assert collect(board, "forward", [1, 2], {2}) == {1: MINE}
    cast(board, "forward", 2, Vote("", why="KeyError: 'x'"))
    assert objection(MINE, collect(board, "forward", [1, 2], {2})) == "rank 2 leaves it as it was: KeyError: 'x'"


def test_a_graph_from_a_cache_is_no_objection():
    assert objection(MINE, {1: FROM_CACHE}) is None
