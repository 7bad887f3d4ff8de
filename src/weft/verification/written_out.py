"""Write symmetric-memory operators out: as the collectives, products and views that they compute.

The operators have kernels for CUDA only. Proofs, virtual ranks and gloo ranks see the written-out graph instead.

    fused_all_gather_matmul(shard, [right, ...], dim, group)        all-gather, wait, join along dim, products
    fused_matmul_reduce_scatter(left, right, op, dim, group)        product, split along dim, reduce-scatter, wait
    copy_all_gather(shard, group), _low_contention_all_gather       all-gather

Contract: the module does not change. The operators' meaning is torch's own (`torch.distributed._symmetric_memory`, the
functions that end in `_fallback`), not what a rewrite wanted to express.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node

from weft.graph import ops
from weft.graph.edit import Edit, copy_module, recompile
from weft.graph.groups import GroupTable

aten = torch.ops.aten


def written_out(module: GraphModule, groups: GroupTable) -> GraphModule:
    """A copy of a module without symmetric-memory operators; the module itself if it has none."""
    if not any(_short_name(node) in _WRITERS for node in module.graph.nodes):
        return module
    made = copy_module(module)
    with Edit(made.graph) as edit:
        for node in [node for node in made.graph.nodes if _short_name(node) in _WRITERS]:
            _WRITERS[_short_name(node)](_OperatorWriter(edit, node, groups.group(ops.bind(node)["group_name"]).size))
    recompile(made)
    return made


def each_written_out(modules: Sequence[GraphModule], groups: Sequence[GroupTable]) -> list[GraphModule]:
    """The modules of all ranks without symmetric-memory operators; ranks that share a module still do."""
    made: dict[int, GraphModule] = {}
    for module, table in zip(modules, groups, strict=True):
        if id(module) not in made:
            made[id(module)] = written_out(module, table)
    return [made[id(module)] for module in modules]


def _short_name(node: Node) -> str:
    namespace, _, name = ops.qualified_name(node.target).partition("::")
    return name if namespace in ("symm_mem", "weft") else ""


class _OperatorWriter:
    """Creates the nodes that replace one operator."""

    def __init__(self, edit: Edit, node: Node, num_ranks: int) -> None:
        self.edit, self.node, self.num_ranks = edit, node, num_ranks
        self.bound = ops.bind(node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.edit.call(target, args, kwargs, before=self.node, like=[self.node])

    def gathered(self, shard: Node, dim: int) -> Node:
        """The tensor gathered along a dim."""
        contiguous = self.call(aten.clone.default, shard, memory_format=torch.contiguous_format)
        launch = self.call(ops.op_names()["all_gather"], contiguous, self.num_ranks, self.bound["group_name"])
        whole = self.call(ops.op_names()["wait"], launch)
        return self.joined(self.call(aten.chunk.default, whole, self.num_ranks), dim) if dim else whole

    def joined(self, parts: Node, dim: int) -> Node:
        items = [self.call(getitem, parts, k) for k in range(self.num_ranks)]
        return self.call(aten.cat.default, items, dim)

    def scattered(self, product: Node, dim: int) -> Node:
        """This rank's part of the sum of a product over ranks."""
        rows = self.joined(self.call(aten.chunk.default, product, self.num_ranks, dim), 0)
        group, reduce_op = self.bound["group_name"], self.bound["reduce_op"]
        launch = self.call(ops.op_names()["reduce_scatter"], rows, reduce_op, self.num_ranks, group)
        return self.call(ops.op_names()["wait"], launch)

    def product(self, left: Node, right: Node) -> Node:
        """A product with the leading dims of its left operand."""
        *leading, terms = ops.value_of(left).shape
        flat = left if len(leading) == 1 else self.call(aten.reshape.default, left, [-1, terms])
        made = self.call(aten.mm.default, flat, right)
        if len(leading) == 1:
            return made
        return self.call(aten.reshape.default, made, [*leading, ops.value_of(made).shape[-1]])

    def scaled(self, left: Node, right: Node, scale: Node, *rest: Any) -> Node:
        """An fp8 product with the leading dims of its left operand."""
        *leading, terms = ops.value_of(left).shape
        flat = self.call(aten.reshape.default, left, [-1, terms])
        if ops.value_of(scale).numel() > 1:
            scale = self.call(aten.reshape.default, scale, [-1, 1])
        product = self.call(aten._scaled_mm.default, flat, right, scale, *rest)
        return self.call(aten.reshape.default, product, [*leading, ops.value_of(product).shape[-1]])

    def replace(self, whole: Node, products: list[Node]) -> None:
        """Replace the items of the operator's result: the gathered tensor, and the list of products."""
        found: dict[Node, Node] = {}
        lists = [user for user in self.node.users if user.args[1] == 1]
        for user in self.node.users:
            found |= {user: whole} if user not in lists else {item: products[item.args[1]] for item in user.users}  # type: ignore[index]
        self.edit.replace_each(found)
        for gone in (*found, *lists, self.node):
            self.edit.erase(gone)

    def become(self, made: Node) -> None:
        self.edit.replace_each({self.node: made})
        self.edit.erase(self.node)


