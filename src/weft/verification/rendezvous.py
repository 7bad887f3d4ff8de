"""Where ranks meet: which process group a launch belongs to on every rank.

Contract: the k-th launch of a group on one rank belongs to the k-th launch on every other rank of the group. Transfers
between two ranks meet by (source, destination, tag), in order. A group is known by its ranks and its identity, since
its name may differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.errors import VerificationError, compose
from weft.graph.groups import Group, GroupTable

RESHARD = "_dtensor::shard_dim_alltoall"
"""An all-to-all that is complete when it returns. `graph.ops` has no launch form for it, but its meaning is known."""


@dataclass(frozen=True)
class MeetingPlace:
    """A queue of launches: those of one process group, or the transfers of one tag between two of its ranks."""

    group: str
    """The name of the group on the rank that asked first."""
    members: tuple[int, ...]
    tag: int | None = None
    """None for collectives, where `members` are all ranks of the group; otherwise they are source and destination."""
    identity: str = ""
    """Distinguishes the group from others with the same ranks, see `Group.identity`."""

    def __str__(self) -> str:
        if self.tag is None:
            return f"group {self.group!r}"
        return f"group {self.group!r} from rank {self.members[0]} to rank {self.members[1]} with tag {self.tag}"


class MeetingPlaces:
    """One meeting place for each process group, whatever name each rank has for it."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], str], MeetingPlace] = {}

    def of(self, group: Group, members: tuple[int, ...]) -> MeetingPlace:
        """Where the members of a group meet."""
        place = MeetingPlace(group.name, members, identity=group.identity)
        return self._known.setdefault((members, group.identity), place)


def with_distinct_groups(tables: Sequence[GroupTable]) -> list[GroupTable]:
    """The tables of all ranks, with distinct groups.

    Where all ranks share one table, the names in it distinguish groups that have the same ranks.
    """
    if all(table.alike is None for table in tables):
        return list(tables)
    if any(table is not tables[0] for table in tables):
        raise VerificationError(ambiguous_groups(*next(table.alike for table in tables if table.alike is not None)))
    named = {name: group.called(name, name) for name, group in tables[0].groups.items()}
    return [replace(tables[0], groups=named)] * len(tables)


def ambiguous_groups(first: str, second: str) -> str:
    """The error for two groups that cannot be matched between ranks."""
    return compose(
        "groups",
        f"{first!r} and {second!r} have the same ranks, so they cannot be matched with the groups of other ranks",
        do=f"name them by mesh axis, or say which was created first: group({second!r}, ..., id='#1')",
    )
