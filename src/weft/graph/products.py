"""Products: the operators that are the main computation of a layer, and the operands of those on matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from weft.compat import OpOverload
from weft.graph import ops
from weft.graph.ops import cached_by_target

PRODUCTS = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "matmul",
        "linear",
        "mv",
        "addmv",
        "dot",
        "vdot",
        "einsum",
        "convolution",
        "convolution_backward",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "_int_mm",
        "_weight_int8pack_mm",
        "embedding",
        "embedding_dense_backward",
    ]
)
PRODUCT_PREFIXES = ("_scaled_dot_product", "scaled_dot_product", "_flash_attention", "_efficient_attention")
OPERANDS: Mapping[str, tuple[str, str, str]] = {
    "aten::mm": ("self", "mat2", ""),
    "aten::addmm": ("mat1", "mat2", "self"),
    "aten::bmm": ("self", "mat2", ""),
    "aten::baddbmm": ("batch1", "batch2", "self"),
    "aten::matmul": ("self", "other", ""),
    "aten::linear": ("input", "weight", "bias"),
    "aten::_scaled_mm": ("self", "mat2", "bias"),
}
"""Argument names of each product: the left operand, the right operand, and the added tensor."""


@cached_by_target
def is_product(target: Any) -> bool:
    """Whether the operator is the main computation of a layer, such as a matrix product, which no gradient feeds."""
    if not isinstance(target, OpOverload):
        return False
    name = target.name().partition("::")[2].partition(".")[0]
    return name in PRODUCTS or name.startswith(PRODUCT_PREFIXES)


def operands_of(node: Node) -> tuple[Node, Node]:
    """The left and the right operand of a product of matrices."""
    left, right, _ = OPERANDS[ops.qualified_name(node.target)]
    bound = ops.bind(node)
    return bound[left], bound[right]
