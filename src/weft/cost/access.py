"""How well a kernel uses the memory bandwidth: what its bytes cost relative to those of a plain copy.

Plain pointwise kernels and reductions of rows run at the device's `memory_efficiency`. Some kernels do not, for one of
two reasons. Kernels that read data several times, such as softmax of long rows, move more bytes, on every device.
Kernels that are not vectorised, such as eager casts to wider elements and transposed copies, need a fixed time for each
element, whatever the bandwidth: on an H200, 2.8 ps to widen an element, from 16 million elements to 268 million. Their
cost is relative to the bandwidth that one multiprocessor of the H200 gets at its clock, so it is less on a device with
less. The clock follows from the share of the peak that products reach: the power limit sets both.

The factors were measured on one H200 with torch 2.11 (`benchmarks/gpu/kernels.py`, results of 2026-11-18).
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from weft.compat import input_nodes
from weft.cost.device import Device
from weft.cost.flops import name_of
from weft.graph import ops
from weft.graph.assumed_sizes import size_of

PLAIN = 100
"""Costs are in percent of a plain copy's."""
MEASURED_GBPS = 4800.0 * 0.87
"""Rate of plain copies on the device where the costs were measured."""
MEASURED_MULTIPROCESSORS = 132
MEASURED_EFFICIENCY = 0.76
"""Share of the peak that products reached in the steps on that device."""
WIDENING = 225
"""Eager casts to wider elements."""
PROMOTING = 400
"""Eager operators of two tensors of different dtypes."""
BROADCASTING = 180
BROADCASTING_16_BITS = 280
"""Eager operators of two tensors of different shapes; those of 16-bit elements are not vectorised either. Elements of
8 bytes take longer to move than a kernel that is not vectorised needs for them."""
RMS_NORM = 123
"""One kernel that reads rows and writes them: 82 us for 16384 rows of 4096 elements in bf16."""
RMS_NORM_BACKWARD_READS = 167
RMS_NORM_BACKWARD = 240
"""Two kernels: one for the gradient of the rows, one for that of the weight, which reads both inputs again: 231 us for
the same rows."""
SOFTMAX_BACKWARD = 140
LONG_ROW_SOFTMAX, HUGE_ROW_SOFTMAX = 160, 200
"""Softmax of rows that one multiprocessor cannot hold: they are read several times."""
LONG_ROW_BYTES, HUGE_ROW_BYTES = 1 << 16, 1 << 18
TRANSPOSED = 700
"""Copies that change which dim is contiguous."""
REORDERED_BYTES = 13
"""Bytes of a plain copy that a copy of reordered rows costs for each element. 30 million elements took 158 us on half
of the multiprocessors, about as long as widening them."""
JOINED_BYTES = 16
"""The same for joining strided tensors: 33.6 million elements took 230 us on half of the multiprocessors, and 450 us on
a quarter of them."""
ROLLED = 500
LISTED = 114
"""Operators over lists of tensors, as optimizers use them."""
LISTED_WITH_TENSORS = 175
"""The same with a tensor of one element for each tensor of the list: these run one by one."""
SOFTMAXES = frozenset({"_softmax", "_log_softmax"})
SOFTMAX_GRADIENTS = frozenset({"_softmax_backward_data", "_log_softmax_backward_data"})
COPIES = frozenset({"clone", "_to_copy", "copy", "copy_", "contiguous", "reshape"})
PACKED_WIDER = 206
"""Copies into a buffer of wider elements: 645 us for 1.3 GB, read and written."""
COLUMN_SUM_BYTES = 8
"""Bytes at the full rate that a sum over rows inside a compiled kernel costs for each element that it sums."""


def relative_rate(device: Device) -> float:
    """The bytes of plain copies for each clock of a multiprocessor, relative to the device of the measurements."""
    rate = (device.memory_gbps or 0.0) * device.memory_efficiency / MEASURED_GBPS
    processors = (device.num_multiprocessors or MEASURED_MULTIPROCESSORS) / MEASURED_MULTIPROCESSORS
    return rate / processors * MEASURED_EFFICIENCY / device.matmul_efficiency


def percent_of(node: Node, is_compiled: bool, rate: float = 1.0) -> int:
    """The cost of each byte that a node moves, in percent of a byte of a plain copy; `rate` is the relative rate."""
    name, value = name_of(node.target), ops.value_of(node)
    tensors = [v for v in map(ops.value_of, input_nodes(node)) if isinstance(v, Tensor)]
    if not isinstance(value, Tensor):
        value = next((v for v in value if isinstance(v, Tensor)), None) if isinstance(value, tuple | list) else None
    if value is None and tensors and name.startswith("_foreach_"):
        value = tensors[0]
    if value is None or not tensors:
        return PLAIN
    if name == "rms_norm_backward":
        return max(RMS_NORM_BACKWARD_READS, round(RMS_NORM_BACKWARD * rate))
    if is_compiled:
        return PLAIN
    return max(_repeated_reads(name, value), round(_unvectorised(name, tensors, value) * rate))


