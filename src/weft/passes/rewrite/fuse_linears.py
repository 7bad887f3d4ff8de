"""Fuse linear layers that share their input into one matmul.

Why: queries, keys and values multiply one activation by several weights. One larger matmul reads the activation once
and is one kernel.

Before::

    q: f32[8, 4] = mm(x, wq)
    k: f32[8, 2] = mm(x, wk)

After::

    k_cat: f32[16, 6] = cat([wq, wk], 1)
    k_mm: f32[8, 6] = mm(x, k_cat)
    k_slice: f32[8, 4] = slice(k_mm, 1, 0, 4)
    k_slice_1: f32[8, 2] = slice(k_mm, 1, 4, 6)

The biases of addmm are concatenated too, and expanded first where they have fewer rows or columns.

Declines: weights that depend on another member's product; inputs or results that are written; users that depend on the
strides of a result; an alpha or beta other than 1; a layer without a bias next to layers with one, and the reverse;
fewer layers than `min-size`; fusions that would not save time, and any fusion without a cluster to predict times on.
Numerics: reassociates; another kernel may sum in another order. Memory: one copy of the weights and biases.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from weft.cost.device import Device
from weft.graph import ops
from weft.passes.base import Numerics
from weft.passes.batch_pass import BatchPass, bytes_of, is_sized, product_ns, with_own_memory
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.plan.plan import Step
from weft.rewriting.draft import AnyNode, Draft

MM, ADDMM = ops.op_of("mm"), ops.op_of("addmm")


@dataclass(frozen=True)
class FuseLinears(BatchPass):
    """Fuse linear layers that share their input into one matmul."""

    numerics = Numerics.REASSOCIATES

    min_size: int = 2
    """Minimum number of layers to fuse."""

    def plan_one(self, graph: Graph, context: Context) -> Step:
        step = super().plan_one(graph, context)
        explained = {name for decision in step.decisions for name in decision.nodes}
        by_input: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            if node.target in (MM, ADDMM) and not isinstance(self.key(node), Refusal):
                by_input.setdefault(_layer(node.target, ops.bind(node))[0], []).append(node)
        mixed = [
            self.decision(Reason.UNSUPPORTED_FORM, f"{node.name} stays: {_why_alone(node, shared)}", node.name)
            for shared, nodes in by_input.items()
            for node in nodes
            if len(nodes) > 1 and node.name not in explained
        ]
        return self.step(step.actions, (*step.decisions, *mixed))

    def key(self, node: Node) -> Hashable | Refusal | None:
        if node.target not in (MM, ADDMM):
            return None
        given = ops.bind(node)
        layer = _layer(node.target, given)
        values = [ops.value_of(n) for n in layer if n is not None]
        if not is_sized(*values):
            return Refusal(Reason.UNKNOWN_SIZE, f"{node.name} stays: its sizes are not known")
        if (given.get("alpha", 1), given.get("beta", 1)) != (1, 1):
            return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: its alpha or beta is not 1")
        shared, weight, bias = layer
        if shared is weight:
            return Refusal(Reason.ALONE, f"{node.name} stays: it multiplies a tensor by itself")
        added = ops.value_of(bias) if bias is not None else None
        return shared, values[1].dtype, values[1].device, None if added is None else added.dtype

    def build(self, draft: Draft, members: Sequence[Node]) -> list[AnyNode]:
        last = max(members, key=draft.position)
        layers = [_layer(node.target, draft.bind(node)) for node in members]
        columns = [draft.value(member).shape[1] for member in members]
        weights = draft.call("cat", [weight for _, weight, _ in layers], 1, before=last)
        if last.target is MM:
            product = draft.call("mm", layers[0][0], weights, before=last)
        else:
            rows = sorted({tuple(draft.value(bias).shape[:-1]) for _, _, bias in layers})[-1]
            biases = [_widened(draft, bias, [*rows, n], last) for (_, _, bias), n in zip(layers, columns, strict=True)]
            bias = draft.call("cat", biases, len(rows), before=last)
            product = draft.call("addmm", bias, layers[0][0], weights, before=last)
        parts: list[AnyNode] = []
        begin = 0
        for member, n in zip(members, columns, strict=True):
            part = draft.call("slice", product, 1, begin, begin + n, before=last)
            parts.append(with_own_memory(draft, part, member))
            begin += n
        return parts

    def num_kernels(self, members: Sequence[Node]) -> int:
        return 2 if members[0].target is MM else 3

    def times_ns(self, device: Device, members: Sequence[Node]) -> tuple[int | None, int | None]:
        layers = [[ops.value_of(n) for n in _layer(m.target, ops.bind(m)) if n is not None] for m in members]
        shared, results = layers[0][0], [ops.value_of(n) for n in members]
        flops = [2 * result.numel() * shared.shape[1] for result in results]
        each = [
            product_ns(device, work, bytes_of(*layer, result), result)
            for work, layer, result in zip(flops, layers, results, strict=True)
        ]
        weight_bytes = sum(bytes_of(*layer[1:]) for layer in layers)
        product = product_ns(device, sum(flops), bytes_of(shared, *results) + weight_bytes, results[0])
        copies = device.traffic_ns(2 * weight_bytes)
        known = [ns for ns in each if ns is not None]
        fused = None if product is None or copies is None else product + copies
        return (sum(known) if len(known) == len(each) else None), fused


def _layer(target: Any, given: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The input, the weight and the bias of a layer."""
    return (given["self"], given["mat2"], None) if target is MM else (given["mat1"], given["mat2"], given["self"])


def _why_alone(node: Node, shared: Node) -> str:
    """Why no other product of the same input has the key of this one."""
    if node.target is MM:
        return f"it has no bias, and the other products of {shared.name} have one"
    return f"the other products of {shared.name} have no bias, or one of another dtype"


def _widened(draft: Draft, bias: AnyNode, shape: list[int], before: Node) -> AnyNode:
    """A bias expanded to all columns, and to all rows if another bias has rows."""
    return bias if list(draft.value(bias).shape) == shape else draft.call("expand", bias, shape, before=before)
