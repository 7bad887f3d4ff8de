"""Build: replace the members of a bucket by one launch, one wait, and the nodes that pack and unpack them.

Contract: every member receives the value that it received before. The layout of the bucket does not depend on the
rank, so all ranks build the same graph. Fake values are computed in closed form; only graphs with symbolic sizes run
torch's fake kernels.

    concat      flat views of the members -> cat -> one launch -> wait -> split -> views or copies
    coalesced   one launch of the operator for lists of tensors -> one item and one wait for each member
    pack        `weft::pack` into bytes -> one launch -> wait -> slices, viewed as their dtypes -> views or copies

A reduce-scatter or an all-to-all sends one row of the buffer to each rank, so each row holds a part of every member.
An all-gather or an all-to-all receives one row from each rank, so the result is split by columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import floordiv, getitem, mul
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from weft.bucketing.eligibility import BY_ROWS, FROM_ROWS, MOVES_DATA, Payload, payloads_of, written_buffer
from weft.bucketing.pack import ALIGNMENT, PACK, row_layout
from weft.compat import FakeTensor, fake_tensor, fake_view
from weft.errors import PlanError, compose
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.edit import Edit
from weft.graph.metadata import contiguous_strides
from weft.graph.ops import Kind
from weft.plan.plan import Merge

aten = torch.ops.aten


def merge(edit: Edit, nodes: Mapping[str, Node], action: Merge) -> dict[Node, Node]:
    """Build one bucket and erase its members. Returns the replacement of each old result and wait."""
    return _BucketBuilder(edit, nodes, action).build()


@dataclass(frozen=True)
class PackedTensor:
    """One tensor of the bucket."""

    launch: Node
    payload: Payload
    source: Node
    """The packed tensor: the one that is sent, or its value before the folded casts and scalings."""
    sent: Tensor
    """Fake value of the tensor that is sent."""
    owns_memory: bool
    """Whether the result is a copy instead of a view of the buffer."""


class _BucketBuilder:
    """The nodes of one bucket, made in three steps: pack and launch, wait and unpack, erase the members."""

    def __init__(self, edit: Edit, nodes: Mapping[str, Node], action: Merge) -> None:
        self.edit, self.nodes, self.action = edit, nodes, action
        for name in action.launches:
            if ops.launch_form(nodes[name].target) is None:
                raise PlanError(compose("plan", f"the plan merges {name}, which is not a launch that Weft knows"))
        self.members = [Collective(nodes[name]) for name in action.launches]
        self.launches = [member.launch for member in self.members]
        self.waits = {member.launch: member.waits for member in self.members}
        self.kind, self.anchor = self.members[0].kind, self.launches[-1]
        self.bound = ops.bind(self.launches[0])
        self.folded = frozenset(action.folded)
        self.made: list[Node] = []
        self.is_received = False
        """Whether the nodes being created are the wait or depend on it."""
        self.tensors: list[PackedTensor] = []
        for member in self.members:
            for payload in payloads_of(member):
                sent, owns_memory = payload.source, len(self.tensors) in action.owned
                packed = PackedTensor(member.launch, payload, self._unfolded(sent), ops.value_of(sent), owns_memory)
                self.tensors.append(packed)
        ranks = self.bound.get("group_size", 1)
        self.num_ranks: int = len(self.bound["input_split_sizes"]) if self.kind is Kind.ALL_TO_ALL else ranks
        self.num_rows = self.num_ranks if self.kind in BY_ROWS else 1
        self.by_bytes = action.strategy == "pack" and self.kind in MOVES_DATA
        self.is_static = all(type(n) is int for tensor in self.tensors for n in tensor.sent.shape)

    def build(self) -> dict[Node, Node]:
        if self.action.keeps_waits:
            return self._build_around_waits()
        if self.action.strategy == "coalesced":
            launch = self._launch_list()
            items = [self._item(launch, number) for number in range(len(self.tensors))]
            self.is_received = True
            before = list(self.made)  # items too: the list keeps every tensor alive until the last item is taken
            results = [self._wait(*each) for each in zip(self.tensors, items, strict=True)]
        else:
            packed = self._pack() if self.action.strategy == "pack" else self._concatenate()
            launch = self._launch(packed)
            self.is_received = True
            before = list(self.made)
            wait = self.call(_op("wait"), (launch,), ops.value_of(launch), f"{self.launches[0].name}_done")
            results = self._results(wait)
        replacements: dict[Node, Node] = {}
        for tensor, result in zip(self.tensors, results, strict=True):
            replacements |= self._replacements(tensor, result)
        self._put(before, self.made[len(before) :])
        self._erase()
        return replacements

    def _build_around_waits(self) -> dict[Node, Node]:
        """One launch of a list of tensors. Each wait keeps its place and waits for its item."""
        launch = self._launch_list()
        replacements = {tensor.launch: self._item(launch, number) for number, tensor in enumerate(self.tensors)}
        for member in self.members:
            self.edit.erase(member.launch)
        return replacements

    # Sending.

    def _concatenate(self) -> Node:
        dtype = ops.value_of(self.tensors[0].source).dtype
        whole = _whole([tensor.source for tensor in self.tensors]) if self.num_rows == 1 else None
        columns = self.total_columns()
        size = [columns] if self.num_rows == 1 else [self.num_rows, columns]
        dim = () if self.num_rows == 1 else (1,)
        packed = whole
        if packed is None:
            flats = [self._flat(tensor) for tensor in self.tensors]
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
        dtypes = [tensor.sent.dtype for tensor in self.tensors]
        alignment = ALIGNMENT if self.by_bytes else dtypes[0].itemsize
        _, row_bytes = row_layout(self.row_bytes(), alignment)
        sources = [tensor.source for tensor in self.tensors]
        value = self.new([self.num_rows * row_bytes], torch.uint8)
        packed = self.call(PACK, (sources, dtypes, self.num_rows, alignment), value, "packed")
        if self.by_bytes:
            return packed
        size = [self.num_rows * row_bytes // dtypes[0].itemsize]
        value = fake_view(ops.value_of(packed), size, [1], 0, dtypes[0])
        return self.call(aten.view.dtype, (packed, dtypes[0]), value, "packed_typed")

    def _flat(self, tensor: PackedTensor) -> Node:
        """A tensor as one row, or as one row per destination rank."""
        value: Tensor = ops.value_of(tensor.source)
        contiguous = value.is_contiguous()
        if contiguous and value.dim() == (1 if self.num_rows == 1 else 2) and self.num_rows in (1, value.shape[0]):
            return tensor.source
        size = [-1] if self.num_rows == 1 else [self.num_rows, -1]
        made: Any = None
        if self.is_static and contiguous and isinstance(value, FakeTensor):
            numel = value.numel()
            shape = [numel] if self.num_rows == 1 else [self.num_rows, numel // self.num_rows]
            made, size = self.view(tensor.source, shape), shape
        target = aten.view.default if contiguous else aten.reshape.default
        return self.call(target, (tensor.source, size), made, f"{tensor.payload.source.name}_flat", like=tensor.launch)

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
        sources = [tensor.source for tensor in self.tensors]
        values = [self.received(tensor) for tensor in self.tensors]
        name = f"{self.launches[0].name}_bucket"
        return self.call(_op(f"{self.kind.value}_coalesced"), (sources, *args, group), values, name)

    # Receiving.

    def _item(self, launch: Node, number: int) -> Node:
        origin = self.tensors[number].launch
        return self.call(getitem, (launch, number), ops.value_of(launch)[number], f"{origin.name}_item", like=origin)

    def _wait(self, tensor: PackedTensor, item: Node) -> Node:
        return self.call(_op("wait"), (item,), ops.value_of(item), f"{tensor.launch.name}_done", like=tensor.launch)

    def _results(self, wait: Node) -> list[Node]:
        by_rows = self.kind in FROM_ROWS and self.num_ranks > 1
        source, total = wait, ops.value_of(wait).shape[0]
        if by_rows:
            value = self.view(wait, [self.num_ranks, total // self.num_ranks]) if self.is_static else None
            source = self.call(aten.view.default, (wait, [self.num_ranks, -1]), value, "rows")
        columns = self._slices(source) if self.by_bytes else self._split(source)
        return [self._shaped(tensor, column, by_rows) for tensor, column in zip(self.tensors, columns, strict=True)]

    def _split(self, source: Node) -> list[Node]:
        sizes = [self.columns(tensor) for tensor in self.tensors]
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
            self.call(getitem, (parts, n), ops.value_of(parts)[n], f"{tensor.launch.name}_part", like=tensor.launch)
            for n, tensor in enumerate(self.tensors)
        ]

    def _slices(self, source: Node) -> list[Node]:
        sizes = self.row_bytes()
        offsets, _ = row_layout(sizes, ALIGNMENT)
        value: FakeTensor = ops.value_of(source)
        found: list[Node] = []
        for tensor, size, offset in zip(self.tensors, sizes, offsets, strict=True):
            shape, stride = [*value.shape[:-1], size], value.stride()
            part = fake_view(value, shape, stride, offset)
            name, dim = tensor.launch.name, value.dim() - 1
            args = (source, dim, offset, offset + size)
            node = self.call(aten.slice.Tensor, args, part, f"{name}_bytes", like=tensor.launch)
            dtype, width = tensor.sent.dtype, tensor.sent.dtype.itemsize
            shape = [*shape[:-1], size // width]
            stride = [*(step // width for step in stride[:-1]), 1]
            part = fake_view(value, shape, stride, offset // width, dtype)
            found.append(self.call(aten.view.dtype, (node, dtype), part, f"{name}_part", like=tensor.launch))
        return found

    def _shaped(self, tensor: PackedTensor, column: Node, by_rows: bool) -> Node:
        """A result in the shape of its member: a view of the buffer, or a copy if it must own its memory."""
        name = tensor.launch.name
        shape = self.shape(tensor)
        value = self.received(tensor)
        if by_rows:
            rows_stay = not self.is_static or value.shape[0] == self.num_ranks or ops.value_of(column).is_contiguous()
            if not rows_stay and value.numel():
                return self.call(aten.reshape.default, (column, shape), value, f"{name}_out", like=tensor.launch)
            column = self._copy(column, tensor)
            if self.is_static and ops.value_of(column).shape == value.shape:
                return column
            kept = self.view(column, list(value.shape)) if self.is_static else None
            return self.call(aten.view.default, (column, shape), kept, f"{name}_out", like=tensor.launch)
        if value.dim() != 1:
            kept = self.view(column, list(value.shape)) if self.is_static else None
            column = self.call(aten.view.default, (column, shape), kept, f"{name}_view", like=tensor.launch)
        return self._copy(column, tensor, value) if tensor.owns_memory else column

    def _copy(self, node: Node, tensor: PackedTensor, value: Any = None) -> Node:
        old: Tensor = ops.value_of(node)
        made = value if value is not None else (self.new(list(old.shape), old.dtype) if self.is_static else None)
        format_ = torch.contiguous_format
        name = f"{tensor.launch.name}_copy"
        return self.call(aten.clone.default, (node,), made, name, like=tensor.launch, memory_format=format_)

    def _replacements(self, tensor: PackedTensor, result: Node) -> dict[Node, Node]:
        """The replacements of a member's results and waits. A buffer that the member wrote to gets a copy."""
        buffer = written_buffer(Collective(tensor.launch), tensor.payload)
        if buffer is not None:
            value, name = ops.value_of(buffer), f"{tensor.launch.name}_written"
            result = self.call(aten.copy_.default, (buffer, result), value, name, like=tensor.launch)
        replacements: dict[Node, Node] = dict.fromkeys(tensor.payload.results, result)
        for wait in Collective(tensor.launch).waits:
            waited: Any = wait.args[0]
            if waited in replacements:
                replacements[wait] = result
            elif self._is_view_of(waited, tensor.payload.results):
                replacements[wait] = waited
            self._replace_later_waits(wait, replacements)
        return replacements

    def _replace_later_waits(self, wait: Node, replacements: dict[Node, Node]) -> None:
        """Erase repeated waits: waits whose argument is itself the result of a wait that was replaced."""
        stack = [wait] if wait in replacements else []
        while stack:
            node = stack.pop()
            for again in [user for user in node.users if ops.is_wait(user.target) and len(user.all_input_nodes) == 1]:
                replacements[again] = replacements[wait]
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

    # Nodes, sizes and fake values.

    def call(
        self, target: Any, args: tuple[Any, ...], value: Any, name: str, like: Node | None = None, **kwargs: Any
    ) -> Node:
        """Create a node of the bucket, with the metadata of one member (`like`) or of all.

        From the wait on, nodes carry the annotations of the members' waits; before it, those of the folded nodes.
        """
        origin = self.launches if like is None else [like]
        if self.is_received:
            annotated = [wait for launch in origin for wait in self.waits[launch]]
        else:
            annotated = [] if like is not None else [*origin, *(self.nodes[name] for name in self.action.folded)]
        made = self.edit.call(
            target, args, kwargs, before=self.anchor, name=name, like=origin, annotated=annotated, value=value
        )
        self.made.append(made)
        return made

    def _unfolded(self, node: Node) -> Node:
        while node.name in self.folded:
            node = node.args[0]  # type: ignore[assignment]
        return node

    def folded_steps(self) -> list[Node]:
        """The casts and scalings applied after packing, the last one first. All tensors have the same ones."""
        steps: list[Node] = []
        node: Any = self.tensors[0].payload.source
        while node.name in self.folded:
            steps.append(node)
            node = node.args[0]
        return steps

    def new(self, size: list[Any], dtype: torch.dtype) -> Any:
        """The fake value of a new tensor; None if a size is symbolic, and torch has to compute it."""
        if not self.is_static:
            return None
        return fake_tensor(self.edit.mode, size, contiguous_strides(size), dtype, self.tensors[0].sent.device)

    def view(self, node: Node, size: list[int]) -> FakeTensor:
        """The fake value of a contiguous tensor viewed with another shape."""
        value: FakeTensor = ops.value_of(node)
        return fake_view(value, size, contiguous_strides(size), int(value.storage_offset()))

    def received(self, tensor: PackedTensor) -> Any:
        """The fake value of a result. The value of its wait is reused, so values derived from it stay valid."""
        sizes: list[Any] = list(tensor.sent.shape)
        if self.kind is Kind.ALL_GATHER:
            sizes[0] = sizes[0] * self.num_ranks
        elif self.kind is Kind.REDUCE_SCATTER:
            sizes[0] = sizes[0] // self.num_ranks
        waits = [user for result in tensor.payload.results for user in result.users if ops.is_wait(user.target)]
        value = ops.value_of(waits[0]) if waits and Collective(tensor.launch).is_functional else None
        if isinstance(value, Tensor):
            return value
        return fake_tensor(self.edit.mode, sizes, contiguous_strides(sizes), tensor.sent.dtype, tensor.sent.device)

    def shape(self, tensor: PackedTensor) -> list[Any]:
        """The shape of a result, with a node for each symbolic size."""
        sizes: list[Any] = [self._size(tensor, dim) for dim in range(tensor.sent.dim())]
        if self.kind is Kind.ALL_GATHER:
            sizes[0] = self._number(mul, sizes[0], self.num_ranks)
        elif self.kind is Kind.REDUCE_SCATTER:
            sizes[0] = self._number(floordiv, sizes[0], self.num_ranks)
        return sizes

    def _size(self, tensor: PackedTensor, dim: int) -> Any:
        size = tensor.sent.shape[dim]
        if type(size) is int:
            return size
        name = f"{tensor.launch.name}_size"
        return self.call(aten.sym_size.int, (tensor.source, dim), size, name, like=tensor.launch)

    def _number(self, function: Any, value: Any, by: int) -> Any:
        if not isinstance(value, Node):
            return function(value, by)
        return self.call(function, (value, by), function(ops.value_of(value), by), "size")

    def columns(self, tensor: PackedTensor) -> Any:
        """Number of elements of a tensor in one row of the received buffer."""
        divisor = 1 if self.kind not in BY_ROWS else self.num_ranks
        if self.is_static:
            return tensor.sent.numel() // divisor
        numel: Any = tensor.sent.numel()
        if type(numel) is not int:
            numel = self.call(aten.sym_numel.default, (tensor.source,), numel, "numel", like=tensor.launch)
        return self._number(floordiv, numel, divisor) if divisor > 1 else numel

    def total_columns(self) -> int:
        return sum(tensor.sent.numel() // self.num_rows for tensor in self.tensors) if self.is_static else 0

    def row_bytes(self) -> list[int]:
        divisor = self.num_ranks if self.kind in BY_ROWS else 1
        return [prod(p.sent.shape) // divisor * p.sent.dtype.itemsize for p in self.tensors]


def _op(name: str) -> Any:
    return ops.op_names()[name]


def _whole(sources: Sequence[Node]) -> Node | None:
    """The flat tensor that these are all the parts of, in order; it can be sent without packing."""
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
    """The first node of a chain of views of whole contiguous tensors."""
    while node.target is aten.view.default:
        node = node.args[0]  # type: ignore[assignment]
    return node
