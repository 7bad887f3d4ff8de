"""Meetings of the virtual cluster: the launch that every rank of a group makes together.

Contract: a meeting is complete when every member has posted its part. The parts are compared at that moment. If ranks
launch different things as the k-th launch of a group, the error shows the node of each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from torch import Tensor

from weft.errors import VerificationError, compose
from weft.graph.groups import GroupTable
from weft.graph.listings.types import DTYPE_NAMES
from weft.graph.ops import Kind
from weft.verification.rank import show
from weft.verification.rendezvous import MeetingPlace
from weft.verification.virtual.collective_values import Post, receive


@dataclass(eq=False)
class Meeting:
    """The `number`-th launch at a place (counted from 1), on all its ranks."""

    place: MeetingPlace
    number: int
    posts: dict[int, Post] = field(default_factory=dict[int, Post])
    _received: dict[int, list[Tensor]] | None = None

    @property
    def missing(self) -> list[int]:
        """The members that have not launched it yet."""
        return [member for member in self.place.members if member not in self.posts]

    def take(self, rank: int, position: int) -> Tensor:
        """One tensor that a rank receives.

        The first call computes the results of all members, because no member can have overwritten its input yet.
        """
        if self._received is None:
            self._received = receive(self.posts, self.place.members)
        return self._received[rank][position]


class Rendezvous:
    """All meetings of a run."""

    def __init__(self, tables: Sequence[GroupTable]) -> None:
        self._tables = tables
        self._open: dict[tuple[MeetingPlace, int], Meeting] = {}
        self._counts: dict[tuple[MeetingPlace, int], int] = {}

    def post(self, place: MeetingPlace, post: Post) -> Meeting:
        """Add a rank's part, and compare all parts once the last one has arrived."""
        number = self._counts.get((place, post.rank), 0) + 1
        self._counts[place, post.rank] = number
        meeting = self._open.setdefault((place, number), Meeting(place, number))
        meeting.posts[post.rank] = post
        if not meeting.missing:
            del self._open[place, number]
            self.compare(meeting)
        return meeting

    def compare_open(self) -> None:
        """Compare the parts that were posted to meetings that never became complete."""
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
    """A phrase for how the posts of one meeting differ, or None."""
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
    """The properties that must be equal on every rank, each with its name in messages and its value on each rank."""
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
    """Number of elements in one row, the unit in which splits count."""
    return post.tensors[0].shape[1:].numel()


def _text(items: Iterable[Any]) -> str:
    return ", ".join(map(str, items))
