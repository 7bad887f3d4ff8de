"""Consensus: ranks that are connected through the groups of a graph rewrite it together, or not at all.

    vote = Vote(graph, plan, ranks=as_ranges(ranks))          # Vote(graph, why=error) to leave the graph as it was
    resolution = decide(board, "forward 0/0 1", rank, vote)   # waits for the others, at most WAIT_S
    print(resolution.objection)                               # None: rewrite it
    print(resolution.divergence)                              # None: all ranks end alike

Contract: no collective. Each rank has one vote, which is written once. A vote names the ranks of the voter's groups, so
a rank that reads votes finds all ranks that it is connected with: those of its own groups, of their groups, and so on.
They all read the same votes, so they decide alike: a graph stays as it was if one of them leaves it as it was, or if
two of them made different plans for the same graph.

A rank that does not vote in time is closed: another rank writes `CLOSED` in its place before it rewrites the graph. A
closed rank can still rewrite the graph, but no longer stop the others. A rank whose compiler has the rewritten graph in
a cache says so where it can, and cannot stop, either. If such a rank and a rank that leaves the graph as it was are
connected, they would run different collectives, and hang. At least one of them then learns of it: its divergence.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any, Protocol

WAIT_S = 60.0
"""How long a rank waits for the votes of the others, in seconds: longer than ranks usually differ in compile time."""
PAUSE_S = 0.01
"""Time between two looks at the board for each missing vote, in seconds."""
MAX_PAUSE_S = 0.5
"""Longest time between two looks at the board, in seconds."""
NUM_TOGETHER = 64
"""Votes that a rank reads with one request. A look at the board asks for the first missing ones only, so that thousands
of ranks that wait do not slow the store down for the others."""
FRESH_CACHES = (
    "start all ranks with empty compiler caches (TORCHINDUCTOR_FORCE_DISABLE_CACHES=1), or with WEFT_DISABLE=1, which "
    "leaves all graphs as they are"
)
START_AGAIN = (
    "start the run again: compiler caches may make this rank faster; WEFT_DISABLE=1 on all ranks leaves all graphs as "
    "they are"
)


class BallotBox(Protocol):
    """A store of texts by key that all ranks can access."""

    def write_once(self, key: str, text: str) -> str:
        """Store a text unless the key exists; the text that the key has now."""
        ...

    def read_all(self, keys: Sequence[str]) -> list[str] | None:
        """The texts in the order of the keys, or None unless all keys exist now."""
        ...


@dataclass(frozen=True)
class Vote:
    """The decision of one rank about a graph."""

    graph: str
    """The digest of the graph."""
    plan: str = ""
    """The digest of the plan; empty: the rank leaves the graph as it was."""
    why: str = ""
    """Why the rank leaves the graph as it was."""
    ranks: tuple[tuple[int, int, int], ...] = ()
    """The ranks of the groups whose collectives are in the graph, as ranges."""
    is_final: bool = False
    """The compiler found the rewritten graph in its cache: the rank runs it, whatever the others decide."""


CLOSED = Vote("", "no vote in time")
"""Written in place of the vote of a rank that is late."""


@dataclass(frozen=True)
class Resolution:
    """The decision of the ranks about a graph."""

    objection: str | None = None
    """Why this rank leaves the graph as it was; None: it rewrites it."""
    silent: tuple[int, ...] = ()
    """Ranks that did not vote in time."""
    divergence: tuple[str, str] | None = None
    """Why this rank cannot go on with the others, and what to do; None: it can."""


def as_ranges(ranks: Iterable[int]) -> tuple[tuple[int, int, int], ...]:
    """Ranks as few ranges: first, last and step."""
    found: list[list[int]] = []
    for rank in sorted(set(ranks)):
        last = found[-1] if found else []
        if last and (last[0] == last[1] or rank - last[1] == last[2]):
            last[1:] = rank, rank - last[1]
        else:
            found.append([rank, rank, 1])
    return tuple((first, last, step) for first, last, step in found)


def decide(board: BallotBox, name: str, rank: int, mine: Vote, silent: Set[int] = frozenset()) -> Resolution:
    """Vote on a graph, and wait for the ranks that this rank is connected with.

    One vote to leave the graph as it was ends the wait, except for the rank that casts it: it waits to learn if another
    rank runs the rewritten graph all the same. Ranks that were `silent` before are not waited for.
    """
    cast = _cast(board, name, rank, mine)
    if cast == CLOSED and not mine.plan:
        return Resolution(mine.why, (), (_late(name, mine.why), START_AGAIN))
    votes = _collect(board, name, {rank: mine}, WAIT_S, silent, is_patient=not mine.plan)
    found = objection(votes)
    late = tuple(sorted(_missing(votes)))
    while found is None and (missing := _missing(votes)):
        votes |= {other: _cast(board, name, other, CLOSED) for other in sorted(missing)}
        found = objection(votes)
    late = tuple(sorted({*late, *(other for other, vote in votes.items() if vote == CLOSED)}))
    if found is not None and cast == CLOSED:
        return Resolution(found, (), (_late(name, found), START_AGAIN))
    return Resolution(found, () if found is not None and mine.plan else late, _clash(name, rank, found, votes))


def tell(board: BallotBox, name: str, rank: int, mine: Vote) -> tuple[str, str] | None:
    """Vote on a graph that is decided on this rank; the divergence, as far as others have voted. It does not wait."""
    _cast(board, name, rank, mine)
    votes = _collect(board, name, {rank: mine}, 0.0, frozenset(), is_patient=True)
    return _clash(name, rank, objection(votes), votes)


def objection(votes: Mapping[int, Vote]) -> str | None:
    """Why a graph must stay as it was on ranks with these votes; None if nobody objects."""
    for rank, vote in sorted(votes.items()):
        if not vote.plan:
            return f"rank {rank} leaves it as it was: {vote.why}"
    plans: dict[str, tuple[int, str]] = {}
    for rank, vote in sorted(votes.items()):
        first, plan = plans.setdefault(vote.graph, (rank, vote.plan)) if vote.graph else (rank, vote.plan)
        if plan != vote.plan:
            return (
                f"rank {rank} made another plan than rank {first} for the same graph: {vote.plan[:12]} instead of "
                f"{plan[:12]}"
            )
    return None


def _collect(
    board: BallotBox, name: str, votes: dict[int, Vote], wait_s: float, silent: Set[int], *, is_patient: bool
) -> dict[int, Vote]:
    """These votes and those of all ranks that the voters are connected with, as far as they are there in time."""
    votes = dict(votes)
    end = time.monotonic() + wait_s
    while True:
        missing = _missing(votes)
        is_last = not missing - silent or time.monotonic() >= end
        if is_last or (not is_patient and board.read_all([_objection_key(name)])):
            read = _present(board, name, sorted(missing))
        else:
            read = _first_present(board, name, sorted(missing - silent))
        votes |= read
        if not is_patient and any(not vote.plan for vote in votes.values()):
            return votes
        if read:  # they may name more ranks
            continue
        if is_last:
            return votes
        time.sleep(min(PAUSE_S * len(missing), MAX_PAUSE_S))


def _first_present(board: BallotBox, name: str, ranks: Sequence[int]) -> dict[int, Vote]:
    """The votes of the first ranks, up to the first part of `NUM_TOGETHER` in which one is missing."""
    found: dict[int, Vote] = {}
    for start in range(0, len(ranks), NUM_TOGETHER):
        part = ranks[start : start + NUM_TOGETHER]
        texts = board.read_all([_key(name, rank) for rank in part])
        if texts is None:
            break
        found |= dict(zip(part, map(_vote, texts), strict=True))
    return found


def _present(board: BallotBox, name: str, ranks: Sequence[int]) -> dict[int, Vote]:
    """All votes of these ranks that exist now; a part with missing ones is halved."""
    texts = board.read_all([_key(name, rank) for rank in ranks]) if ranks else []
    if texts is not None:
        return dict(zip(ranks, map(_vote, texts), strict=True))
    half = len(ranks) // 2
    return _present(board, name, ranks[:half]) | _present(board, name, ranks[half:]) if half else {}


def _missing(votes: Mapping[int, Vote]) -> set[int]:
    """The ranks that voters name, without a vote."""
    ranges = {each for vote in votes.values() for each in vote.ranks}
    return {rank for first, last, step in ranges for rank in range(first, last + 1, step)} - votes.keys()


def _clash(name: str, rank: int, found: str | None, votes: Mapping[int, Vote]) -> tuple[str, str] | None:
    """The divergence of ranks that leave a graph as it was from those that cannot."""
    final = next((other for other, vote in sorted(votes.items()) if vote.is_final), None)
    if found is None or final is None:
        return None
    who = "this rank runs" if final == rank else f"rank {final} runs"
    what = f"{who} the rewritten graph {name!r} from its compiler's cache, but others leave it as it was"
    return f"{what} ({found}), so they would run different collectives", FRESH_CACHES


def _late(name: str, why: str) -> str:
    return (
        f"this rank compiled graph {name!r} more than {WAIT_S:.0f} s later than others, which have rewritten it, and "
        f"cannot do the same ({why}), so they would run different collectives"
    )


def _cast(board: BallotBox, name: str, rank: int, vote: Vote) -> Vote:
    """Write the vote of a rank unless it has one; the vote that it has.

    A vote to leave the graph as it was is announced first: whoever sees the vote could have seen the announcement.
    """
    if not vote.plan:
        board.write_once(_objection_key(name), str(rank))
    return _vote(board.write_once(_key(name, rank), json.dumps(asdict(vote))))


@functools.lru_cache(maxsize=64)  # most ranks vote alike
def _vote(text: str) -> Vote:
    data: dict[str, Any] = json.loads(text)
    data["ranks"] = tuple(tuple(each) for each in data["ranks"])
    return Vote(**data)


def _key(name: str, rank: int) -> str:
    return f"vote/{name}/{rank}"


def _objection_key(name: str) -> str:
    return f"vote/{name}/objection"
