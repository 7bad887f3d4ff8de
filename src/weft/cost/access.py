"""How well a kernel uses the memory bandwidth: what its bytes cost relative to those of a plain copy.

Plain pointwise kernels and reductions of rows run at the device's `memory_efficiency`. Some kernels do not: eager
kernels that widen a dtype, long softmax rows that are read several times, transposed copies, and sums over rows inside
compiled kernels. The factors were measured on one H200 with torch 2.11 (`benchmarks/gpu/kernels.py`, results of
2026-11-18); they are taken to hold on other GPUs.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from weft.compat import hint_of, input_nodes
from weft.cost.flops import name_of
from weft.graph import ops

PLAIN = 100
"""Costs are in percent of a plain copy's."""
WIDENING = 200
"""Eager kernels whose result has wider elements than an operand: 2.15 against 4.3 TB/s."""
LONG_ROW_SOFTMAX = 200
"""Softmax of rows that no multiprocessor can hold: they are read three times and written once."""
LONG_ROW_BYTES = 1 << 17
TRANSPOSED = 700
"""Copies that change which dim is contiguous: 0.6 TB/s."""
ROLLED = 500
SOFTMAXES = frozenset({"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"})
COPIES = frozenset({"clone", "_to_copy", "copy", "copy_", "contiguous", "reshape"})
COLUMN_SUM_BYTES = 20
"""Bytes at the full rate that a sum over rows inside a compiled kernel costs for each element that it sums: 0.9 TB/s of
f32 elements instead of 4.3."""


def percent_of(node: Node, is_compiled: bool) -> int:
    """What each byte that a node moves costs, in percent of a byte of a plain copy."""
    name, value = name_of(node.target), ops.value_of(node)
    tensors = [v for v in map(ops.value_of, input_nodes(node)) if isinstance(v, Tensor)]
    if not isinstance(value, Tensor):
        value = next((v for v in value if isinstance(v, Tensor)), None) if isinstance(value, tuple | list) else None
    if value is None or not tensors:
        return PLAIN
    if name in SOFTMAXES and not is_compiled:
        row_bytes = (hint_of(value.shape[-1]) or 0) * value.element_size() if value.dim() else 0
        return LONG_ROW_SOFTMAX if row_bytes > LONG_ROW_BYTES else PLAIN
    if is_compiled:
        return PLAIN
    if name in ("roll", "flip"):
        return ROLLED
    if name in COPIES and _is_transposed(tensors[0], value):
        return TRANSPOSED
    if any(t.element_size() < value.element_size() and t.dim() == value.dim() for t in tensors):
        return WIDENING
    return PLAIN


def column_sum_bytes(node: Node) -> int:
    """What a sum over rows costs inside a compiled kernel, as bytes; 0 for other nodes."""
    source = next(iter(input_nodes(node)), None)
    value = None if source is None else ops.value_of(source)
    if name_of(node.target) != "sum" or not isinstance(value, Tensor):
        return 0
    dims = ops.bind(node).get("dim") or ()
    kept_last = value.dim() > 1 and value.dim() - 1 not in [d % value.dim() for d in dims if isinstance(d, int)]
    if not dims or not kept_last:
        return 0
    elements = 1
    for size in value.shape:
        elements *= hint_of(size) or 0
    return elements * COLUMN_SUM_BYTES


def _is_transposed(source: Tensor, result: Tensor) -> bool:
    """Whether a copy reads along another dim than it writes along."""
    if source.dim() < 2 or source.shape != result.shape:
        return False
    strides = [hint_of(s) or 0 for s in source.stride()], [hint_of(s) or 0 for s in result.stride()]
    sizes = [hint_of(s) or 0 for s in source.shape]
    inner = [[d for d in range(len(sizes)) if each[d] == 1 and sizes[d] > 1] for each in strides]
    return bool(inner[0]) and bool(inner[1]) and inner[0] != inner[1]
