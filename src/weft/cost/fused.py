"""The time of operators that multiply while they gather or scatter through symmetric memory.

A gather of n ranks multiplies its own shard while it copies the next one from a peer: n products and n - 1 copies, of
which the longer one counts in each step but the first. A scatter multiplies the part of one peer while it sends that of
another, and then sums n parts. Products beside a copy slow by the share that the cluster states. Both begin with a
barrier between the ranks, and both first copy their left operand: a gather into the memory that peers read; a scatter
so that the rows of each rank lie together, unless they already do.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from weft.cost.access import REORDERED_BYTES, relative_rate
from weft.cost.device import Device
from weft.cost.kernels import ProductShape
from weft.cost.levels import Transport
from weft.graph import ops
from weft.graph.collective import num_bytes

DIMS = ("gather_dim", "scatter_dim", "scatter_dim_after_maybe_reshape")
"""The argument that names the dim of the ranks, by operator."""


@dataclass(frozen=True)
class FusedShape:
    """The sizes of one fused operator."""

    scatters: bool
    rows: int
    """Rows of the products, over all ranks."""
    terms: int
    columns: tuple[int, ...]
    """Columns of each product."""
    dtype: torch.dtype
    """The dtype of the operands."""
    part_bytes: int
    """Bytes of one copy: a gathered shard, or the part of a product that belongs to one rank."""
    reordered: int = 0
    """Elements of the left operand that are copied row by row, because the rows of a rank do not lie together."""

    @property
    def workspace_bytes(self) -> int:
        """Symmetric memory that the operator needs: a gathered shard, or two parts that take turns."""
        return self.part_bytes * (2 if self.scatters else 1)

    def parts_bytes(self, num_ranks: int) -> int:
        """Memory of the allocator that a scatter takes while it runs: the parts of all ranks, before their sum."""
        return self.part_bytes * num_ranks if self.scatters else 0

    def ns(self, num_ranks: int, transport: Transport, device: Device) -> int:
        """The time of the operator, with no other work on the device."""
        rows = max(1, self.rows // num_ranks)
        shapes = [ProductShape(1, rows, columns, self.terms) for columns in self.columns]
        piece = sum((device.shaped_product_ns(shape, self.dtype) or 0) + device.kernel_ns for shape in shapes)
        piece = round(piece / (1 - transport.sm_share))
        copy = ceil(transport.copy_us(self.part_bytes, num_ranks) * 1000)
        pace = 1 + transport.slowdown  # of a product while a copy runs; the rest of it runs at full speed
        beside = round(min(piece * pace, piece + copy * (1 - 1 / pace)))
        moved = self.part_bytes * (num_ranks + 1 if self.scatters else 0 if self.reordered else 2)
        moved += round(self.reordered * max(2 * self.dtype.itemsize, REORDERED_BYTES * relative_rate(device)))
        last = (device.traffic_ns(moved) or 0) + device.kernel_ns
        barrier = ceil(transport.link.latency_us * 1000)
        return barrier + piece + (num_ranks - 1) * max(beside, copy) + last


def fused_shape(node: Node, num_ranks: int) -> FusedShape | None:
    """The sizes of a call of a fused operator; None if a size is symbolic."""
    bound = ops.bind(node)
    scatters = "Bs" not in bound
    left: Any = ops.value_of(bound["A"])
    rights: list[Any] = [ops.value_of(right) for right in ([bound["B"]] if scatters else bound["Bs"])]
    values = [left, *rights]
    if any(not isinstance(value, Tensor) or any(type(size) is not int for size in value.shape) for value in values):
        return None
    terms, columns = int(rights[0].shape[0]), tuple(int(right.shape[-1]) for right in rights)
    rows = prod(left.shape) // terms if terms else 0
    dim: int = next(bound[name] for name in DIMS if name in bound)
    reordered = prod(left.shape) if prod(left.shape[:dim]) > 1 else 0
    if scatters:
        return FusedShape(True, rows, terms, columns, left.dtype, num_bytes(ops.value_of(node)) or 0, reordered)
    return FusedShape(False, rows * num_ranks, terms, columns, left.dtype, num_bytes(left) or 0, reordered)
