"""`weft::pack`: an operator that copies tensors of any dtypes into one buffer of bytes.

    weft::pack(Tensor[] tensors, ScalarType[] dtypes, int num_rows, int alignment) -> Tensor

Each tensor is converted to its dtype and viewed as `num_rows` rows. Row k of the buffer holds row k of every tensor in
turn, each aligned to `alignment` bytes; padding is zero. One row gives a concatenation. One row per rank gives the send
buffer of a reduce-scatter or an all-to-all.

`row_layout` is the only definition of the layout: this operator, its fake kernel and the unpacking code all use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.compat import dtype_of, foreach_copy

SCHEMA = "pack(Tensor[] tensors, ScalarType[] dtypes, int num_rows, int alignment) -> Tensor"
ALIGNMENT = 16
"""Alignment of each tensor in bytes. No dtype is larger, so any slice of the buffer can be viewed as any dtype."""

_LIBRARY = torch.library.Library("weft", "FRAGMENT")


def row_layout(sizes: Sequence[Any], alignment: int) -> tuple[list[Any], Any]:
    """The offset in a row of each of these sizes, and the size of the row, all in bytes."""
    offsets: list[Any] = []
    end: Any = 0
    for size in sizes:
        offsets.append(end)
        end = (end + size + alignment - 1) // alignment * alignment
    return offsets, end


def _row_bytes(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], num_rows: int) -> list[Any]:
    return [t.numel() // num_rows * dtype_of(dtype).itemsize for t, dtype in zip(tensors, dtypes, strict=True)]


def _pack(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], num_rows: int, alignment: int) -> Tensor:
    sizes = _row_bytes(tensors, dtypes, num_rows)
    offsets, row_bytes = row_layout(sizes, alignment)
    buffer = torch.zeros(num_rows * row_bytes, dtype=torch.uint8, device=tensors[0].device)
    if not row_bytes:
        return buffer
    rows = buffer.view(num_rows, row_bytes)
    parts = [
        rows[:, offset : offset + size].view(dtype_of(dtype))
        for dtype, offset, size in zip(dtypes, offsets, sizes, strict=True)
    ]
    foreach_copy(parts, [tensor.reshape(part.shape) for tensor, part in zip(tensors, parts, strict=True)])
    return buffer


def _pack_fake(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], num_rows: int, alignment: int) -> Tensor:
    _, row_bytes = row_layout(_row_bytes(tensors, dtypes, num_rows), alignment)
    return tensors[0].new_empty(num_rows * row_bytes, dtype=torch.uint8)


_LIBRARY.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("pack", _pack, "CompositeExplicitAutograd")
torch.library.register_fake("weft::pack", _pack_fake, lib=_LIBRARY)

PACK: Any = torch.ops.weft.pack.default
