"""Who minds strides: what may be given a tensor of the same elements in another order of memory.

Contract: an operator is blind to strides only if every bit of its result is the same: it moves data, or rounds each
element correctly, so that a vector register gives what a scalar one gives. A sum may add in the order of memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.compat import OpOverload
from weft.graph import metadata
from weft.graph.profiles import profile

STRIDE_BLIND = frozenset(
    (
        *("add", "sub", "mul", "div", "neg", "abs", "relu", "maximum", "minimum", "where", "sqrt"),
        *("eq", "ne", "lt", "le", "gt", "ge", "clone", "_to_copy", "convert_element_type", "cat", "stack"),
    )
)


def is_stride_blind(target: Any, only_moved: bool) -> bool:
    """Whether a call gives the same bits whatever the strides of what it takes; `only_moved`: whatever its place."""
    if not isinstance(target, OpOverload):
        return False
    name = target.name().partition("::")[2].partition(".")[0]
    found = profile(target)
    if name == "as_strided" or found.several or found.writes or found.launch or found.wait or found.random:
        return False
    return bool(found.aliases) or name in STRIDE_BLIND or (only_moved and found.plain)


def is_alike(old: Any, new: Any) -> bool:
    """Whether two fake values are the same but for strides and the place in memory."""
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return False
    return old.dtype == new.dtype and old.device == new.device and metadata.same(list(old.shape), list(new.shape))
