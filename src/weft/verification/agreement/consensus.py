"""Consensus: the ranks that run a graph's collectives together rewrite it together, or not at all.

    vote = Vote(graph, plan)                         # Vote(graph, why="KeyError: ...") to leave the graph as it was
    cast(board, "forward 0/0 1", rank, vote)
    votes = collect(board, "forward 0/0 1", ranks)   # waits for the others, but not for ever
    print(objection(vote, votes))                    # None: rewrite it

Contract: no collective. A rank that leaves a graph as it was says so and does not wait. A rank that would rewrite it
waits for the votes of the others, and leaves the graph as it was, too, if one of them does, or if one has made another
plan for the same graph. All ranks see the same votes, so they decide alike. A rank whose compiler has the graph from a
cache says so where it can. A rank that stays silent does not count: it may have the graph from a cache, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass

from weft.verification.agreement.rank_record import Board

WAIT_S = 60.0
"""How long a rank waits for the votes of the others, in seconds: longer than ranks usually differ in compile time."""
PAUSE_S = 0.01
"""Time between two looks at the board, in seconds."""


@dataclass(frozen=True)
class Vote:
    """The decision of one rank about a graph."""

    graph: str
    """The digest of the graph."""
    plan: str = ""
    """The digest of the plan; empty: the rank leaves the graph as it was."""
    why: str = ""
    """Why the rank leaves the graph as it was."""


FROM_CACHE = Vote("", "from a cache")
"""The vote of a rank that does not plan a graph, because the compiler found the rewritten graph in its cache."""


def cast(board: Board, name: str, rank: int, vote: Vote) -> None:
    """Publish the vote of a rank on a graph."""
    board.write(_key(name, rank), json.dumps(asdict(vote)))


def collect(board: Board, name: str, ranks: Iterable[int], silent: Set[int] = frozenset()) -> dict[int, Vote]:
    """The votes of these ranks; a rank that does not vote in time is missing. One vote to leave ends the wait.

    Votes of `silent` ranks count if they are there, but are not waited for.
    """
    missing, votes = list(ranks), dict[int, Vote]()
    end = time.monotonic() + WAIT_S
    while True:
        votes |= {rank: vote for rank in missing if (vote := _read(board, name, rank)) is not None}
        missing = [rank for rank in missing if rank not in votes]
        is_left = any(not vote.plan for vote in votes.values())
        if is_left or not set(missing) - silent or time.monotonic() >= end:
            return votes
        time.sleep(PAUSE_S)


def objection(mine: Vote, votes: Mapping[int, Vote]) -> str | None:
    """Why a graph must stay as it was although this rank could rewrite it; None if nobody objects."""
    for rank, vote in sorted(votes.items()):
        if not vote.plan:
            return f"rank {rank} leaves it as it was: {vote.why}"
    for rank, vote in sorted(votes.items()):
        if vote.graph == mine.graph and vote.plan != mine.plan:
            return f"rank {rank} made another plan for the same graph: {vote.plan[:12]} instead of {mine.plan[:12]}"
    return None


def _key(name: str, rank: int) -> str:
    return f"vote/{name}/{rank}"


def _read(board: Board, name: str, rank: int) -> Vote | None:
    text = board.read(_key(name, rank))
    return None if text is None else Vote(**json.loads(text))
