"""Row-wise calls: matrix products, element-wise operators and reductions, which can be computed in chunks.

Contract: arguments are read by schema. For each tensor argument, a call says which dim of the result each of its dims
becomes, or None for a dim that is summed over or has size one. A chunk of the result along one dim then needs only the
same chunk of the arguments that have this dim.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from weft.compat import OpOverload
from weft.graph import ops
from weft.graph.operator_effects import is_pointwise, profile
from weft.graph.products import OPERANDS
from weft.streaming.view_layouts import names, qualified, sizes_of

COPIES = names("_to_copy to.dtype") | {"prims::convert_element_type"}
REDUCTIONS = names("mean.dim sum.dim_IntList amax amin")

Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class Rowwise:
    """How the dims of a call's tensor arguments map to dims of its result."""

    node: Node
    dims: Mapping[str, Dims]
    """The dims of each argument, by its name."""
    product: bool = False

    @property
    def tensors(self) -> dict[str, Node]:
        """The tensor arguments by name."""
        bound = ops.bind(self.node)
        return {name: bound[name] for name in self.dims}

    def names_of(self, source: Node) -> list[str]:
        """The arguments that a tensor is given as."""
        return [name for name, tensor in self.tensors.items() if tensor is source]


def read_rowwise(node: Node) -> Rowwise | None:
    """The node as a row-wise call; None if it is not one."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or sizes_of(node) is None:
        return None
    name = qualified(node.target)
    if name in OPERANDS:
        return _product(node)
    if name in REDUCTIONS:
        return _reduction(node)
    return _pointwise(node) if _maps_elements(node) else None


@functools.cache
def _is_pure_pointwise(target: OpOverload) -> bool:
    found = profile(target)
    plain = not (found.writes or found.random or found.launch or found.wait or found.several or found.opaque)
    return plain and (is_pointwise(target) or target.name() in COPIES)


def _maps_elements(node: Node) -> bool:
    """Whether a pure call computes each element from the elements at the same place; casts of the bytes count."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return False
    if target.name() == "aten::view.dtype":
        source = ops.value_of(node.all_input_nodes[0])
        return isinstance(source, Tensor) and source.element_size() == ops.value_of(node).element_size()
    return _is_pure_pointwise(target)


def _tensors(node: Node) -> dict[str, tuple[int, ...]] | None:
    """The shapes of the tensor arguments; None if a call takes lists of tensors or symbolic sizes."""
    found: dict[str, tuple[int, ...]] = {}
    for name, value in ops.bind(node).items():
        if isinstance(value, Node):
            shape = sizes_of(value)
            if shape is None:
                return None
            found[name] = shape
        elif isinstance(value, list | tuple) and any(isinstance(item, Node) for item in value):
            return None
    return found


def _aligned(shape: tuple[int, ...], out: tuple[int, ...]) -> Dims | None:
    """The dims of an argument that is broadcast to the result; None if it cannot be."""
    if len(shape) > len(out):
        return None
    shift = len(out) - len(shape)
    dims = tuple(None if size == 1 else d + shift for d, size in enumerate(shape))
    fits = all(d is None or out[d] == size for d, size in zip(dims, shape, strict=True))
    return dims if fits else None


def _pointwise(node: Node) -> Rowwise | None:
    shapes, out = _tensors(node), sizes_of(node)
    if shapes is None or out is None:
        return None
    dims = {name: _aligned(shape, out) for name, shape in shapes.items()}
    known = {name: found for name, found in dims.items() if found is not None}
    return Rowwise(node, known) if len(known) == len(dims) and dims else None


def _reduction(node: Node) -> Rowwise | None:
    shapes, bound = _tensors(node), ops.bind(node)
    if shapes is None or list(shapes) != ["self"] or not bound.get("dim"):
        return None
    rank = len(shapes["self"])
    gone = {d % rank for d in bound["dim"]}
    kept = iter(range(rank)) if bound.get("keepdim") else None
    out = [d for d in range(rank) if d not in gone]
    dims = tuple(None if d in gone else (d if kept is not None else out.index(d)) for d in range(rank))
    return Rowwise(node, {"self": dims})


def _product(node: Node) -> Rowwise | None:
    shapes, out = _tensors(node), sizes_of(node)
    name = qualified(node.target)
    left, right, bias = OPERANDS[name]
    if shapes is None or out is None or not shapes[left] or not shapes[right]:
        return None
    rank, column = len(out), len(out) - 1
    has_columns = len(shapes[right]) > 1 or name == "aten::linear"
    row = rank - (2 if has_columns else 1)
    dims: dict[str, Dims | None] = {left: _operand(shapes[left], row, None)}
    if name == "aten::linear":
        dims[right] = (column, None) if len(shapes[right]) == 2 else (None,)
    else:
        dims[right] = _operand(shapes[right], row, column) if has_columns else (None,)
    if bias in shapes:
        dims[bias] = _aligned(shapes[bias], out)
    for scale, place in (("scale_a", 0), ("scale_b", 1), ("scale_result", None)):
        if scale in shapes:
            dims[scale] = _scale(shapes[scale], place, out)
    known = {name: found for name, found in dims.items() if found is not None}
    return Rowwise(node, known, product=True) if known.keys() == shapes.keys() else None


def _operand(shape: tuple[int, ...], row: int, column: int | None) -> Dims:
    """The dims of an operand: its batch dims, then rows and summed dim (left) or summed dim and columns (right)."""
    if len(shape) == 1:
        return (None,)
    inner: Dims = (row, None) if column is None else (None, column)
    batches = len(shape) - 2
    return (*(None if shape[d] == 1 else row - batches + d for d in range(batches)), *inner)


def _scale(shape: tuple[int, ...], place: int | None, out: tuple[int, ...]) -> Dims | None:
    """The dims of an operand's scales: one scale for all, or one per row (or column) of the result."""
    if all(size == 1 for size in shape):
        return (None,) * len(shape)
    by_row = len(shape) == 2 and place is not None and shape[place] == out[place] and shape[1 - place] == 1
    return tuple(place if d == place else None for d in range(2)) if by_row else None
