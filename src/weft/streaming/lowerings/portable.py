"""The portable lowering: a collective and its products in chunks, as plain nodes of the graph.

Contract: any backend can run the result, because it contains no custom kernel. The scheduler later orders the launches
and waits so that each chunk overlaps with the products of the others. Every rank gets the same nodes.

    gather    slices of the shard -> one launch each -> a wait and the products of each chunk -> joined results
    scatter   slices of the left operands -> the products of each chunk -> one launch each -> waits -> joined results
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from weft.compat import schema_of
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.edit import Edit
from weft.plan.decision import Refusal
from weft.streaming.chunking import ChunkDim, Chunking, Operand, chunk_of, replaced, still_needed, stride_of
from weft.streaming.layouts import Layout
from weft.streaming.lowerings.protocol import Name
from weft.streaming.view_layouts import sizes_of

aten = torch.ops.aten
SCALE = "scale_"
"""Prefix of the arguments that hold scales. The CUDA kernel requires row scales to be contiguous."""


class Portable:
    """Run the chunks as plain nodes."""

    @property
    def name(self) -> Name:
        return "portable"

    def fit(self, cut: Chunking) -> Chunking:
        """The whole site."""
        return cut

    def why_not(self, cut: Chunking, unshared: Refusal | None) -> None:
        """It can run any site that was split into chunks."""

    def build(self, edit: Edit, cut: Chunking) -> dict[Node, Node]:
        """Replace a site by its chunks."""
        return ChunkedGather(edit, cut).build() if cut.result is None else ChunkedScatter(edit, cut).build()


class ChunkBuilder:
    """Shared by gathers and scatters: makes the chunks of tensors, and joins tensors from their chunks."""

    def __init__(self, edit: Edit, chunking: Chunking) -> None:
        self.edit, self.chunking = edit, chunking
        self.collective = Collective(chunking.launch)
        self.launch = chunking.launch
        self.anchor: Node = self.launch
        """New nodes are inserted before this node."""
        self.made: dict[tuple[Node, int], Node] = {}
        """Chunks of bases, by base and number."""
        self.seen: dict[tuple[Node, int], Node] = {}
        """Chunks of views of bases, by view and number."""
        self.rows: dict[Node, Node] = {}
        """Whole tensors that are sliced, viewed with the split dim as outer, chunks, inner."""

    def call(self, target: Any, args: tuple[Any, ...], name: str, like: Node, **kwargs: Any) -> Node:
        """Create a node of the site. Slices of inputs and constants take their metadata from the launch."""
        origin = like if like.op == "call_function" else self.launch
        return self.edit.call(target, args, kwargs, before=self.anchor, name=name, like=[origin])

    def communicate(self, source: Node, c: int) -> Node:
        """The launch of one chunk."""
        bound = ops.bind(self.launch)
        args = [source if name == self.collective.form.tensors else value for name, value in bound.items()]
        return self.call(self.launch.target, tuple(args), f"{self.launch.name}_{c}", self.launch)

    def wait(self, launch: Node) -> Node:
        target, waits = ops.op_names()["wait"], self.collective.waits
        name = f"{launch.name}_done"
        return self.edit.call(target, (launch,), before=self.anchor, name=name, like=[self.launch], annotated=waits)

    def contiguous(self, node: Node) -> Node:
        value: Tensor = ops.value_of(node)
        if value.is_contiguous():
            return node
        return self.call(aten.clone.default, (node,), f"{node.name}_copy", node, memory_format=torch.contiguous_format)

    # Chunks.

    def chunk(self, base: Node, c: int) -> Node:
        """Chunk c of a base: computed if the base is a call of the site, otherwise sliced."""
        if (base, c) not in self.made:
            calls = self.chunking.calls
            made = self._computed(base, c) if base in calls else self.part(base, self.chunking.chunk_dims[base], c)
            self.made[base, c] = made
        return self.made[base, c]

    def _computed(self, node: Node, c: int) -> Node:
        operands = self.chunking.calls[node]
        parts = {name: self.operand(operand, c) for name, operand in operands.items()}
        given = ops.bind(node) | {
            name: self.contiguous(part) if name.startswith(SCALE) else part for name, part in parts.items()
        }
        schema = schema_of(node.target).arguments  # type: ignore[arg-type]
        args = [given[a.name] for a in schema if not a.kwarg_only]
        while args and len(args) > len(node.args) and schema[len(args) - 1].has_default_value():
            if args[-1] != schema[len(args) - 1].default_value:
                break
            args.pop()
        kwargs = {a.name: given[a.name] for a in schema if a.kwarg_only and a.name in node.kwargs}
        return self.call(node.target, tuple(args), f"{node.name}_{c}", node, **kwargs)

    def operand(self, operand: Operand, c: int) -> Node:
        """Chunk c of an argument of a call."""
        if operand.base is None or operand.layout is None:
            return self.part(operand.node, operand.chunk_dim, c)
        chunk_dim = self.chunking.chunk_dims[operand.base]
        stride = stride_of(chunk_dim, sizes_of(operand.base) or ())
        layout = chunk_of(operand.layout, stride, self.chunking.chunks)
        if (operand.node, c) not in self.seen:
            self.seen[operand.node, c] = self.viewed(self.chunk(operand.base, c), layout, operand.node)
        return self.seen[operand.node, c]

    def part(self, node: Node, chunk_dim: ChunkDim, c: int) -> Node:
        """Chunk c of a tensor that exists as a whole."""
        dim, outer, inner = chunk_dim
        name = f"{node.name}_{c}"
        if outer == 1:
            return self.call(aten.slice.Tensor, (node, dim, c * inner, (c + 1) * inner), name, node)
        shape = list(sizes_of(node) or ())
        rows = [*shape[:dim], outer, self.chunking.chunks, inner, *shape[dim + 1 :]]
        if node not in self.rows:
            self.rows[node] = self.call(aten.view.default, (node, rows), f"{node.name}_rows", node)
        picked = self.call(aten.select.int, (self.rows[node], dim + 1, c), f"{name}_rows", node)
        return self.call(aten.reshape.default, (picked, [*shape[:dim], outer * inner, *shape[dim + 1 :]]), name, node)

    def viewed(self, node: Node, layout: Layout, like: Node) -> Node:
        """The view of a tensor that a layout describes."""
        shape = list(layout.shape)
        digits = [digit for dim in layout.dims for digit in dim]
        order = sorted(range(len(digits)), key=lambda k: -digits[k].stride)
        name = f"{like.name}_part"
        if order == list(range(len(digits))):
            if list(sizes_of(node) or ()) == shape:
                return node
            return self.call(aten.reshape.default, (node, shape), name, like)
        sizes = [digits[k].size for k in order]
        if list(sizes_of(node) or ()) != sizes:
            node = self.call(aten.reshape.default, (node, sizes), f"{like.name}_digits", like)
        back = [order.index(k) for k in range(len(digits))]
        turned = self.call(aten.permute.default, (node, back), f"{like.name}_turned", like)
        if [digits[k].size for k in range(len(digits))] == shape:
            return turned
        return self.call(aten.reshape.default, (turned, shape), name, like)

    def joined(self, parts: Sequence[Node], chunk_dim: ChunkDim, like: Node) -> Node:
        """Join a tensor from its chunks."""
        dim, outer, inner = chunk_dim
        shape = list(sizes_of(parts[0]) or ())
        name = f"{like.name}_joined"
        if outer == 1:
            return self.call(aten.cat.default, (list(parts), *((dim,) if dim else ())), name, like)
        rows = [*shape[:dim], outer, inner, *shape[dim + 1 :]]
        seen = [self.call(aten.reshape.default, (part, rows), f"{part.name}_rows", like) for part in parts]
        whole = self.call(aten.cat.default, (seen, dim + 1), f"{like.name}_rows", like)
        shape[dim] *= self.chunking.chunks
        return self.call(aten.reshape.default, (whole, shape), name, like)


class ChunkedGather(ChunkBuilder):
    """Builds a gather in chunks."""

    def build(self) -> dict[Node, Node]:
        """Create the new nodes of the site and erase the old ones."""
        chunking = self.chunking
        gone = replaced(chunking)
        count = range(chunking.chunks)
        self.multiply()
        replacements = {
            product: self.joined([self.made[product, c] for c in count], chunking.chunk_dims[product], product)
            for product in chunking.products
        }
        if self.launch not in gone:
            self.anchor = self.first_use(gone)
            whole = self.joined(
                [self.made[self.launch, c] for c in count], chunking.chunk_dims[self.launch], self.launch
            )
            replacements |= dict.fromkeys([self.launch, *self.collective.waits], whole)
            gone |= {self.launch, *self.collective.waits}
        for node in gone:
            self.edit.erase(node)
        return replacements

    def multiply(self) -> None:
        """Launch all chunks, then wait for each one and multiply it."""
        chunking, source = self.chunking, self.collective.inputs[0]
        shard = ChunkDim(chunking.dim, 1, chunking.shape[chunking.dim] // chunking.chunks)
        slices = [self.contiguous(self.part(source, shard, c)) for c in range(chunking.chunks)]
        launches = [self.communicate(part, c) for c, part in enumerate(slices)]
        self.anchor = chunking.products[-1]
        for c, launch in enumerate(launches):
            self.made[self.launch, c] = self.wait(launch)
            for product in chunking.products:
                self.chunk(product, c)

    def first_use(self, gone: set[Node]) -> Node:
        """The first other user of the gathered tensor; the chunks are joined before it."""
        users = {
            user
            for node in (self.launch, *self.collective.waits)
            for user in node.users
            if user not in gone and user not in self.collective.waits
        }
        return next(node for node in self.edit.graph.nodes if node in users)


class ChunkedScatter(ChunkBuilder):
    """Builds a scatter in chunks."""

    def build(self) -> dict[Node, Node]:
        """Create the new nodes of the site and erase the old ones."""
        chunking = self.chunking
        result = chunking.result
        if result is None:
            return {}
        gone = replaced(chunking)
        receive = self.multiply(result)
        replacements: dict[Node, Node] = {}
        for node in still_needed(chunking, gone):
            parts = [self.made[node, c] for c in range(chunking.chunks)]
            replacements[node] = self.joined(parts, chunking.chunk_dims[node], node)
        self.anchor = self._first_wait()
        whole = receive()
        replacements |= dict.fromkeys([self.launch, *self.collective.waits], whole)
        for node in gone:
            self.edit.erase(node)
        return replacements

    def multiply(self, result: Operand) -> Callable[[], Node]:
        """Multiply and send each chunk. Returns a function that creates the waits and the joined result."""
        sent: list[Node] = []
        for c in range(self.chunking.chunks):
            part = self.contiguous(self.operand(result, c))
            sent.append(self._scattered(part, c) if self.chunking.decomposed_over else self.communicate(part, c))
            if self.chunking.decomposed_over and c:
                sent[c - 1] = self._gathered(sent[c - 1], c - 1)
        if self.chunking.decomposed_over:
            sent[-1] = self._gathered(sent[-1], self.chunking.chunks - 1)
        return lambda: self.joined([self.wait(one) for one in sent], ChunkDim(self.chunking.dim, 1, 0), self.launch)

    def _scattered(self, part: Node, c: int) -> Node:
        """Launch the reduce-scatter of one chunk of an all-reduce."""
        group = ops.bind(self.launch)[self.collective.form.group]
        args = (part, self.collective.reduce_op, self.chunking.decomposed_over, group)
        return self.call(ops.op_names()["reduce_scatter"], args, f"{self.launch.name}_{c}_scattered", self.launch)

    def _gathered(self, scattered: Node, c: int) -> Node:
        """Launch the all-gather of one chunk of an all-reduce, after the wait for its reduce-scatter."""
        group = ops.bind(self.launch)[self.collective.form.group]
        args = (self.wait(scattered), self.chunking.decomposed_over, group)
        return self.call(ops.op_names()["all_gather"], args, f"{self.launch.name}_{c}", self.launch)

    def _first_wait(self) -> Node:
        waits = set(self.collective.waits)
        last = next(iter(reversed(self.edit.graph.nodes)))
        return next((node for node in self.edit.graph.nodes if node in waits), last)
