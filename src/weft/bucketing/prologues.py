"""Prologues: casts and scalings before the launches that can run once for the whole bucket.

Contract: a node folds only if it is exactly a cast to another dtype or a scaling by a number, if nothing else uses its
result, and if nothing writes to its source. The operator is element-wise, so it gives the same values on the packed
tensor, and folding is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from weft.bucketing.eligibility import Strategy, Touches
from weft.graph import ops

SCALINGS = frozenset({"aten::div.Tensor", "aten::div.Scalar", "aten::mul.Tensor", "aten::mul.Scalar"})
CASTS = frozenset({"aten::_to_copy", "prims::convert_element_type"})

Step = tuple[Any, ...]
"""An operator, its arguments after the first, and the dtypes of its result and its source."""


def foldable(sources: list[Node], strategy: Strategy, touches: Touches) -> tuple[str, ...]:
    """The names of the nodes before these tensors that fold into one bucket, nearest to the launch first."""
    if strategy == "coalesced":
        return ()
    chains = [prologue(source, touches) for source in sources]
    if strategy == "pack":  # the operator converts each tensor separately, so only the last cast can fold
        casts = [chain[0] for chain in chains if chain and ops.qualified_name(chain[0].target) in CASTS]
        return tuple(node.name for node in casts)
    depth = 0
    while all(len(chain) > depth for chain in chains) and len({step_of(chain[depth]) for chain in chains}) == 1:
        depth += 1
    while depth and _narrows(chains[0][depth - 1], chains[0][0]):  # packing the wider dtype would copy more bytes
        depth -= 1
    return tuple(node.name for chain in chains for node in chain[:depth])


def prologue(source: Node, touches: Touches) -> list[Node]:
    """The casts and scalings before a tensor that nothing else uses, the nearest first."""
    chain: list[Node] = []
    node = source
    while step_of(node) is not None and len(node.users) == 1:
        below: Any = node.args[0]
        if touches.is_written(below) or touches.is_written(node) or not ops.value_of(below).is_contiguous():
            break
        chain.append(node)
        node = below
    return chain


def step_of(node: Node) -> Step | None:
    """The cast or scaling by a number that a node applies to its first argument; None if it does anything else."""
    value = ops.value_of(node)
    if node.op != "call_function" or not isinstance(value, Tensor) or not node.args:
        return None
    below = node.args[0]
    before = ops.value_of(below) if isinstance(below, Node) else None
    if not isinstance(before, Tensor) or before.shape != value.shape or before.device != value.device:
        return None
    name = ops.qualified_name(node.target)
    if name in SCALINGS:
        scale = node.args[1] if len(node.args) == 2 and not node.kwargs else None
        known = isinstance(scale, int | float)
        return (
            (node.target, repr(scale), value.dtype, before.dtype) if known else None
        )  # repr, since 0.0 == -0.0 and 1 == True
    if name in CASTS and _only_casts(node):
        return (CASTS, value.dtype, before.dtype)
    return None


def _only_casts(node: Node) -> bool:
    """Whether only the dtype changes: not the layout, the memory format or the pinning."""
    bound = ops.bind(node)
    return (
        bound.get("layout") in (None, torch.strided)
        and bound.get("memory_format") in (None, torch.preserve_format)
        and not bound.get("pin_memory")
    )


def _narrows(first: Node, last: Node) -> bool:
    source: Any = first.args[0]
    return ops.value_of(source).element_size() > ops.value_of(last).element_size()
