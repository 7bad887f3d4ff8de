"""Stride sensitivity: which operators give the same bits for the same elements in another memory layout.

Contract: an operator is stride-blind only if no bit of its result changes. It either moves data, or rounds each element
correctly, so that vector and scalar code agree. torch selects kernels by strides, and the kernel determines the order
of a sum, which zero `maximum` returns, the infinite parts of a complex product, and whether `add` with alpha rounds
once or twice. Pointwise operators do not depend on the address of a tensor. Matmuls do: a library may sum in another
order if the alignment of a row changes. `tests/property/test_strides.py` tests every operator listed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from weft.compat import OpOverload
from weft.graph import metadata
from weft.graph.operator_effects import profile

MOVES = frozenset(("where", "clone", "_to_copy", "convert_element_type", "cat", "stack"))
"""Operators that move or convert elements; stride-blind for every dtype."""
ROUNDED = frozenset(("add", "sub", "mul", "div", "neg", "abs", "relu", "sqrt", "eq", "ne", "lt", "le", "gt", "ge"))
"""Operators that round each element correctly; stride-blind for real dtypes and alpha = 1."""


class Change(Enum):
    """How the memory layout of a tensor differs from that of another with the same elements."""

    STRIDES = "strides"
    PLACE = "place"
    ALIGNED_PLACE = "aligned place"
    """Another address with the same alignment modulo `ALIGNMENT_BYTES`."""


ALIGNMENT_BYTES = 64
"""Minimum alignment, in bytes, of torch's allocators; matmul libraries need no more."""


def is_stride_blind(target: Any, given: Mapping[str, Any], values: Iterable[Any], change: Change) -> bool:
    """Whether a call gives the same bits if its inputs change in this way.

    `given` are the arguments of the call by name, `values` all its input and output values.
    """
    if not isinstance(target, OpOverload):
        return False
    name = target.name().partition("::")[2].partition(".")[0]
    found = profile(target)
    if name == "as_strided" or found.several or found.writes or found.launch or found.wait or found.random:
        return False
    if found.aliases or name in MOVES or (change is Change.ALIGNED_PLACE and found.plain):
        return True
    if change is Change.PLACE and found.plain and torch.Tag.pointwise in target.tags:
        return True
    is_complex = any(isinstance(value, Tensor) and value.dtype.is_complex for value in values)
    return name in ROUNDED and not is_complex and given.get("alpha", 1) == 1


def is_alike(old: Any, new: Any) -> bool:
    """Whether two fake values differ at most in strides and offset."""
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return False
    return old.dtype == new.dtype and old.device == new.device and metadata.same(list(old.shape), list(new.shape))
