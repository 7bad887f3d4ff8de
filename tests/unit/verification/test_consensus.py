"""Consensus: what ranks decide together from their votes on a graph. Threads stand for ranks."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch.distributed as dist

from weft.verification.agreement import consensus
from weft.verification.agreement.consensus import Resolution, Vote, as_ranges, decide, objection, tell
from weft.verification.agreement.rank_record import StoreBoard

NAME = "forward 0/0 1"
FAULT = "KeyError: 'x'"


def new_board() -> StoreBoard:
    return StoreBoard(dist.HashStore())


def ready(*ranks: int, plan: str = "plan") -> Vote:
    return Vote("graph", plan, ranks=as_ranges(ranks))


def faulty(*ranks: int) -> Vote:
    return Vote("", why=FAULT, ranks=as_ranges(ranks))


def cached(*ranks: int) -> Vote:
    return Vote("", "from a cache", ranks=as_ranges(ranks), is_final=True)


def decide_all(
    votes: Mapping[int, Vote], delays: Mapping[int, float] = {}, board: StoreBoard | None = None
) -> dict[int, Resolution]:
    """All ranks vote at the same time, some after a delay; a rank with a graph from a cache only tells it."""
    shared = board or new_board()

    def vote(rank: int) -> Resolution:
        time.sleep(delays.get(rank, 0.0))
        mine = votes[rank]
        return (
            Resolution(divergence=tell(shared, NAME, rank, mine)) if mine.is_final else decide(shared, NAME, rank, mine)
        )

    with ThreadPoolExecutor(len(votes)) as pool:
        return dict(zip(votes, pool.map(vote, votes), strict=True))


def test_ranges_hold_the_ranks_of_rows_and_columns():
    assert as_ranges(range(8)) == ((0, 7, 1),)
    assert as_ranges([2, 10, 18]) == ((2, 18, 8),)
    assert as_ranges([0, 1, 8, 16]) == ((0, 1, 1), (8, 16, 8))
    assert as_ranges([]) == ()


def test_ranks_with_the_same_plan_do_not_object():
    assert decide_all({rank: ready(0, 1, 2) for rank in range(3)}) == {rank: Resolution() for rank in range(3)}


def test_one_rank_that_leaves_the_graph_ends_the_wait_for_the_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(consensus, "WAIT_S", 3600.0)
    board = new_board()
    tell(board, NAME, 2, faulty(0, 1, 2))
    assert decide(board, NAME, 0, ready(0, 1, 2)) == Resolution("rank 2 leaves it as it was: KeyError: 'x'")


def test_a_fault_reaches_ranks_that_share_no_group_with_the_faulty_one():
    mesh = {0: ready(0, 1, 2), 1: ready(0, 1, 3), 2: ready(0, 2, 3), 3: faulty(1, 2, 3)}
    found = decide_all(mesh, delays={3: 0.05})
    assert [resolution.objection for resolution in found.values()] == ["rank 3 leaves it as it was: KeyError: 'x'"] * 4
    assert {resolution.divergence for resolution in found.values()} == {None}


def test_another_plan_for_the_same_graph_is_an_objection_on_all_ranks():
    found = decide_all({0: ready(0, 1), 1: ready(0, 1, 2), 2: ready(1, 2, plan="other")})
    expected = "rank 2 made another plan than rank 0 for the same graph: other instead of plan"
    assert [resolution.objection for resolution in found.values()] == [expected] * 3
    assert decide_all({0: ready(0, 1), 1: ready(0, 1, 2), 2: cached(1, 2)}) == dict.fromkeys(range(3), Resolution())
    assert objection({0: ready(), 1: Vote("another graph", "other"), 2: cached()}) is None


def test_a_silent_rank_is_closed_after_the_time_and_does_not_object(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(consensus, "WAIT_S", 0.05)
    assert decide_all({0: ready(0, 1, 2), 1: ready(0, 1, 2)}) == dict.fromkeys((0, 1), Resolution(silent=(2,)))


def test_a_closed_rank_may_rewrite_the_graph_too_but_not_leave_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(consensus, "WAIT_S", 0.05)
    for late, divergence in ((ready(0, 1), None), (faulty(0, 1), "this rank compiled graph 'forward 0/0 1' more than")):
        board = new_board()
        assert decide(board, NAME, 0, ready(0, 1)).objection is None
        found = decide(board, NAME, 1, late)
        assert (found.divergence is None) == (divergence is None)
        if found.divergence is not None and divergence is not None:
            assert found.divergence[0].startswith(divergence)


def test_a_rank_that_was_silent_before_is_not_waited_for_but_heard(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(consensus, "WAIT_S", 3600.0)
    board = new_board()
    assert decide(board, NAME, 0, ready(0, 2), {2}) == Resolution(silent=(2,))
    board = new_board()
    tell(board, NAME, 2, faulty(0, 2))
    assert decide(board, NAME, 0, ready(0, 2), {2}).objection == "rank 2 leaves it as it was: KeyError: 'x'"


@pytest.mark.parametrize("first", [0, 1])
def test_a_fault_beside_a_rewritten_graph_from_a_cache_is_a_divergence(first: int, monkeypatch: pytest.MonkeyPatch):
    found = decide_all({0: faulty(0, 1), 1: cached(0, 1)}, delays={1 - first: 0.1})
    assert found[0].divergence is not None
    assert "rank 1 runs the rewritten graph 'forward 0/0 1' from its compiler's cache" in found[0].divergence[0]
    assert decide_all({0: ready(0, 1), 1: cached(0, 1)}) == {0: Resolution(), 1: Resolution()}


def test_a_cached_graph_that_is_later_than_a_fault_is_a_divergence_on_its_own_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(consensus, "WAIT_S", 0.05)
    board = new_board()
    assert decide(board, NAME, 0, faulty(0, 1)) == Resolution("rank 0 leaves it as it was: KeyError: 'x'", silent=(1,))
    found = tell(board, NAME, 1, cached(0, 1))
    assert found is not None
    assert "this rank runs the rewritten graph" in found[0]


class CountedBoard(StoreBoard):
    """Counts the requests for votes."""

    num_requests = 0

    def read_all(self, keys: Sequence[str]) -> list[str] | None:
        object.__setattr__(self, "num_requests", self.num_requests + 1)
        return super().read_all(keys)


def test_a_thousand_votes_are_read_with_few_requests():
    board, ranks = CountedBoard(dist.HashStore()), range(1024)
    for rank in ranks[1:]:
        board.write_once(f"vote/{NAME}/{rank}", json.dumps(asdict(ready(*ranks))))
    assert decide(board, NAME, 0, ready(*ranks)) == Resolution()
    assert board.num_requests < 40


def test_a_rank_that_waits_asks_for_little(monkeypatch: pytest.MonkeyPatch):
    """While half of a thousand votes are missing, each look at the board takes two requests."""
    monkeypatch.setattr(consensus, "WAIT_S", 3600.0)
    board, ranks = CountedBoard(dist.HashStore()), range(1024)
    looks: list[int] = []

    def late(_seconds: float) -> None:
        looks.append(board.num_requests)
        if len(looks) == 4:
            for rank in ranks[1:]:
                board.write_once(f"vote/{NAME}/{rank}", json.dumps(asdict(ready(*ranks))))

    monkeypatch.setattr(consensus.time, "sleep", late)
    for rank in ranks[2::2]:
        board.write_once(f"vote/{NAME}/{rank}", json.dumps(asdict(ready(*ranks))))
    assert decide(board, NAME, 0, ready(*ranks)) == Resolution()
    assert looks == [2, 4, 6, 8]


def connected(groups: Sequence[Sequence[int]], rank: int) -> set[int]:
    found = {rank}
    while more := {other for group in groups if found & {*group} for other in group} - found:
        found |= more
    return found


def peers_of(groups: Sequence[Sequence[int]], rank: int) -> set[int]:
    return {rank, *(other for group in groups if rank in group for other in group)}


def random_run(seed: int, num_ranks: int) -> tuple[list[list[int]], dict[int, Vote]]:
    """Random groups, and votes of which some leave the graph as it was, have another plan, or come from a cache."""
    chance = random.Random(seed)
    groups = [chance.sample(range(num_ranks), chance.randint(2, 4)) for _ in range(chance.randint(1, 4))]
    votes: dict[int, Vote] = {}
    for rank in range(num_ranks):
        ranks = peers_of(groups, rank)
        kinds = [faulty(*ranks), ready(*ranks, plan="other"), cached(*ranks), ready(*ranks)]
        votes[rank] = chance.choices(kinds, weights=(1, 1, 1, 12))[0]
    return groups, votes


@pytest.mark.parametrize("seed", range(40))
def test_connected_ranks_end_alike_or_learn_that_they_cannot(seed: int):
    groups, votes = random_run(seed, 8)
    delays = {rank: random.Random(f"{seed} {rank}").random() / 50 for rank in votes}
    found = decide_all(votes, delays)
    for rank in votes:
        whole = connected(groups, rank)
        expected = objection({other: votes[other] for other in whole})
        is_mixed = expected is not None and any(votes[other].is_final for other in whole)
        told = [other for other in whole if found[other].divergence is not None]
        assert bool(told) == is_mixed, (groups, votes)
        if not votes[rank].is_final and len(whole) > 1:
            assert (found[rank].objection is None) == (expected is None), (groups, votes)


@pytest.mark.parametrize("seed", range(40))
def test_ranks_that_share_a_group_end_alike_even_if_some_are_late(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Unless one of them learns that they do not."""
    monkeypatch.setattr(consensus, "WAIT_S", 0.05)
    groups, votes = random_run(seed, 8)
    chance = random.Random(seed)
    found = decide_all(votes, {rank: chance.choice([0.0, 0.0, 0.05, 0.1]) for rank in votes})
    rewrites = {rank: votes[rank].is_final or found[rank].objection is None for rank in votes}
    for group in groups:
        goes_on = [rank for rank in group if found[rank].divergence is None]
        if len(goes_on) == len(group):
            assert len({rewrites[rank] for rank in group}) == 1, (group, found, votes)
