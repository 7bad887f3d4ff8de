"""Who minds strides: what may be given a tensor of the same elements in another order of memory, or another place.

Contract: an operator is blind to strides only if every bit of its result is the same: it moves data, or rounds each
element correctly, so that a vector register gives what a scalar one gives. torch chooses kernels by strides, and on the
kernel depend the order of a sum, which zero `maximum` returns, the infinite parts of a complex product, and whether
`add` with a factor rounds once or twice. Operators of elements are blind to the place. Products are not: a library may
add in another order where a row is not aligned as it was. `tests/property/test_strides.py` tries each operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from weft.compat import OpOverload
from weft.graph import metadata
from weft.graph.profiles import profile

MOVES = frozenset(("where", "clone", "_to_copy", "convert_element_type", "cat", "stack"))
"""Operators that move or convert elements, of any dtype."""
ROUNDED = frozenset(("add", "sub", "mul", "div", "neg", "abs", "relu", "sqrt", "eq", "ne", "lt", "le", "gt", "ge"))
"""Operators that round each element correctly, of real numbers and without a factor."""


class Change(Enum):
    """How a tensor differs from another one of the same elements."""

    STRIDES = "strides"
    PLACE = "place"
    ALIGNED_PLACE = "aligned place"
    """Another place, as far from a multiple of `ALIGNMENT_BYTES` as before."""


ALIGNMENT_BYTES = 64
"""Where torch's allocators place tensors at least, and what libraries of products ask for."""


def is_stride_blind(target: Any, given: Mapping[str, Any], values: Iterable[Any], change: Change) -> bool:
    """Whether a call gives the same bits when what it takes is changed so.

    `given` are the arguments of the call by name, `values` all values that it takes and gives.
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
    """Whether two fake values are the same but for strides and the place in memory."""
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return False
    return old.dtype == new.dtype and old.device == new.device and metadata.same(list(old.shape), list(new.shape))
