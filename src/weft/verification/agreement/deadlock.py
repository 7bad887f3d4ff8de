"""Deadlocks: whether ranks can wait for each other in a circle.

Contract: static, and linear in the launches of the kinds of ranks; ranks that cannot be told apart are run once. Every
rank issues its order in turn. A launch goes to the queue of its group and is complete once all members have launched
it; a transfer once both ends have. A wait blocks its rank. With `one_at_a_time` a launch blocks it too: what happens if
each kernel holds the device until its group is there, which NCCL warns of where groups share ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.verification.agreement.issue_order import IssuedLaunch, IssuedWait
from weft.verification.agreement.world import World
from weft.verification.rendezvous import MeetingPlace

MeetingKey = tuple[Any, int]
"""Where kinds of ranks meet, and the how-manieth time."""


@dataclass(frozen=True)
class BlockedRank:
    """Where a rank stands for ever: at a node, for a launch of its own that another rank has not launched."""

    rank: int
    node: str
    launch: IssuedLaunch
    place: MeetingPlace
    missing: int
    """A rank that has not launched it and stands elsewhere."""


def cycles(world: World, *, one_at_a_time: bool = False) -> list[tuple[BlockedRank, ...]]:
    """Circles of ranks that wait for each other, at most one through each kind of rank."""
    run = _CycleSearch(world, one_at_a_time)
    run.to_the_end()
    done: set[int] = set()
    circles = [run.circle(rank, done) for rank in run.first]
    return [circle for circle in circles if circle]


@dataclass(frozen=True)
class _GroupView:
    """A group as one kind of rank sees it."""

    place: MeetingPlace
    number: int
    """The same for all kinds that meet there."""
    position: int
    """Of the rank in the group."""
    num_kinds: int


class _CycleSearch:
    """One rank of each kind on its way through its order."""

    def __init__(self, world: World, one_at_a_time: bool) -> None:
        self.world, self.one_at_a_time = world, one_at_a_time
        self.kinds = world.kinds()
        self.first = [self.kinds.index(kind) for kind in dict.fromkeys(self.kinds)]
        numbers: dict[Any, int] = {}
        self.spots = {self.kinds[rank]: self._spots(rank, numbers) for rank in self.first}
        self.position = dict.fromkeys(self.kinds, 0)
        self.launched: dict[int, list[tuple[IssuedLaunch, list[MeetingKey]]]] = {kind: [] for kind in self.kinds}
        self.counts: dict[int, dict[Any, int]] = {kind: {} for kind in self.kinds}
        self.missing: dict[MeetingKey, int] = {}
        self.waiting: dict[MeetingKey, list[int]] = {}
        self.blocked: dict[int, tuple[str, int, int]] = {}
        """By kind: the node it stands at, the number of the launch, and of the part of it."""

    def _spots(self, rank: int, numbers: dict[Any, int]) -> dict[str, _GroupView]:
        found: dict[str, _GroupView] = {}
        for name, place in self.world.places[rank].items():
            met = self.world.met(place, self.kinds)
            number = numbers.setdefault(met, len(numbers))
            found[name] = _GroupView(place, number, place.members.index(rank), len({kind for kind, _ in met}))
        return found

    def to_the_end(self) -> None:
        """Let every kind run until it ends or is blocked for ever."""
        ready = list(reversed(self.first))
        while ready:
            ready += self._advance(ready.pop())

    def _advance(self, rank: int) -> list[int]:
        """Run a rank until it must wait; returns the ranks that may go on since it launched what they wait for."""
        kind, woken = self.kinds[rank], list[int]()
        events, launched, missing = self.world.order(rank).events, self.launched[kind], self.missing
        has_launched = self.blocked.pop(kind, None) is not None  # what it stands at, if that is a launch
        for position in range(self.position[kind], len(events)):
            event = events[position]
            if isinstance(event, IssuedWait):
                pending: Sequence[tuple[int, int]] = () if self.one_at_a_time else event.parts
            else:
                if not has_launched:
                    woken += self._launch(kind, event)
                number = len(launched) - 1
                pending = [(number, p) for p in range(len(launched[-1][1]))] if self.one_at_a_time else ()
            has_launched = False
            for number, part in pending:
                meeting = launched[number][1][part]
                if missing[meeting]:
                    self.blocked[kind] = (event.node, number, part)
                    self.waiting.setdefault(meeting, []).append(rank)
                    self.position[kind] = position
                    return woken
        self.position[kind] = len(events)
        return woken

    def _launch(self, kind: int, launch: IssuedLaunch) -> list[int]:
        """Post the parts of a launch where they meet those of other kinds; returns who waited for them."""
        spot, counts, missing = self.spots[kind][launch.group], self.counts[kind], self.missing
        keys: list[Any] = [spot.number]
        if launch.transfers:
            keys = [
                (spot.number, spot.position, t.peer, t.tag)
                if t.is_send
                else (spot.number, t.peer, spot.position, t.tag)
                for t in launch.transfers
            ]
        meetings: list[MeetingKey] = []
        woken: list[int] = []
        needed = 2 if launch.transfers else spot.num_kinds
        for key in keys:
            count = counts[key] = counts.get(key, 0) + 1
            meeting = (key, count)
            meetings.append(meeting)
            left = missing[meeting] = missing.get(meeting, needed) - 1
            if not left and meeting in self.waiting:
                woken += self.waiting.pop(meeting)
        self.launched[kind].append((launch, meetings))
        return woken

    # Who waits for whom.

    def circle(self, rank: int, done: set[int]) -> tuple[BlockedRank, ...]:
        """The circle that a blocked rank leads to; empty if it leads to one that has ended, or to what was seen."""
        stands: dict[int, BlockedRank] = {}
        stand = self._stand(rank)
        while rank not in stands and stand is not None and self.kinds[rank] not in done:
            stands[rank] = stand
            rank = stand.missing
            stand = self._stand(rank)
        done.update(self.kinds[seen] for seen in stands)
        return tuple(stands.values())[list(stands).index(rank) :] if rank in stands else ()

    def _stand(self, rank: int) -> BlockedRank | None:
        kind = self.kinds[rank]
        if kind not in self.blocked:
            return None
        node, number, part = self.blocked[kind]
        launch, meetings = self.launched[kind][number]
        key, count = meetings[part]
        place = self.world.places[rank][launch.group]
        members = place.members
        if launch.transfers:
            members = (members[launch.transfers[part].peer],)
        for member in members:
            other = self.kinds[member]
            if other in self.blocked and self.counts[other].get(key, 0) < count:
                return BlockedRank(rank, node, launch, place, member)
        return None
