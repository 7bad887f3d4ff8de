"""Chunks: what a part of a collective needs of the calls around it.

Contract: pure data over the nodes of one graph. A tensor is cut along one dim, seen as outer x chunks x inner; chunk c
is everything whose middle digit is c. A call that works by rows computes chunk c of its result from chunk c of the
tensors that have that dim, and from the others as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from torch.fx import Node

from weft.graph.ops import is_wait
from weft.graph.profiles import profile
from weft.plan.decision import Reason, Refusal
from weft.streaming.layouts import Digit, Layout, Unfollowed
from weft.streaming.rowwise import Rowwise
from weft.streaming.view_layouts import sizes_of


class Place(NamedTuple):
    """Where a tensor is cut: which dim, and how much of it lies outside and inside of a chunk."""

    dim: int
    outer: int
    inner: int


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor of which a call needs a chunk: a view of a base that has chunks itself, or a part to be taken out."""

    node: Node
    place: Place
    base: Node | None = None
    layout: Layout | None = None
    """The tensor as a view of its base."""


@dataclass(frozen=True, eq=False)
class Chunking:
    """One collective and the calls beside it, cut into chunks."""

    launch: Node
    num_ranks: int
    chunks: int
    dim: int
    """The dim of the shard, on one rank, that is cut."""
    products: tuple[Node, ...]
    places: Mapping[Node, Place]
    """Of the bases: what was gathered, and each call that is computed chunk by chunk."""
    calls: Mapping[Node, Mapping[str, Operand]] = field(default_factory=dict[Node, Mapping[str, Operand]])
    """For each call that is computed chunk by chunk, in order, the arguments of which it takes a chunk."""
    lost: tuple[Refusal, ...] = ()
    """Why other products of the site take what was gathered as a whole."""
    result: Operand | None = None
    """What is scattered; None for a gather."""
    own: int | None = None
    """Of a ring, whose chunks are the parts of the ranks: the place of this rank in the group."""
    apart: int = 0
    """Of a sum over ranks whose chunks are scattered and gathered: the size of the group."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        node = self.launch if self.result is not None else self.launch.all_input_nodes[0]
        return sizes_of(node) or ()


def stride_of(place: Place, shape: Sequence[int]) -> int:
    """The elements, in row-major order, from one chunk to the next."""
    return place.inner * prod(shape[place.dim + 1 :])


def place_in(layout: Layout, stride: int, chunks: int) -> Place:
    """Where a view is cut whose base is cut at that stride."""
    fine = layout.refined((stride, stride * chunks))
    for number, dim in enumerate(fine.dims):
        for k, digit in enumerate(dim):
            if digit == Digit(chunks, stride):
                outer, inner = (prod(d.size for d in part) for part in (dim[:k], dim[k + 1 :]))
                return Place(number, outer, inner)
    raise Unfollowed("its chunks lie in no one dim")


def chunk_of(layout: Layout, stride: int, chunks: int) -> Layout:
    """A view of a chunk of the base: the view without the digit of the chunks."""
    fine = layout.refined((stride, stride * chunks))
    kept = [
        tuple(
            Digit(digit.size, digit.stride // chunks if digit.stride > stride else digit.stride)
            for digit in dim
            if digit != Digit(chunks, stride)
        )
        for dim in fine.dims
    ]
    return Layout(tuple(kept))


def check_rows(node: Node, chunks: int) -> None:
    """Refuse chunks of a single row: nothing is gained by them, and a vector is no matrix to every kernel."""
    shape = sizes_of(node) or ()
    if len(shape) > 1 and prod(shape[:-1]) <= chunks:
        raise Unfollowed("a chunk would be a single row")


def place_behind(call: Rowwise, name: str, place: Place) -> Place:
    """Where the result of a call is cut if this argument is."""
    dim = call.dims[name][place.dim]
    if dim is None:
        raise Unfollowed("it sums over the dim that chunks are cut from")
    return Place(dim, place.outer, place.inner)


def place_before(call: Rowwise, name: str, place: Place) -> Place | None:
    """Where an argument is cut if the result is; None where the argument has not that dim."""
    dims = call.dims[name]
    found = [d for d, dim in enumerate(dims) if dim == place.dim]
    return Place(found[0], place.outer, place.inner) if found else None


def first_cut(
    shape: tuple[int, ...], chunks: int, what: str, cut: Callable[[int], Chunking | Refusal]
) -> Chunking | Refusal:
    """The cut along the first dim that can be cut so, never the last; else the first reason why not."""
    first: Refusal | None = None
    for dim, size in enumerate(shape[: max(len(shape) - 1, 1)]):
        if size % chunks or size < chunks:
            continue
        found = cut(dim)
        if isinstance(found, Chunking):
            return found
        first = first or found
    sentence = f"no dim of {what} but the last splits into {chunks} chunks: {list(shape)}"
    return first or Refusal(Reason.DOES_NOT_SPLIT, sentence)


def replaced(cut: Chunking) -> set[Node]:
    """The nodes that nobody needs once a site runs in chunks; of a gather its launch too if only products needed it."""
    needed = {tensor for node in cut.calls for tensor in node.all_input_nodes}
    needed -= {operand.node for operands in cut.calls.values() for operand in operands.values() if operand.base}
    needed |= {operand.node for operands in cut.calls.values() for operand in operands.values() if not operand.base}
    waits = [user for user in cut.launch.users if is_wait(user.target)]
    found = dict.fromkeys(cut.products if cut.result is None else (cut.launch, *waits, *cut.calls))
    stack = list(found)
    while stack:
        for source in stack.pop().all_input_nodes:
            removable = source is cut.launch or (source.op == "call_function" and _is_pure(source))
            if source in found or source in needed or not removable or not all(u in found for u in source.users):
                continue
            found[source] = None
            if source is not cut.launch or cut.result is not None:
                stack.append(source)
    return set(found)


def still_needed(cut: Chunking, gone: set[Node]) -> list[Node]:
    """The calls whose results somebody else takes: these are joined from their chunks."""
    calls = cut.products if cut.result is None else cut.calls
    return [node for node in calls if any(user not in gone for user in node.users)]


def _is_pure(node: Node) -> bool:
    """Whether a call may go when nobody takes its result."""
    found = profile(node.target)
    return not (found.writes or found.random or found.ordered or found.opaque or found.launch)
