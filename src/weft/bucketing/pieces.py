"""The nodes and fake values that a bucket is built of: sizes as numbers or nodes, new tensors and views of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import floordiv, mul
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from weft.bucketing.eligibility import BY_ROWS, MOVES_DATA, Part, parts_of
from weft.compat import FakeTensor, fake_tensor, fake_view
from weft.errors import PlanError, compose
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.edit import Edit
from weft.graph.metadata import contiguous_strides
from weft.graph.ops import Kind
from weft.plan.plan import Merge

aten = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """One tensor of the bucket."""

    launch: Node
    part: Part
    source: Node
    """What is packed: the tensor that is sent, or what it was before the casts and scalings that fold."""
    sent: Tensor
    """The fake value of what is sent."""
    own: bool
    """Whether it is given as a copy of its own."""


class Pieces:
    """The tensors of a bucket, and how nodes and values are made for them."""

    def __init__(self, edit: Edit, nodes: Mapping[str, Node], action: Merge) -> None:
        self.edit, self.nodes, self.action = edit, nodes, action
        for name in action.launches:
            if ops.launch_form(nodes[name].target) is None:
                raise PlanError(compose("plan", f"{name} is to be merged, but is no launch of a known kind"))
        self.members = [Collective(nodes[name]) for name in action.launches]
        self.launches = [member.launch for member in self.members]
        self.waits = {member.launch: member.waits for member in self.members}
        self.kind, self.place = self.members[0].kind, self.launches[-1]
        self.bound = ops.bind(self.launches[0])
        self.folded = frozenset(action.folded)
        self.made: list[Node] = []
        self.is_received = False
        """Whether the nodes that are made now are the wait or come after it."""
        self.pieces: list[Piece] = []
        for member in self.members:
            for part in parts_of(member):
                own = len(self.pieces) in action.owned
                piece = Piece(member.launch, part, self._unfolded(part.source), ops.value_of(part.source), own)
                self.pieces.append(piece)
        ranks = self.bound.get("group_size", 1)
        self.num_ranks: int = len(self.bound["input_split_sizes"]) if self.kind is Kind.ALL_TO_ALL else ranks
        self.num_rows = self.num_ranks if self.kind in BY_ROWS else 1
        self.by_bytes = action.strategy == "pack" and self.kind in MOVES_DATA
        self.is_static = all(type(n) is int for piece in self.pieces for n in piece.sent.shape)

    def call(
        self, target: Any, args: tuple[Any, ...], value: Any, name: str, like: Node | None = None, **kwargs: Any
    ) -> Node:
        """Create a node of the bucket, like one member or all of them.

        From the wait on it carries the annotations of their waits, and before that of what is folded into the bucket.
        """
        origin = self.launches if like is None else [like]
        if self.is_received:
            annotated = [wait for launch in origin for wait in self.waits[launch]]
        else:
            annotated = [] if like is not None else [*origin, *(self.nodes[name] for name in self.action.folded)]
        made = self.edit.call(
            target, args, kwargs, before=self.place, name=name, like=origin, annotated=annotated, value=value
        )
        self.made.append(made)
        return made

    def _unfolded(self, node: Node) -> Node:
        while node.name in self.folded:
            node = node.args[0]  # type: ignore[assignment]
        return node

    def folded_steps(self) -> list[Node]:
        """The casts and scalings that happen after packing, the last one first: those of any piece are those of all."""
        steps: list[Node] = []
        node: Any = self.pieces[0].part.source
        while node.name in self.folded:
            steps.append(node)
            node = node.args[0]
        return steps

    def new(self, size: list[Any], dtype: torch.dtype) -> Any:
        """The fake value of a new tensor, or None to have it computed where a size is symbolic."""
        if not self.is_static:
            return None
        return fake_tensor(self.edit.mode, size, contiguous_strides(size), dtype, self.pieces[0].sent.device)

    def view(self, node: Node, size: list[int]) -> FakeTensor:
        """The fake value of a contiguous tensor seen in another size."""
        value: FakeTensor = ops.value_of(node)
        return fake_view(value, size, contiguous_strides(size), int(value.storage_offset()))

    def received(self, piece: Piece) -> Any:
        """The fake value of a result: the one there is, so that whatever is made from it stays as it is."""
        sizes: list[Any] = list(piece.sent.shape)
        if self.kind is Kind.ALL_GATHER:
            sizes[0] = sizes[0] * self.num_ranks
        elif self.kind is Kind.REDUCE_SCATTER:
            sizes[0] = sizes[0] // self.num_ranks
        waits = [user for result in piece.part.results for user in result.users if ops.is_wait(user.target)]
        value = ops.value_of(waits[0]) if waits and Collective(piece.launch).is_functional else None
        if isinstance(value, Tensor):
            return value
        return fake_tensor(self.edit.mode, sizes, contiguous_strides(sizes), piece.sent.dtype, piece.sent.device)

    def shape(self, piece: Piece) -> list[Any]:
        """The shape of a result, with nodes for symbolic sizes."""
        sizes: list[Any] = [self._size(piece, dim) for dim in range(piece.sent.dim())]
        if self.kind is Kind.ALL_GATHER:
            sizes[0] = self._number(mul, sizes[0], self.num_ranks)
        elif self.kind is Kind.REDUCE_SCATTER:
            sizes[0] = self._number(floordiv, sizes[0], self.num_ranks)
        return sizes

    def _size(self, piece: Piece, dim: int) -> Any:
        size = piece.sent.shape[dim]
        if type(size) is int:
            return size
        name = f"{piece.launch.name}_size"
        return self.call(aten.sym_size.int, (piece.source, dim), size, name, like=piece.launch)

    def _number(self, function: Any, value: Any, by: int) -> Any:
        if not isinstance(value, Node):
            return function(value, by)
        return self.call(function, (value, by), function(ops.value_of(value), by), "size")

    def columns(self, piece: Piece) -> Any:
        """How many elements of a tensor are in a row of what is received."""
        divisor = 1 if self.kind not in BY_ROWS else self.num_ranks
        if self.is_static:
            return piece.sent.numel() // divisor
        numel: Any = piece.sent.numel()
        if type(numel) is not int:
            numel = self.call(aten.sym_numel.default, (piece.source,), numel, "numel", like=piece.launch)
        return self._number(floordiv, numel, divisor) if divisor > 1 else numel

    def total_columns(self) -> int:
        return sum(piece.sent.numel() // self.num_rows for piece in self.pieces) if self.is_static else 0

    def row_bytes(self) -> list[int]:
        divisor = self.num_ranks if self.kind in BY_ROWS else 1
        return [prod(p.sent.shape) // divisor * p.sent.dtype.itemsize for p in self.pieces]
