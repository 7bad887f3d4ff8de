"""Chunking: how a collective and the calls around it split into chunks.

Contract: pure data over the nodes of one graph. A tensor is split along one dim, viewed as outer x chunks x inner.
Chunk c consists of the elements whose middle index is c. A row-wise call computes chunk c of its result from chunk c of
the arguments that have this dim, and from all of the other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from torch.fx import Node

from weft.graph.operator_effects import profile
from weft.graph.ops import bind, is_wait
from weft.plan.decision import Reason, Refusal
from weft.streaming.layouts import Digit, Layout, Unfollowed
from weft.streaming.rowwise import Rowwise
from weft.streaming.view_layouts import qualified, sizes_of

SCALED = "aten::_scaled_mm"
"""The product of fp8 tensors with scales."""
SCALE_ROWS = 4
"""Scales of rows are f32 and begin at multiples of 16 bytes."""


class ChunkDim(NamedTuple):
    """The dim along which a tensor is split, as outer x chunks x inner."""

    dim: int
    outer: int
    inner: int


@dataclass(frozen=True, eq=False)
class Operand:
    """An argument that a call takes in chunks: a view of a base computed in chunks, or a slice of a whole tensor."""

    node: Node
    chunk_dim: ChunkDim
    base: Node | None = None
    layout: Layout | None = None
    """The argument as a view of its base."""


class FusedForm(NamedTuple):
    """A site as one operator through symmetric memory takes it."""

    shape: tuple[int, ...]
    """Of the left operand over all ranks."""
    dim: int
    """The dim that is gathered or scattered."""
    copied: tuple[Node, ...] = ()
    """Nodes that are replaced by a copy, because the operator returns its results with the dim of the ranks first."""


@dataclass(frozen=True, eq=False)
class Chunking:
    """One collective and its calls, split into chunks."""

    launch: Node
    num_ranks: int
    chunks: int
    dim: int
    """The dim of one rank's shard that is split."""
    products: tuple[Node, ...]
    chunk_dims: Mapping[Node, ChunkDim]
    """Where each base is split: the gathered tensor, and every call that is computed in chunks."""
    calls: Mapping[Node, Mapping[str, Operand]] = field(default_factory=dict[Node, Mapping[str, Operand]])
    """The calls that are computed in chunks, in order, each with the arguments that it takes in chunks."""
    dropped: tuple[Refusal, ...] = ()
    """Why other products of the site wait for the whole gathered tensor."""
    result: Operand | None = None
    """The tensor that is scattered; None for a gather."""
    ring_rank: int | None = None
    """For a ring, whose chunks are the shards of the ranks: this rank's index in the group."""
    decomposed_over: int = 0
    """Size of the group, for an all-reduce whose chunks run as reduce-scatter and all-gather; otherwise 0."""
    fused: FusedForm | None = None
    """How one operator through symmetric memory runs the whole site; None if chunks run."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        node = self.launch if self.result is not None else self.launch.all_input_nodes[0]
        return sizes_of(node) or ()

    def with_products(self, products: tuple[Node, ...]) -> Chunking:
        """The same chunks of fewer products of a gather, with only the calls that these need."""
        needed = needed_calls(products, self.calls)
        calls = {node: operands for node, operands in self.calls.items() if node in needed}
        dims = {node: dim for node, dim in self.chunk_dims.items() if node in needed or node is self.launch}
        return replace(self, products=products, chunk_dims=dims, calls=calls)


def needed_calls(products: Iterable[Node], calls: Mapping[Node, Mapping[str, Operand]]) -> set[Node]:
    """The products and the calls whose chunks they need."""
    needed: set[Node] = set()
    stack = list(products)
    while stack:
        node = stack.pop()
        if node not in needed and node in calls:
            needed.add(node)
            stack += [operand.base for operand in calls[node].values() if operand.base is not None]
    return needed


def stride_of(chunk_dim: ChunkDim, shape: Sequence[int]) -> int:
    """Distance between two chunks in elements, in row-major order."""
    return chunk_dim.inner * prod(shape[chunk_dim.dim + 1 :])


def chunk_dim_in(layout: Layout, stride: int, chunks: int) -> ChunkDim:
    """Where a view is split if its base is split at this stride."""
    fine = layout.refined((stride, stride * chunks))
    for number, dim in enumerate(fine.dims):
        for k, digit in enumerate(dim):
            if digit == Digit(chunks, stride):
                outer, inner = (prod(d.size for d in part) for part in (dim[:k], dim[k + 1 :]))
                return ChunkDim(number, outer, inner)
    raise Unfollowed("its chunks do not lie in a single dim")


def chunk_of(layout: Layout, stride: int, chunks: int) -> Layout:
    """The same view of one chunk of the base: the digit that counts chunks is removed."""
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
    """Refuse chunks that kernels treat differently: a single row, and rows of fp8 whose scales are not aligned."""
    shape = sizes_of(node) or ()
    rows = prod(shape[:-1]) // chunks
    if len(shape) > 1 and rows <= 1:
        raise Unfollowed("a chunk would be a single row")
    if qualified(node.target) == SCALED and prod(sizes_of(bind(node)["scale_a"]) or ()) > 1 and rows % SCALE_ROWS:
        raise Unfollowed(f"cuBLAS takes fp8 rows with scales of their own in multiples of {SCALE_ROWS}")


def chunk_dim_of_result(call: Rowwise, name: str, chunk_dim: ChunkDim) -> ChunkDim:
    """Where the result of a call is split if this argument is split."""
    dim = call.dims[name][chunk_dim.dim]
    if dim is None:
        raise Unfollowed("it sums over the dim that is split into chunks")
    return ChunkDim(dim, chunk_dim.outer, chunk_dim.inner)


def chunk_dim_of_argument(call: Rowwise, name: str, chunk_dim: ChunkDim) -> ChunkDim | None:
    """Where an argument is split if the result is split; None if the argument does not have this dim."""
    dims = call.dims[name]
    found = [d for d, dim in enumerate(dims) if dim == chunk_dim.dim]
    return ChunkDim(found[0], chunk_dim.outer, chunk_dim.inner) if found else None


def first_cut(
    shape: tuple[int, ...], chunks: int, what: str, cut: Callable[[int], Chunking | Refusal]
) -> Chunking | Refusal:
    """The chunking along the first dim that works, never the last; otherwise the first reason against it."""
    first: Refusal | None = None
    for dim, size in enumerate(shape[: max(len(shape) - 1, 1)]):
        if size % chunks or size < chunks:
            continue
        found = cut(dim)
        if isinstance(found, Chunking):
            return found
        first = first or found
    sentence = f"no dim of {what} except the last is divisible into {chunks} chunks: its shape is {list(shape)}"
    return first or Refusal(Reason.DOES_NOT_SPLIT, sentence)


def replaced(cut: Chunking, views: Iterable[Node] = ()) -> set[Node]:
    """The nodes that are dead once a site runs in chunks, including a gather's launch if only its products used it.

    `views` are views of the gathered tensor that something else replaces.
    """
    needed = {tensor for node in cut.calls for tensor in node.all_input_nodes}
    needed -= {operand.node for operands in cut.calls.values() for operand in operands.values() if operand.base}
    needed |= {operand.node for operands in cut.calls.values() for operand in operands.values() if not operand.base}
    waits = [user for user in cut.launch.users if is_wait(user.target)]
    found = dict.fromkeys((*cut.products, *views) if cut.result is None else (cut.launch, *waits, *cut.calls))
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
    """The calls whose whole results other nodes still use. Their chunks are joined."""
    calls = cut.products if cut.result is None else cut.calls
    return [node for node in calls if any(user not in gone for user in node.users)]


def _is_pure(node: Node) -> bool:
    """Whether a call may be erased when its result is unused."""
    found = profile(node.target)
    return not (found.writes or found.random or found.ordered or found.opaque or found.launch)
