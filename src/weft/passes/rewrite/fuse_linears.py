"""Compute linear layers that share their input as one product.

Why: queries, keys and values, or gates and values, are products of one activation with several weights; one larger
product reads the activation once and is one kernel.

Before::

    q: f32[8, 4] = mm(x, wq)
    k: f32[8, 2] = mm(x, wk)

After::

    k_cat: f32[16, 6] = cat([wq, wk], 1)
    k_mm: f32[8, 6] = mm(x, k_cat)
    k_slice: f32[8, 4] = slice(k_mm, 1, 0, 4)
    k_slice_1: f32[8, 2] = slice(k_mm, 1, 4, 6)

Declines: weights that depend on each other's products; inputs or results that are written; readers that mind strides;
too few of them; where laying the weights side by side costs more than is saved, and without a cluster to say so.
Numerics: reassociates; another kernel may add in another order. Memory: a copy of the weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from weft.cost.device import Device
from weft.graph import ops
from weft.passes.base import Numerics
from weft.passes.batching import BatchPass, bytes_of, is_sized, own, product_ns
from weft.passes.draft import AnyNode, Draft, Refusal
from weft.planning.plan import Reason

MM = ops.op_of("mm")


@dataclass(frozen=True)
class FuseLinears(BatchPass):
    """Compute linear layers that share their input as one product."""

    numerics = Numerics.REASSOCIATES

    min_size: int = 2
    """Fewer layers than this are left alone."""

    num_kernels: ClassVar[int] = 2
    """How many kernels a batch takes: one to lay weights side by side, and one to compute."""

    def key(self, node: Node) -> Hashable | Refusal | None:
        if node.target is not MM:
            return None
        values = [ops.value_of(n) for n in node.all_input_nodes]
        if not is_sized(*values):
            return Refusal(Reason.UNKNOWN_SIZE, f"{node.name} stays: its sizes are no numbers")
        given = ops.bind(node)
        if given["self"] is given["mat2"]:
            return Refusal(Reason.ALONE, f"{node.name} stays: it is the product of a tensor with itself")
        return given["self"], values[-1].dtype, values[-1].device

    def together(self, draft: Draft, members: Sequence[Node]) -> list[AnyNode]:
        last = max(members, key=draft.position)
        given = [draft.bind(node) for node in members]
        weights = draft.call("cat", [g["mat2"] for g in given], 1, before=last)
        product = draft.call("mm", given[0]["self"], weights, before=last)
        parts: list[AnyNode] = []
        begin = 0
        for member in members:
            end = begin + draft.value(member).shape[1]
            part = draft.call("slice", product, 1, begin, end, before=last)
            parts.append(own(draft, part, member))
            begin = end
        return parts

    def times_ns(self, device: Device, members: Sequence[Node]) -> tuple[int | None, int | None]:
        shared, results = ops.value_of(members[0].all_input_nodes[0]), [ops.value_of(n) for n in members]
        weights = [ops.value_of(n.all_input_nodes[-1]) for n in members]
        flops = [2 * result.numel() * shared.shape[1] for result in results]
        each = [
            product_ns(device, work, bytes_of(shared, weight, result), result)
            for work, weight, result in zip(flops, weights, results, strict=True)
        ]
        moved = bytes_of(shared, *weights, *results)
        product = product_ns(device, sum(flops), moved, results[0])
        copies = device.traffic_ns(2 * bytes_of(*weights))
        known = [ns for ns in each if ns is not None]
        together = None if product is None or copies is None else product + copies
        return (sum(known) if len(known) == len(each) else None), together
