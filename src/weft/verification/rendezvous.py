"""Where ranks meet: the k-th launch of a group on one rank belongs to the k-th on every other.

Contract: a meeting is complete when every member has posted. Its posts are compared then; ranks that launch different
things at the same place of a group's order get an error that shows the node of each. Transfers between two ranks meet
by (source, destination, tag), in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from torch import Tensor

from weft.errors import VerificationError, compose
from weft.graph.groups import Group, GroupTable
from weft.graph.listings.types import DTYPE_NAMES
from weft.graph.ops import Kind
from weft.verification.collective_values import Post, receive
from weft.verification.rank import show


@dataclass(frozen=True)
class Place:
    """A queue of launches: those of one process group, or the transfers of one tag between two of its ranks."""

    group: str
    """The name of the group on the first of the ranks that was asked."""
    members: tuple[int, ...]
    tag: int | None = None
    """None for collectives; `members` are then all ranks of the group, else source and destination."""
    identity: str = ""
    """Tells the group from others of the same ranks, see `Group.identity`."""

    def __str__(self) -> str:
        if self.tag is None:
            return f"group {self.group!r}"
        return f"group {self.group!r} from rank {self.members[0]} to rank {self.members[1]} with tag {self.tag}"


class Places:
    """The places of groups: one for each process group, however each rank calls it."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], str], Place] = {}

    def of(self, group: Group, members: tuple[int, ...]) -> Place:
        """Where the members of a group meet."""
        place = Place(group.name, members, identity=group.identity)
        return self._known.setdefault((members, group.identity), place)


def told_apart(tables: Sequence[GroupTable]) -> list[GroupTable]:
    """The tables of ranks, no two groups alike: where all ranks share one table, its names tell groups apart."""
    if all(table.alike is None for table in tables):
        return list(tables)
    if any(table is not tables[0] for table in tables):
        raise VerificationError(cannot_tell(*next(table.alike for table in tables if table.alike is not None)))
    named = {name: group.called(name, name) for name, group in tables[0].groups.items()}
    return [replace(tables[0], groups=named)] * len(tables)


def cannot_tell(first: str, second: str) -> str:
    """Why nothing can be said of ranks that use both of two groups."""
    return compose(
        "groups",
        f"{first!r} and {second!r} have the same ranks, and nothing tells which is which on other ranks",
        do=f"name them by mesh axis, or say which was created first: group({second!r}, ..., id='#1')",
    )


@dataclass(eq=False)
class Meeting:
    """The `number`-th launch at a place (counted from 1), on all its ranks."""

    place: Place
    number: int
    posts: dict[int, Post] = field(default_factory=dict[int, Post])
    _received: dict[int, list[Tensor]] | None = None

    @property
    def missing(self) -> list[int]:
        """The members that have not launched it yet."""
        return [member for member in self.place.members if member not in self.posts]

    def take(self, rank: int, position: int) -> Tensor:
        """What a rank receives. All is computed at the first call: then no member may have written its input yet."""
        if self._received is None:
            self._received = receive(self.posts, self.place.members)
        return self._received[rank][position]


class Rendezvous:
    """All meetings of a run."""

    def __init__(self, tables: Sequence[GroupTable]) -> None:
        self._tables = tables
        self._open: dict[tuple[Place, int], Meeting] = {}
        self._counts: dict[tuple[Place, int], int] = {}

    def post(self, place: Place, post: Post) -> Meeting:
        """Add a rank's part; compare the parts if it is the last one."""
        number = self._counts.get((place, post.rank), 0) + 1
        self._counts[place, post.rank] = number
        meeting = self._open.setdefault((place, number), Meeting(place, number))
        meeting.posts[post.rank] = post
        if not meeting.missing:
            del self._open[place, number]
            self.compare(meeting)
        return meeting

    def compare_open(self) -> None:
        """Compare what was posted to meetings that never became complete."""
        for meeting in self._open.values():
            self.compare(meeting)

    def compare(self, meeting: Meeting) -> None:
        """Raise if the ranks disagree on what the launch is."""
        posts = [meeting.posts[member] for member in meeting.place.members if member in meeting.posts]
        difference = _difference(posts, meeting.place.members)
        if difference is None:
            return
        what = f"the ranks of {meeting.place} disagree on launch {meeting.number}: {difference}"
        where = [f"rank {post.rank}: {show(post.node, self._tables[post.rank])[0]}" for post in posts]
        do = f"launch the collectives of {meeting.place.group!r} in one order on every rank"
        raise VerificationError(compose("virtual cluster", what, where=where, do=do))


def _difference(posts: Sequence[Post], members: Sequence[int]) -> str | None:
    """How the posts of one meeting differ, or None."""
    for label, values in _facts(posts):
        for post, value in zip(posts, values, strict=True):
            if value != values[0]:
                return f"{label} is {values[0]} on rank {posts[0].rank}, {value} on rank {post.rank}"
    if posts[0].kind is not Kind.ALL_TO_ALL or posts[0].reshards is not None:
        return None
    for sender, receiver in product(posts, posts):
        sent = sender.in_splits[members.index(receiver.rank)] * _row(sender)
        expected = receiver.out_splits[members.index(sender.rank)] * _row(receiver)
        if sent != expected:
            return f"rank {sender.rank} sends {sent} elements to rank {receiver.rank}, which expects {expected}"
    return None


def _facts(posts: Sequence[Post]) -> Iterator[tuple[str, list[Any]]]:
    """What must be the same on every rank, by its name in a message."""
    if posts[0].kind not in (Kind.SEND, Kind.RECV):
        yield "the kind", [post.kind.value for post in posts]
        yield "the form", ["coalesced" if post.coalesced else "plain" for post in posts]
        yield "the number of tensors", [len(post.tensors) for post in posts]
        yield "the reduction", [post.reduce_op for post in posts]
        yield "the source", [post.src for post in posts]
        yield "the pair of dims", [post.reshards for post in posts]
    yield "the dtype", [_text(DTYPE_NAMES.get(t.dtype, str(t.dtype)) for t in post.tensors) for post in posts]
    if posts[0].kind is not Kind.ALL_TO_ALL or posts[0].reshards is not None:
        yield "the number of elements", [_text(t.numel() for t in post.tensors) for post in posts]


def _row(post: Post) -> int:
    """Elements in one row, the unit of splits."""
    return post.tensors[0].shape[1:].numel()


def _text(items: Iterable[Any]) -> str:
    return ", ".join(map(str, items))
