"""World: the issue order of every rank, and the ranks that it meets in each of its groups.

Contract: built in time linear in the ranks and the sizes of their groups. A meeting place is known by its ranks and by
the identity of the group. It is never known by the name of the group, which may differ between graphs. A rank with two
groups of the same ranks and identity is an error. `kinds` numbers the ranks such that ranks of one kind behave
identically, so that one of them can represent all.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import GraphError, VerificationError, compose
from weft.graph.groups import Group
from weft.verification.agreement.issue_order import IssueOrder
from weft.verification.rank import partition_of
from weft.verification.rendezvous import MeetingPlace, MeetingPlaces, ambiguous_groups


@dataclass(frozen=True)
class World:
    """All ranks of a run."""

    orders: tuple[IssueOrder, ...]
    """The different orders, sorted by the first rank that has each."""
    order_of: tuple[int, ...]
    """The number of each rank's order."""
    places: tuple[dict[str, MeetingPlace], ...]
    """Where each rank meets others, by the name that this rank has for the group."""

    @classmethod
    def of(cls, orders: Sequence[IssueOrder]) -> World:
        """Build the world from the order of each rank."""
        numbers: dict[int, int] = {}
        by_digest: dict[str, int] = {}
        distinct: list[IssueOrder] = []
        for order in orders:
            if id(order) not in numbers:
                number = numbers[id(order)] = by_digest.setdefault(order.digest, len(distinct))
                distinct += [order] if number == len(distinct) else []
        order_of = tuple(numbers[id(order)] for order in orders)
        return cls(tuple(distinct), order_of, _places(distinct, order_of))

    def order(self, rank: int) -> IssueOrder:
        """The issue order of a rank."""
        return self.orders[self.order_of[rank]]

    @functools.cached_property
    def name_at(self) -> dict[MeetingPlace, dict[int, str]]:
        """For each place, the name that each rank has for the group; ranks that never launch there are missing."""
        found: dict[MeetingPlace, dict[int, str]] = {}
        for rank, places in enumerate(self.places):
            for name, place in places.items():
                found.setdefault(place, {})[rank] = name
        return found

    @functools.cached_property
    def has_transfers(self) -> frozenset[MeetingPlace]:
        """Places with transfers: these name single ranks as peers, so the position of a rank matters."""
        used = [{launch.group for launch in order.launches if launch.transfers} for order in self.orders]
        return frozenset(
            place
            for rank, places in enumerate(self.places)
            for name, place in places.items()
            if name in used[self.order_of[rank]]
        )

    def kinds(self) -> tuple[int, ...]:
        """The kind of each rank: the coarsest partition in which equal kinds meet equal kinds in each group."""
        kinds = self.order_of
        while True:
            met = {place: self.met(place, kinds) for place in self.name_at}
            seen: dict[Any, int] = {}
            finer = tuple(
                seen.setdefault((kinds[rank], *(self._view(rank, p, met[p]) for p in places.values())), len(seen))
                for rank, places in enumerate(self.places)
            )
            if len(seen) == len(set(kinds)):
                return kinds
            kinds = finer

    def met(self, place: MeetingPlace, kinds: Sequence[int]) -> frozenset[Any] | tuple[Any, ...]:
        """The kinds that meet at a place, each with its name of the group; in order where positions matter."""
        names = self.name_at[place]
        members = [(kinds[rank], names.get(rank)) for rank in place.members]
        return tuple(members) if place in self.has_transfers else frozenset(members)

    def _view(self, rank: int, place: MeetingPlace, met: Hashable) -> Hashable:
        return (place.members.index(rank), met) if place in self.has_transfers else met


def _places(orders: Sequence[IssueOrder], order_of: Sequence[int]) -> tuple[dict[str, MeetingPlace], ...]:
    num_ranks = len(order_of)
    places, found = MeetingPlaces(), list[dict[str, MeetingPlace]]()
    for rank, number in enumerate(order_of):
        groups = orders[number].groups.items()
        mine = {name: places.of(group, _part_of(group, num_ranks, rank)) for name, group in groups}
        if len(set(mine.values())) < len(mine):
            raise VerificationError(ambiguous_groups(*_alike(mine)))
        found.append(mine)
    return tuple(found)


def _alike(mine: Mapping[str, MeetingPlace]) -> tuple[str, str]:
    """Two names for one place."""
    seen: dict[MeetingPlace, str] = {}
    return next((seen[place], name) for name, place in mine.items() if seen.setdefault(place, name) != name)


def _part_of(group: Group, num_ranks: int, rank: int) -> tuple[int, ...]:
    """The ranks of the group that a rank belongs to."""
    mine = _parts(group, num_ranks).get(rank)
    if mine is None:
        what = f"rank {rank} launches in group {group.name!r}, which does not contain it"
        raise VerificationError(compose("agreement", what, do="give the ranks of the group"))
    return mine


@functools.lru_cache(maxsize=256)
def _parts(group: Group, num_ranks: int) -> dict[int, tuple[int, ...]]:
    try:
        return {rank: part for part in partition_of(group, num_ranks) for rank in part}
    except GraphError as error:
        raise VerificationError(str(error)) from None
