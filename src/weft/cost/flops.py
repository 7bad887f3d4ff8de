"""Floating-point operations of products: matrix products, convolutions and attention, by their schemas.

A multiplication and an addition count as two. Causal attention counts the half that its kernels compute; its backward
counts five products, including the one that recomputes the scores. The mask of FlexAttention is a function that is not
analysed: the mask counts as causal, unless one block covers all positions, as without a mask. Every other operator has
zero flops here: it is memory-bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from weft.compat import HigherOrderOperator, OpOverload, input_nodes
from weft.cost.kernels import AttentionShape, ProductShape
from weft.graph import ops
from weft.graph.assumed_sizes import size_of
from weft.graph.ops import cached_by_target

FIRST_OPERAND = {
    "mm": "self",
    "addmm": "mat1",
    "bmm": "self",
    "baddbmm": "batch1",
    "matmul": "self",
    "linear": "input",
    "mv": "self",
    "addmv": "mat",
    "dot": "self",
    "vdot": "self",
    "_int_mm": "self",
    "_scaled_mm": "self",
    "_scaled_mm_v2": "self",
    "_grouped_mm": "self",
    "_scaled_grouped_mm": "self",
    "_addmm_activation": "mat1",
    "_weight_int8pack_mm": "self",
}
"""Products that sum over the last dim of this operand: 2 x elements of the result x size of that dim."""
ATTENTION = ("_scaled_dot_product", "scaled_dot_product_attention")
"""Query, key and value as [..., heads, positions, width]."""
FUSED_ATTENTION = ("_flash_attention", "_efficient_attention")
"""Query, key and value as [..., positions, heads, width]."""

MASK_POSITION = {"flex_attention": 4, "flex_attention_backward": 9}
"""FlexAttention: the position of the argument with the mask. The first three are query, key and value, as [batch,
heads, positions, width]."""

Rule = Callable[[Node, dict[str, Any]], int]


class UnknownSizeError(Exception):
    """A size has no hint, or metadata is missing."""


@cached_by_target
def rule_of(target: Any) -> Rule | None:
    """The rule that counts the flops of an operator; None if it is not a product."""
    name = name_of(target)
    if name in MASK_POSITION:
        return functools.partial(_flex_attention, backward="backward" in name)
    if not isinstance(target, OpOverload):
        return None
    if name in FIRST_OPERAND:
        return functools.partial(_contraction, operand=FIRST_OPERAND[name], grouped="grouped" in name)
    if name in ("convolution", "convolution_backward"):
        return _convolution if name == "convolution" else _convolution_backward
    if name.startswith(ATTENTION + FUSED_ATTENTION):
        positions = -3 if name.startswith(FUSED_ATTENTION) else -2
        return functools.partial(_attention, positions=positions, backward="backward" in name)
    return None


def flops_of(node: Node) -> int | None:
    """The flops of a product, 0 for other nodes; None if a size is unknown."""
    rule = rule_of(node.target)
    try:
        return 0 if rule is None else rule(node, _bound(node))
    except UnknownSizeError:
        return None


def shape_of(node: Node) -> ProductShape | AttentionShape | None:
    """The shape of a matrix product or an attention; None for other nodes and unknown sizes."""
    name = name_of(node.target)
    flops = flops_of(node)
    if not flops:
        return None
    bound = _bound(node)
    if name in FIRST_OPERAND:
        out, terms = _sizes(node), _sizes(bound[FIRST_OPERAND[name]])[-1]
        if "grouped" in name:
            return _grouped_shape(out, _sizes(bound["self"]), _sizes(bound["mat2"]))
        if len(out) < 2:
            return ProductShape(1, out[0], 1, max(1, flops // (2 * out[0])))
        batch = prod(out[:-2]) if name in ("bmm", "baddbmm") else 1
        return ProductShape(batch, prod(out[:-1]) // batch, out[-1], terms)
    if name.startswith(ATTENTION + FUSED_ATTENTION) or name in MASK_POSITION:
        query = _sizes(bound["query"])
        positions = query[-3] if name.startswith(FUSED_ATTENTION) else query[-2]
        return AttentionShape(flops, prod(query[:-1]) // max(positions, 1), positions, query[-1], "backward" in name)
    return None


def has_assumed_mask(node: Node) -> bool:
    """Whether a call is FlexAttention with a mask, which counts as causal."""
    return name_of(node.target) in MASK_POSITION and not _is_one_block(_bound(node)["block_mask"])


def _grouped_shape(out: list[int], left: list[int], right: list[int]) -> ProductShape:
    """Groups of rows, of columns or of terms: the dim that no operand and no result has apart from the groups."""
    if len(left) == len(right) == 2:  # each group sums over its own part
        return ProductShape(1, out[0] * out[1], out[2], max(1, left[1] // out[0]), out[0])
    if len(left) == 2:
        return ProductShape(1, left[0], right[2], left[1], right[0])
    columns = right[-1] // left[0] if len(right) == 2 else right[-1]
    return ProductShape(1, left[0] * left[1], columns, left[2], left[0])


@cached_by_target
def name_of(target: Any) -> str:
    """The name of an operator without namespace and overload."""
    if isinstance(target, HigherOrderOperator):
        return target.name()
    return target.name().partition("::")[2].partition(".")[0] if isinstance(target, OpOverload) else ""


def product_dtype(node: Node) -> torch.dtype | None:
    """The dtype that a product computes in: that of its first operand with two or more dims, to skip a bias."""
    values = (ops.value_of(source) for source in input_nodes(node))
    tensors = [value for value in values if isinstance(value, Tensor)]
    return next((value.dtype for value in tensors if value.dim() > 1), tensors[0].dtype if tensors else None)


def _contraction(node: Node, bound: dict[str, Any], operand: str, grouped: bool) -> int:
    left, out = _sizes(bound[operand]), _sizes(node)
    if grouped and len(left) == 2 and len(out) == 3:  # each group sums over its own part of the last dim
        out = out[1:]
    return 2 * prod(out) * left[-1]


def _convolution(node: Node, bound: dict[str, Any]) -> int:
    return _convolved(bound, node, bound["input"])


def _convolution_backward(node: Node, bound: dict[str, Any]) -> int:
    wanted = sum(bool(each) for each in bound["output_mask"][:2])
    return wanted * _convolved(bound, bound["grad_output"], bound["input"])


def _convolved(bound: dict[str, Any], out: Node, source: Node) -> int:
    """Each weight of an output channel meets each position of the output (of the input, if transposed)."""
    return 2 * prod(_sizes(source if bound["transposed"] else out)) * prod(_sizes(bound["weight"])[1:])


def _attention(node: Node, bound: dict[str, Any], positions: int, backward: bool) -> int:
    query, key, value = (_sizes(bound[name]) for name in ("query", "key", "value"))
    rows = prod(query[:-1])
    flops = 2 * rows * key[positions] * (query[-1] + value[-1])
    if bound.get("is_causal") or bound.get("custom_mask_type"):
        flops //= 2
    return flops * 5 // 2 if backward else flops


def _flex_attention(node: Node, bound: dict[str, Any], backward: bool) -> int:
    return _attention(node, {**bound, "is_causal": has_assumed_mask(node)}, positions=-2, backward=backward)


def _is_one_block(block_mask: Any) -> bool:
    """Whether one block covers all pairs of positions; the tuple begins with the lengths and ends with the block sizes
    and the mask's graph."""
    if not isinstance(block_mask, list | tuple) or len(block_mask) < 5:
        return False
    lengths, blocks = block_mask[:2], block_mask[-3:-1]
    return all(
        isinstance(length, int) and isinstance(block, int) and length <= block
        for length, block in zip(lengths, blocks, strict=True)
    )


def _bound(node: Node) -> dict[str, Any]:
    """The arguments by name. Higher-order operators have no schema."""
    name = name_of(node.target)
    if name not in MASK_POSITION:
        return ops.bind(node)
    names = {0: "query", 1: "key", 2: "value", MASK_POSITION[name]: "block_mask"}
    return {name: node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in names.items()}


def _sizes(node: Any) -> list[int]:
    value = ops.value_of(node) if isinstance(node, Node) else None
    if isinstance(value, tuple | list):
        value = next((each for each in value if isinstance(each, Tensor)), None)
    if not isinstance(value, Tensor):
        raise UnknownSizeError
    sizes = [size_of(size) for size in value.shape]
    found = [size for size in sizes if size is not None]
    if len(found) < len(sizes):
        raise UnknownSizeError
    return found or [1]
