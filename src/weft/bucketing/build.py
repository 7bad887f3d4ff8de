"""Merging: the nodes that stand for a bucket.

Contract: a bucket computes for each member what the member computed. Its layout depends on no rank: every rank holds
the same graph. Fake values are made in closed form; only symbolic sizes go through torch's fake kernels.

    concat      flat views of the members -> cat -> one launch -> wait -> split -> views or copies
    coalesced   one launch of the operator that takes lists -> an item and a wait for each member
    pack        `weft::pack` into bytes -> one launch -> wait -> slices, seen in their dtypes -> views or copies

A reduce-scatter or an all-to-all sends one row to each rank, so its members are laid side by side in rows; the result
of an all-gather or an all-to-all has one row from each rank and is taken apart by columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from weft.bucketing.eligibility import FROM_ROWS, written_buffer
from weft.bucketing.pack import ALIGNMENT, PACK, row_layout
from weft.bucketing.pieces import Piece, Pieces
from weft.compat import FakeTensor, fake_view
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.edit import Edit
from weft.graph.ops import Kind
from weft.plan.plan import Merge

aten = torch.ops.aten


def merge(edit: Edit, nodes: Mapping[str, Node], action: Merge) -> dict[Node, Node]:
    """Create the nodes of one bucket and erase its members; returns which node takes the place of which."""
    return _Builder(edit, nodes, action).build()


class _Builder(Pieces):
    def build(self) -> dict[Node, Node]:
        if self.action.keeps_waits:
            return self._build_around_waits()
        if self.action.strategy == "coalesced":
            launch = self._launch_list()
            items = [self._item(launch, number) for number in range(len(self.pieces))]
            self.is_received = True
            before = list(self.made)  # with the items: the list would keep all of them until its last one is taken
            results = [self._wait(*each) for each in zip(self.pieces, items, strict=True)]
        else:
            packed = self._pack() if self.action.strategy == "pack" else self._concatenate()
            launch = self._launch(packed)
            self.is_received = True
            before = list(self.made)
            wait = self.call(_op("wait"), (launch,), ops.value_of(launch), f"{self.launches[0].name}_done")
            results = self._results(wait)
        heirs: dict[Node, Node] = {}
        for piece, result in zip(self.pieces, results, strict=True):
            heirs |= self._heirs(piece, result)
        self._put(before, self.made[len(before) :])
        self._erase()
        return heirs

    def _build_around_waits(self) -> dict[Node, Node]:
        """One launch of a list; every wait waits for its item of that."""
        launch = self._launch_list()
        heirs = {piece.launch: self._item(launch, number) for number, piece in enumerate(self.pieces)}
        for member in self.members:
            self.edit.erase(member.launch)
        return heirs

    # Sending.

    def _concatenate(self) -> Node:
        dtype = ops.value_of(self.pieces[0].source).dtype
        whole = _whole([piece.source for piece in self.pieces]) if self.num_rows == 1 else None
        columns = self.total_columns()
        size = [columns] if self.num_rows == 1 else [self.num_rows, columns]
        dim = () if self.num_rows == 1 else (1,)
        packed = whole
        if packed is None:
            flats = [self._flat(piece) for piece in self.pieces]
            packed = self.call(aten.cat.default, (flats, *dim), self.new(size, dtype), "packed")
        for step in reversed(self.folded_steps()):
            value = self.new(size, ops.value_of(step).dtype)
            name = f"{step.name}_packed"
            packed = self.call(step.target, (packed, *step.args[1:]), value, name, None, **dict(step.kwargs))
        if self.num_rows == 1:
            return packed
        value = self.view(packed, [self.num_rows * columns]) if self.is_static else None
        return self.call(aten.view.default, (packed, [-1]), value, "packed_flat")

    def _pack(self) -> Node:
        dtypes = [piece.sent.dtype for piece in self.pieces]
        alignment = ALIGNMENT if self.by_bytes else dtypes[0].itemsize
        _, row_bytes = row_layout(self.row_bytes(), alignment)
        sources = [piece.source for piece in self.pieces]
        value = self.new([self.num_rows * row_bytes], torch.uint8)
        packed = self.call(PACK, (sources, dtypes, self.num_rows, alignment), value, "packed")
        if self.by_bytes:
            return packed
        size = [self.num_rows * row_bytes // dtypes[0].itemsize]
        value = fake_view(ops.value_of(packed), size, [1], 0, dtypes[0])
        return self.call(aten.view.dtype, (packed, dtypes[0]), value, "packed_typed")

    def _flat(self, piece: Piece) -> Node:
        """A tensor as one row, or as one row for each rank that it goes to."""
        value: Tensor = ops.value_of(piece.source)
        contiguous = value.is_contiguous()
        if contiguous and value.dim() == (1 if self.num_rows == 1 else 2) and self.num_rows in (1, value.shape[0]):
            return piece.source
        size = [-1] if self.num_rows == 1 else [self.num_rows, -1]
        made: Any = None
        if self.is_static and contiguous and isinstance(value, FakeTensor):
            numel = value.numel()
            shape = [numel] if self.num_rows == 1 else [self.num_rows, numel // self.num_rows]
            made, size = self.view(piece.source, shape), shape
        target = aten.view.default if contiguous else aten.reshape.default
        return self.call(target, (piece.source, size), made, f"{piece.part.source.name}_flat", like=piece.launch)

    def _launch(self, packed: Node) -> Node:
        bound, group = self.bound, self.bound[self.members[0].form.group]
        value: Tensor = ops.value_of(packed)
        total: Any = value.shape[0]
        size, args = {
            Kind.ALL_GATHER: (total * self.num_ranks, (self.num_ranks,)),
            Kind.REDUCE_SCATTER: (total // self.num_ranks, (bound.get("reduce_op"), self.num_ranks)),
            Kind.ALL_REDUCE: (total, (bound.get("reduce_op"),)),
            Kind.ALL_TO_ALL: (total, ([total // self.num_ranks] * self.num_ranks,) * 2),
            Kind.BROADCAST: (total, (bound.get("src"),)),
        }[self.kind]
        name = f"{self.launches[0].name}_bucket"
        return self.call(_op(self.kind.value), (packed, *args, group), self.new([size], value.dtype), name)

    def _launch_list(self) -> Node:
        bound, group = self.bound, self.bound[self.members[0].form.group]
        args = {
            Kind.ALL_GATHER: (self.num_ranks,),
            Kind.REDUCE_SCATTER: (bound.get("reduce_op"), self.num_ranks),
            Kind.ALL_REDUCE: (bound.get("reduce_op"),),
        }[self.kind]
        sources = [piece.source for piece in self.pieces]
        values = [self.received(piece) for piece in self.pieces]
        name = f"{self.launches[0].name}_bucket"
        return self.call(_op(f"{self.kind.value}_coalesced"), (sources, *args, group), values, name)

    # Receiving.

    def _item(self, launch: Node, number: int) -> Node:
        origin = self.pieces[number].launch
        return self.call(getitem, (launch, number), ops.value_of(launch)[number], f"{origin.name}_item", like=origin)

    def _wait(self, piece: Piece, item: Node) -> Node:
        return self.call(_op("wait"), (item,), ops.value_of(item), f"{piece.launch.name}_done", like=piece.launch)

    def _results(self, wait: Node) -> list[Node]:
        by_rows = self.kind in FROM_ROWS and self.num_ranks > 1
        source, total = wait, ops.value_of(wait).shape[0]
        if by_rows:
            value = self.view(wait, [self.num_ranks, total // self.num_ranks]) if self.is_static else None
            source = self.call(aten.view.default, (wait, [self.num_ranks, -1]), value, "rows")
        columns = self._slices(source) if self.by_bytes else self._split(source)
        return [self._shaped(piece, column, by_rows) for piece, column in zip(self.pieces, columns, strict=True)]

    def _split(self, source: Node) -> list[Node]:
        sizes = [self.columns(piece) for piece in self.pieces]
        values = None
        if self.is_static:
            widths: list[int] = sizes
            offsets = [0, *accumulate(widths)][:-1]
            value = ops.value_of(source)
            values = [
                fake_view(value, [*value.shape[:-1], width], value.stride(), offset)
                for width, offset in zip(widths, offsets, strict=True)
            ]
        dim = () if ops.value_of(source).dim() == 1 else (1,)
        parts = self.call(aten.split_with_sizes.default, (source, sizes, *dim), values, "columns")
        return [
            self.call(getitem, (parts, n), ops.value_of(parts)[n], f"{piece.launch.name}_part", like=piece.launch)
            for n, piece in enumerate(self.pieces)
        ]

    def _slices(self, source: Node) -> list[Node]:
        sizes = self.row_bytes()
        offsets, _ = row_layout(sizes, ALIGNMENT)
        value: FakeTensor = ops.value_of(source)
        found: list[Node] = []
        for piece, size, offset in zip(self.pieces, sizes, offsets, strict=True):
            shape, stride = [*value.shape[:-1], size], value.stride()
            part = fake_view(value, shape, stride, offset)
            name, dim = piece.launch.name, value.dim() - 1
            args = (source, dim, offset, offset + size)
            node = self.call(aten.slice.Tensor, args, part, f"{name}_bytes", like=piece.launch)
            dtype, width = piece.sent.dtype, piece.sent.dtype.itemsize
            shape = [*shape[:-1], size // width]
            stride = [*(step // width for step in stride[:-1]), 1]
            part = fake_view(value, shape, stride, offset // width, dtype)
            found.append(self.call(aten.view.dtype, (node, dtype), part, f"{name}_part", like=piece.launch))
        return found

    def _shaped(self, piece: Piece, column: Node, by_rows: bool) -> Node:
        """A result in its own shape: a view of the buffer, or a copy where it must own its memory."""
        name = piece.launch.name
        shape = self.shape(piece)
        value = self.received(piece)
        if by_rows:
            rows_stay = not self.is_static or value.shape[0] == self.num_ranks or ops.value_of(column).is_contiguous()
            if not rows_stay and value.numel():
                return self.call(aten.reshape.default, (column, shape), value, f"{name}_out", like=piece.launch)
            column = self._copy(column, piece)
            if self.is_static and ops.value_of(column).shape == value.shape:
                return column
            kept = self.view(column, list(value.shape)) if self.is_static else None
            return self.call(aten.view.default, (column, shape), kept, f"{name}_out", like=piece.launch)
        if value.dim() != 1:
            kept = self.view(column, list(value.shape)) if self.is_static else None
            column = self.call(aten.view.default, (column, shape), kept, f"{name}_view", like=piece.launch)
        return self._copy(column, piece, value) if piece.own else column

    def _copy(self, node: Node, piece: Piece, value: Any = None) -> Node:
        old: Tensor = ops.value_of(node)
        made = value if value is not None else (self.new(list(old.shape), old.dtype) if self.is_static else None)
        format_ = torch.contiguous_format
        name = f"{piece.launch.name}_copy"
        return self.call(aten.clone.default, (node,), made, name, like=piece.launch, memory_format=format_)

    def _heirs(self, piece: Piece, result: Node) -> dict[Node, Node]:
        """Who takes the place of a member's results and waits; what it wrote to is written to once more."""
        buffer = written_buffer(Collective(piece.launch), piece.part)
        if buffer is not None:
            value, name = ops.value_of(buffer), f"{piece.launch.name}_written"
            result = self.call(aten.copy_.default, (buffer, result), value, name, like=piece.launch)
        heirs: dict[Node, Node] = dict.fromkeys(piece.part.results, result)
        for wait in Collective(piece.launch).waits:
            waited: Any = wait.args[0]
            if waited in heirs:
                heirs[wait] = result
            elif self._is_view_of(waited, piece.part.results):
                heirs[wait] = waited
            self._inherit(wait, heirs)
        return heirs

    def _inherit(self, wait: Node, heirs: dict[Node, Node]) -> None:
        """Waits for what was waited for are not needed any more either."""
        stack = [wait] if wait in heirs else []
        while stack:
            node = stack.pop()
            for again in [user for user in node.users if ops.is_wait(user.target) and len(user.all_input_nodes) == 1]:
                heirs[again] = heirs[wait]
                self.edit.erase(again)
                stack.append(again)

    def _is_view_of(self, node: Any, results: Sequence[Node]) -> bool:
        while isinstance(node, Node) and node not in results:
            node = node.args[0] if node.args else None
        return isinstance(node, Node)

    # Ending.

    def _put(self, before: list[Node], after: list[Node]) -> None:
        action, nodes = self.action, self.nodes
        if action.launch_before is not None:
            carried = [nodes[name] for name in action.carried]
            self.edit.move_before([*carried, *before], nodes[action.launch_before])
        if action.wait_before is not None:
            self.edit.move_before(after, nodes[action.wait_before])

    def _erase(self) -> None:
        for member in self.members:
            for wait in member.waits:
                self.edit.erase(wait)
            for item in member.results:
                self.edit.erase(item)
            self.edit.erase(member.launch)
            form = member.form
            if form.written is not None and form.written != form.tensors:
                buffer: Any = ops.bind(member.launch)[form.written]
                if len(buffer.users) == 1:
                    self.edit.erase(buffer)
        for name in self.action.folded:
            self.edit.erase(self.nodes[name])


def _op(name: str) -> Any:
    return ops.op_names()[name]


def _whole(sources: Sequence[Node]) -> Node | None:
    """The tensor that these are the parts of, all of them and in order: then packing them is not needed."""
    origins = [_origin(source) for source in sources]
    parts = origins[0].args[0] if origins[0].target is getitem else None
    if not isinstance(parts, Node) or parts.target is not aten.split_with_sizes.default:
        return None
    source: Any = parts.args[0]
    value = ops.value_of(source)
    items = [(origin.target, origin.args) for origin in origins]
    if items != [(getitem, (parts, number)) for number in range(len(ops.value_of(parts)))]:
        return None
    return source if isinstance(value, Tensor) and value.dim() == 1 and value.is_contiguous() else None


def _origin(node: Node) -> Node:
    """The node that a chain of views of whole contiguous tensors begins with."""
    while node.target is aten.view.default:
        node = node.args[0]  # type: ignore[assignment]
    return node