def _repeated_reads(name: str, value: Tensor) -> int:
    """The cost of eager kernels that read their inputs several times."""
    if name in SOFTMAX_GRADIENTS:
        return SOFTMAX_BACKWARD
    if name not in SOFTMAXES or not value.dim():
        return PLAIN
    row_bytes = (size_of(value.shape[-1]) or 0) * value.element_size()
    return HUGE_ROW_SOFTMAX if row_bytes > HUGE_ROW_BYTES else LONG_ROW_SOFTMAX if row_bytes > LONG_ROW_BYTES else PLAIN


def _unvectorised(name: str, tensors: list[Tensor], value: Tensor) -> int:
    """The cost of eager kernels that need a fixed time for each element."""
    if name.startswith("_foreach_"):
        return LISTED_WITH_TENSORS if any(t.dim() == 0 for t in tensors) and max(map(Tensor.dim, tensors)) else LISTED
    if name in SOFTMAXES or name in SOFTMAX_GRADIENTS:
        return PLAIN
    if name == "rms_norm":
        return RMS_NORM
    if name == "pack":
        return PACKED_WIDER if value.numel() > sum(t.nbytes for t in tensors) else PLAIN  # the buffer is of bytes
    if name in ("roll", "flip"):
        return ROLLED
    if name in COPIES and _is_transposed(tensors[0], value):
        return TRANSPOSED
    if name == "cat":
        strided = [t for t in tensors if not t.is_contiguous()]
        return _percent_of_elements(value, JOINED_BYTES) if strided else PLAIN
    if name in COPIES and _is_reordered(tensors[0], value):
        return _percent_of_elements(value, REORDERED_BYTES)
    if len(tensors) == 1:
        return WIDENING if tensors[0].element_size() < value.element_size() and tensors[0].dim() else PLAIN
    return _percent_of_pair(tensors, value)


def _percent_of_elements(value: Tensor, num_bytes: int) -> int:
    """The cost of a copy that takes as long for each element as these bytes of a plain copy."""
    return max(PLAIN, PLAIN * num_bytes // (2 * value.element_size()))


def _is_reordered(source: Tensor, result: Tensor) -> bool:
    """Whether a copy of one dtype reads elements in another order than it writes them."""
    return source.dtype == result.dtype and source.dim() > 1 and not source.is_contiguous() and result.is_contiguous()


def _percent_of_pair(tensors: list[Tensor], value: Tensor) -> int:
    """The cost of an eager operator of several tensors."""
    large = [t for t in tensors if t.dim()]
    if len({t.dtype for t in large}) > 1 and all(t.is_floating_point() for t in large):
        return PROMOTING
    if value.element_size() < 8 and any(t.dim() and t.shape != value.shape for t in large):
        return BROADCASTING_16_BITS if value.element_size() == 2 else BROADCASTING
    return PLAIN


def extra_bytes(node: Node) -> int:
    """The cost of a reduction inside a compiled kernel, beyond the kernel's own traffic, as bytes."""
    value = ops.value_of(node)
    if name_of(node.target) in SOFTMAXES and isinstance(value, Tensor) and value.dim():
        row_bytes = (size_of(value.shape[-1]) or 0) * value.element_size()
        return _num_elements(value) * 2 if row_bytes > LONG_ROW_BYTES else 0  # long rows are read once more, as bf16
    return column_sum_bytes(node)


def _num_elements(value: Tensor) -> int:
    found = 1
    for size in value.shape:
        found *= size_of(size) or 0
    return found


def column_sum_bytes(node: Node) -> int:
    """The cost of a sum over rows inside a compiled kernel, as bytes; 0 for other nodes."""
    source = next(iter(input_nodes(node)), None)
    value = None if source is None else ops.value_of(source)
    if name_of(node.target) != "sum" or not isinstance(value, Tensor):
        return 0
    dims = ops.bind(node).get("dim") or ()
    kept_last = value.dim() > 1 and value.dim() - 1 not in [d % value.dim() for d in dims if isinstance(d, int)]
    if not dims or not kept_last:
        return 0
    return _num_elements(value) * COLUMN_SUM_BYTES


def _is_transposed(source: Tensor, result: Tensor) -> bool:
    """Whether a copy reads along another dim than it writes along."""
    if source.dim() < 2 or source.shape != result.shape:
        return False
    strides = [size_of(s) or 0 for s in source.stride()], [size_of(s) or 0 for s in result.stride()]
    sizes = [size_of(s) or 0 for s in source.shape]
    inner = [[d for d in range(len(sizes)) if each[d] == 1 and sizes[d] > 1] for each in strides]
    return bool(inner[0]) and bool(inner[1]) and inner[0] != inner[1]
