"""Deadlocks: finds ranks that wait for each other in a cycle.

Contract: static, and linear in the launches of one rank of each kind; ranks of one kind behave identically. Every rank
issues its launches and waits in order. A launch joins the queue of its group. It is complete once all members have
launched it, and a transfer once both ends have. A wait blocks its rank. With `one_at_a_time` a launch blocks its rank
too. This models kernels that occupy the device until all ranks of the group have arrived, which NCCL warns about for
groups that share ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.verification.agreement.issue_order import IssuedLaunch, IssuedWait
from weft.verification.agreement.world import World
from weft.verification.rendezvous import MeetingPlace

MeetingKey = tuple[Any, int]
"""Where kinds of ranks meet, and the number of the launch there."""


@dataclass(frozen=True)
class BlockedRank:
    """A rank that is blocked forever at a node, by one of its launches that another rank has not made."""

    rank: int
    node: str
    launch: IssuedLaunch
    place: MeetingPlace
    missing: int
    """A rank that has not made this launch, and is blocked elsewhere."""


def cycles(world: World, *, one_at_a_time: bool = False) -> list[tuple[BlockedRank, ...]]:
    """Cycles of ranks that wait for each other, at most one through each kind of rank."""
    search = _CycleSearch(world, one_at_a_time)
    search.run()
    done: set[int] = set()
    found = [search.cycle(rank, done) for rank in search.first]
    return [cycle for cycle in found if cycle]


@dataclass(frozen=True)
class _GroupView:
    """A group as one kind of rank sees it."""

    place: MeetingPlace
    number: int
    """Equal for all kinds of ranks that meet there."""
    position: int
    """Position of the rank in the group."""
    num_kinds: int


class _CycleSearch:
    """Runs one rank of each kind through its issue order."""

    def __init__(self, world: World, one_at_a_time: bool) -> None:
        self.world, self.one_at_a_time = world, one_at_a_time
        self.kinds = world.kinds()
        self.first = [self.kinds.index(kind) for kind in dict.fromkeys(self.kinds)]
        numbers: dict[Any, int] = {}
        self.group_views = {self.kinds[rank]: self._group_views(rank, numbers) for rank in self.first}
        self.position = dict.fromkeys(self.kinds, 0)
        self.launched: dict[int, list[tuple[IssuedLaunch, list[MeetingKey]]]] = {kind: [] for kind in self.kinds}
        self.counts: dict[int, dict[Any, int]] = {kind: {} for kind in self.kinds}
        self.missing: dict[MeetingKey, int] = {}
        self.waiting: dict[MeetingKey, list[int]] = {}
        self.blocked: dict[int, tuple[str, int, int]] = {}
        """By kind: the node at which it is blocked, the number of the launch, and the part of the launch."""

    def _group_views(self, rank: int, numbers: dict[Any, int]) -> dict[str, _GroupView]:
        found: dict[str, _GroupView] = {}
        for name, place in self.world.places[rank].items():
            met = self.world.met(place, self.kinds)
            number = numbers.setdefault(met, len(numbers))
            found[name] = _GroupView(place, number, place.members.index(rank), len({kind for kind, _ in met}))
        return found

    def run(self) -> None:
        """Run every kind until it ends or is blocked forever."""
        ready = list(reversed(self.first))
        while ready:
            ready += self._advance(ready.pop())

    def _advance(self, rank: int) -> list[int]:
        """Run a rank until it blocks; returns the ranks that its launches have unblocked."""
        kind, woken = self.kinds[rank], list[int]()
        events, launched, missing = self.world.order(rank).events, self.launched[kind], self.missing
        has_launched = self.blocked.pop(kind, None) is not None  # a launch at which it was blocked is already posted
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
        """Post the parts of a launch where they meet those of other kinds; returns the ranks that waited for them."""
        view, counts, missing = self.group_views[kind][launch.group], self.counts[kind], self.missing
        keys: list[Any] = [view.number]
        if launch.transfers:
            keys = [
                (view.number, view.position, t.peer, t.tag)
                if t.is_send
                else (view.number, t.peer, view.position, t.tag)
                for t in launch.transfers
            ]
        meetings: list[MeetingKey] = []
        woken: list[int] = []
        needed = 2 if launch.transfers else view.num_kinds
        for key in keys:
            count = counts[key] = counts.get(key, 0) + 1
            meeting = (key, count)
            meetings.append(meeting)
            left = missing[meeting] = missing.get(meeting, needed) - 1
            if not left and meeting in self.waiting:
                woken += self.waiting.pop(meeting)
        self.launched[kind].append((launch, meetings))
        return woken

    # The graph of waiting ranks.

    def cycle(self, rank: int, done: set[int]) -> tuple[BlockedRank, ...]:
        """The cycle that a blocked rank leads to; empty if it leads to a rank that has ended or was seen before."""
        chain: dict[int, BlockedRank] = {}
        current = self._blocked_at(rank)
        while rank not in chain and current is not None and self.kinds[rank] not in done:
            chain[rank] = current
            rank = current.missing
            current = self._blocked_at(rank)
        done.update(self.kinds[seen] for seen in chain)
        return tuple(chain.values())[list(chain).index(rank) :] if rank in chain else ()

    def _blocked_at(self, rank: int) -> BlockedRank | None:
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
