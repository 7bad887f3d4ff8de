"""Slices: nodes that are a range of another tensor.

Contract: a slice is exact; a node that may differ from one is not a slice. It is followed through one slicing operator
and at most one squeeze or unsqueeze. All sizes along its dim are known numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from weft.graph import ops
from weft.rewriting.draft import AnyNode, Draft

PARTS = ("split", "split_with_sizes", "split.sizes", "chunk", "unsafe_split", "unsafe_split_with_sizes", "unbind.int")
SPLITS = frozenset(ops.op_of(name) for name in PARTS[:-1]) - {None}
UNBIND = ops.op_of("unbind.int")
SLICE, NARROW, SELECT, ITEM = (ops.op_of(n) for n in ("slice", "narrow", "select.int", "operator.getitem"))

RESHAPES = frozenset(ops.op_of(name) for name in ("view", "reshape", "_unsafe_view")) - {None}
SQUEEZES = frozenset(ops.op_of(n) for n in ("squeeze", "squeeze.dim", "squeeze.dims", "unsqueeze")) - {None} | RESHAPES


@dataclass(frozen=True)
class Slice:
    """The elements from `start` to `end` along a dim of a source that has `size` of them."""

    source: AnyNode
    dim: int
    start: int
    end: int
    size: int
    node: AnyNode | None = None
    """The node that is the slice; None if the graph has no such node."""

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.end == self.size


def slice_of(draft: Draft, node: Any, dim: int, *, is_single: bool = False) -> Slice | None:
    """The slice along `dim` that a node is; with `is_single`, the single element that it was selected as."""
    if not isinstance(node, AnyNode):
        return None
    if node.target is ITEM:
        return _item(draft, node, dim, is_single)
    if node.target in SQUEEZES:
        return _squeezed(draft, node, dim, is_single)
    if node.target not in (SLICE, NARROW, SELECT):
        return None
    given = draft.bind(node)
    size = _size(draft, given["self"], given["dim"], dim)
    if size is None or (node.target is SELECT) != is_single:
        return None
    if node.target is SLICE:
        start, end = (_bounded(given[name], size, default) for name, default in (("start", 0), ("end", size)))
        if given["step"] != 1 or start is None or end is None:
            return None
        return Slice(given["self"], dim, start, max(start, end), size, node)
    start = _bounded(given["index" if is_single else "start"], size, 0)
    length = 1 if is_single else given["length"]
    known = start is not None and isinstance(length, int)
    return Slice(given["self"], dim, start, start + length, size, node) if known and start is not None else None


def slice_on_any_dim(draft: Draft, node: AnyNode) -> Slice | None:
    """The slice that a node is, along the first dim for which it is one."""
    value = draft.value(node)
    found = (slice_of(draft, node, dim) for dim in range(value.dim())) if isinstance(value, Tensor) else ()
    return next((piece for piece in found if piece is not None), None)


def _item(draft: Draft, node: AnyNode, dim: int, is_single: bool) -> Slice | None:
    """An item of a split or unbind."""
    whole, k = draft.arguments(node)[0]
    if not isinstance(whole, AnyNode) or not isinstance(k, int) or (whole.target is UNBIND) != is_single:
        return None
    if whole.target is not UNBIND and whole.target not in SPLITS:
        return None
    given = draft.bind(whole)
    size = _size(draft, given["self"], given["dim"], dim)
    begins = _begins(draft, whole, dim, is_single) if size is not None else None
    if size is None or begins is None:
        return None
    k %= len(begins) - 1
    return Slice(given["self"], dim, begins[k], begins[k + 1], size, node)


def _begins(draft: Draft, whole: AnyNode, dim: int, is_single: bool) -> list[int] | None:
    """Offsets of the parts of a split and the end of the last; None if a size is unknown. Cached for all the parts."""
    key = ("begins", whole, dim)
    if key not in draft.notes:
        parts = draft.value(whole)
        sizes = [1 if is_single else part.shape[dim] for part in parts] if isinstance(parts, list | tuple) else [None]
        is_known = bool(sizes) and all(type(size) is int for size in sizes)
        draft.notes[key] = list(itertools.accumulate(sizes, initial=0)) if is_known else None
    return draft.notes[key]


def _squeezed(draft: Draft, node: AnyNode, dim: int, is_single: bool) -> Slice | None:
    """A slice of one element whose dim was squeezed, or a selected element whose dim was restored."""
    source = draft.bind(node)["self"]
    if not isinstance(source, AnyNode) or source.target in SQUEEZES:
        return None
    mine, theirs = draft.value(node), draft.value(source)
    if not (isinstance(mine, Tensor) and isinstance(theirs, Tensor)) or abs(mine.dim() - theirs.dim()) != 1:
        return None
    longer, shorter = (list(v.shape) for v in ((theirs, mine) if is_single else (mine, theirs)))
    is_known = all(type(n) is int for n in longer)
    if not is_known or dim >= len(longer) or longer[dim] != 1 or longer[:dim] + longer[dim + 1 :] != shorter:
        return None
    piece = slice_of(draft, source, dim, is_single=not is_single)
    return replace(piece, node=node) if piece is not None and piece.end - piece.start == 1 else None


def _size(draft: Draft, source: Any, cut_dim: Any, dim: int) -> int | None:
    """The size of a source along the dim it is sliced on, if that is `dim` and the size is known."""
    value = draft.value(source) if isinstance(source, AnyNode) else None
    if not isinstance(value, Tensor) or not value.dim() or not isinstance(cut_dim, int):
        return None
    size: Any = value.shape[cut_dim]
    return size if cut_dim % value.dim() == dim and type(size) is int else None


def _bounded(value: Any, size: int, default: int) -> int | None:
    """A bound of a slice as an index: negative ones count from the end, and all are clamped to the tensor."""
    if value is None:
        return default
    if not isinstance(value, int):
        return None
    return min(max(value + size if value < 0 else value, 0), size)


def joined(draft: Draft, nodes: Sequence[AnyNode], dim: int, *, is_single: bool = False) -> list[Slice]:
    """The slices that nodes are, with adjacent slices of one tensor merged; other nodes stand for themselves."""
    found: list[Slice] = []
    for node in nodes:
        piece = slice_of(draft, node, dim, is_single=is_single) or Slice(node, dim, -2, -1, 0, node)
        last = found[-1] if found else None
        if last is not None and last.source is piece.source and last.end == piece.start:
            found[-1] = Slice(piece.source, piece.dim, last.start, piece.end, piece.size)
        else:
            found.append(piece)
    return found


def cut_dim(draft: Draft, node: AnyNode, num_dims: int, *, is_single: bool = False) -> int | None:
    """The first of `num_dims` dims of its source along which a node is a slice, or None."""
    return next((d for d in range(num_dims) if slice_of(draft, node, d, is_single=is_single) is not None), None)