def _gather(writer: _OperatorWriter) -> None:
    bound = writer.bound
    whole = writer.gathered(bound["A"], bound["gather_dim"])
    writer.replace(whole, [writer.product(whole, right) for right in bound["Bs"]])


def _gather_scaled(writer: _OperatorWriter) -> None:
    bound, dim = writer.bound, writer.bound["gather_dim"]
    dtype = ops.value_of(bound["A"]).dtype
    sent = writer.call(aten.view.dtype, bound["A"], torch.uint8)  # gloo has no fp8
    whole = writer.call(aten.view.dtype, writer.gathered(sent, dim), dtype)
    scale, shape = bound["A_scale"], ops.value_of(bound["A"]).shape
    if ops.value_of(scale).numel() > 1 and ops.value_of(scale).shape[:-1] == shape[:-1]:
        scale = writer.gathered(scale, dim)
    names = ("Bs", "B_scales", "biases", "result_scales", "out_dtypes", "use_fast_accum")
    products = [
        writer.scaled(whole, right, scale, *rest) for right, *rest in zip(*(bound[name] for name in names), strict=True)
    ]
    writer.replace(whole, products)


def _scatter(writer: _OperatorWriter) -> None:
    bound = writer.bound
    writer.become(writer.scattered(writer.product(bound["A"], bound["B"]), bound["scatter_dim"]))


def _scatter_scaled(writer: _OperatorWriter) -> None:
    bound = writer.bound
    names = ("B_scale", "bias", "result_scale", "out_dtype", "use_fast_accum")
    product = writer.scaled(bound["A"], bound["B"], bound["A_scale"], *(bound[name] for name in names))
    shaped = writer.call(aten.reshape.default, product, bound["output_shape"])
    writer.become(writer.scattered(shaped, bound["orig_scatter_dim"]))


def _copied_gather(writer: _OperatorWriter) -> None:
    args = (writer.bound["tensor"], writer.num_ranks, writer.bound["group_name"])
    writer.become(writer.call(ops.op_names()["all_gather"], *args))


def _copied_scatter(writer: _OperatorWriter) -> None:
    args = (writer.bound["tensor"], writer.bound["reduce_op"], writer.num_ranks, writer.bound["group_name"])
    writer.become(writer.call(ops.op_names()["reduce_scatter"], *args))


_WRITERS = {
    "fused_all_gather_matmul": _gather,
    "fused_all_gather_scaled_matmul": _gather_scaled,
    "fused_matmul_reduce_scatter": _scatter,
    "fused_scaled_matmul_reduce_scatter": _scatter_scaled,
    "copy_all_gather": _copied_gather,
    "copy_reduce_scatter": _copied_scatter,
    "_low_contention_all_gather": _copied_gather,
    "_low_contention_reduce_scatter": _copied_scatter,
}
