"""View layouts: how each operator that only moves or copies elements changes a layout.

Contract: arguments are read by schema, and sizes are numbers. `RULES` has exactly the operators that count as views. A
view whose result is not a layout raises `Unfollowed`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

from torch import Tensor
from torch.fx import Node

from weft.compat import OpOverload
from weft.graph import ops
from weft.streaming.layouts import Layout, Unfollowed, identity, joined

Laid = Layout | tuple[Layout, ...]
"""The layout of a tensor, or the layouts of a list of tensors."""


def names(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in text.split())


RESHAPES = names(
    "view reshape _unsafe_view flatten.using_ints unflatten.int contiguous clone alias detach _reshape_alias ravel"
    " squeeze squeeze.dim squeeze.dims unsqueeze view_as view_copy lift_fresh_copy"
)
PERMUTES = names("permute t transpose.int permute_copy t_copy")
SPLITS = names("split.Tensor split_with_sizes chunk unsafe_chunk unsafe_split.Tensor unsafe_split_with_sizes")


@functools.cache
def qualified(target: Any) -> str:
    """The full name of an operator; empty for anything else."""
    return target.name() if isinstance(target, OpOverload) else "getitem" if target is getitem else ""


def is_view(node: Node) -> bool:
    """Whether a node only moves or copies elements, or joins parts of one tensor."""
    return node.op == "call_function" and qualified(node.target) in RULES


def sizes_of(node: Node) -> tuple[int, ...] | None:
    """The shape of a tensor; None if a size is symbolic or the value is not a tensor."""
    value = ops.value_of(node)
    if not isinstance(value, Tensor) or any(type(size) is not int for size in value.shape):
        return None
    return tuple(value.shape)


def view_of(node: Node, known: Mapping[Node, Laid]) -> Laid:
    """The layout of a view whose sources have layouts over one base."""
    sources = node.all_input_nodes
    if not sources or any(source not in known for source in sources):
        raise Unfollowed("it joins tensors of unknown layout")
    return RULES[qualified(node.target)](node, known)


def back_to_base(node: Node) -> tuple[Node, Layout]:
    """The base that a chain of views starts from, and the layout of the last view over it."""
    chain: list[Node] = []
    front = [node]
    base: Node | None = None
    seen: set[Node] = set()
    while front:
        current = front.pop()
        if current in seen:
            continue
        seen.add(current)
        if is_view(current):
            chain.append(current)
            front += current.all_input_nodes
        elif base is None or base is current:
            base = current
        else:
            raise Unfollowed("it joins several tensors")
    shape = sizes_of(base) if base is not None else None
    if base is None or shape is None:
        raise Unfollowed("its sizes are not all numbers")
    known: dict[Node, Laid] = {base: identity(shape)}
    for view in _in_order(chain):
        known[view] = view_of(view, known)
    found = known[node]
    if not isinstance(found, Layout):
        raise Unfollowed("it is a list of tensors")
    return base, found


def _in_order(chain: Sequence[Node]) -> list[Node]:
    """The views, each after its sources."""
    inside, done = dict.fromkeys(chain), dict[Node, None]()
    stack = [(node, False) for node in chain]
    while stack:
        node, opened = stack.pop()
        if node in done:
            continue
        if opened:
            done[node] = None
        else:
            stack += [(node, True), *((source, False) for source in node.all_input_nodes if source in inside)]
    return list(done)


# Rules.


def _source(node: Node, known: Mapping[Node, Laid]) -> Layout:
    found = known[node.all_input_nodes[0]]
    if not isinstance(found, Layout):
        raise Unfollowed("it takes a list of tensors")
    return found


def _shape(node: Node) -> tuple[int, ...]:
    shape = sizes_of(node)
    if shape is None:
        raise Unfollowed("its sizes are not all numbers")
    return shape


def _reshaped(node: Node, known: Mapping[Node, Laid]) -> Layout:
    return _source(node, known).reshaped(_shape(node))


def _permuted(node: Node, known: Mapping[Node, Laid]) -> Layout:
    source, bound = _source(node, known), ops.bind(node)
    rank = len(source.dims)
    order = [d % rank for d in bound["dims"]] if "dims" in bound else list(range(rank))
    if "dims" not in bound and rank > 1:
        first, second = bound.get("dim0", 0) % rank, bound.get("dim1", 1) % rank
        order[first], order[second] = second, first
    return source.permuted(order)


def _sliced(node: Node, known: Mapping[Node, Laid]) -> Layout:
    source, bound = _source(node, known), ops.bind(node)
    if bound.get("step", 1) != 1:
        raise Unfollowed("it skips elements")
    dim = bound.get("dim", 0) % len(source.dims)
    extent = source.shape[dim]
    start = _number(bound.get("start"), 0)
    start = min(max(start + extent if start < 0 else start, 0), extent)
    return source.sliced(dim, start, _shape(node)[dim])


def _narrowed(node: Node, known: Mapping[Node, Laid]) -> Layout:
    source, bound = _source(node, known), ops.bind(node)
    dim = bound["dim"] % len(source.dims)
    start = _number(bound["start"], 0)
    return source.sliced(dim, start + source.shape[dim] if start < 0 else start, _shape(node)[dim])


def _selected(node: Node, known: Mapping[Node, Laid]) -> Layout:
    source, bound = _source(node, known), ops.bind(node)
    dim, index = bound["dim"] % len(source.dims), _number(bound["index"], 0)
    return source.sliced(dim, index % source.shape[dim], 1).without(dim)


def _split(node: Node, known: Mapping[Node, Laid]) -> tuple[Layout, ...]:
    source = _source(node, known)
    dim = ops.bind(node).get("dim", 0) % len(source.dims)
    values: Any = ops.value_of(node)
    lengths = [_number(value.shape[dim], 0) for value in values]
    starts = [0, *itertools.accumulate(lengths)][:-1]
    return tuple(source.sliced(dim, start, length) for start, length in zip(starts, lengths, strict=True))


def _unbound(node: Node, known: Mapping[Node, Laid]) -> tuple[Layout, ...]:
    source = _source(node, known)
    dim = ops.bind(node).get("dim", 0) % len(source.dims)
    return tuple(source.sliced(dim, place, 1).without(dim) for place in range(source.shape[dim]))


def _item(node: Node, known: Mapping[Node, Laid]) -> Layout:
    source: Any = node.args[0]
    position: Any = node.args[1]
    found = known[source]
    if isinstance(found, Layout) or type(position) is not int:
        raise Unfollowed("it indexes something that is not a list")
    return found[position]


def _concatenated(node: Node, known: Mapping[Node, Laid]) -> Layout:
    bound = ops.bind(node)
    parts = [known[part] for part in bound["tensors"]]
    layouts = [part for part in parts if isinstance(part, Layout)]
    if not layouts or len(layouts) < len(parts):
        raise Unfollowed("it joins lists of tensors")
    return joined(layouts, bound.get("dim", 0) % len(layouts[0].dims))


def _stacked(node: Node, known: Mapping[Node, Laid]) -> Layout:
    bound = ops.bind(node)
    parts = [known[part] for part in bound["tensors"]]
    layouts = [part for part in parts if isinstance(part, Layout)]
    if not layouts or len(layouts) < len(parts):
        raise Unfollowed("it joins lists of tensors")
    dim = bound.get("dim", 0) % (len(layouts[0].dims) + 1)
    return joined([Layout((*p.dims[:dim], (), *p.dims[dim:]), p.offset) for p in layouts], dim)


def _expanded(node: Node, known: Mapping[Node, Laid]) -> Layout:
    source, shape = _source(node, known), _shape(node)
    if [size for size in shape if size != 1] != [size for size in source.shape if size != 1]:
        raise Unfollowed("it repeats elements")
    return source.reshaped(shape)


def _number(value: Any, default: int) -> int:
    if value is None:
        return default
    if type(value) is not int:
        raise Unfollowed("its sizes are not all numbers")
    return value


RULES: dict[str, Callable[[Node, Mapping[Node, Laid]], Laid]] = {
    **dict.fromkeys(RESHAPES, _reshaped),
    **dict.fromkeys(PERMUTES, _permuted),
    **dict.fromkeys(SPLITS, _split),
    **dict.fromkeys(names("slice.Tensor slice_copy.Tensor"), _sliced),
    **dict.fromkeys(names("narrow narrow_copy"), _narrowed),
    **dict.fromkeys(names("select.int select_copy.int"), _selected),
    **dict.fromkeys(names("cat concat"), _concatenated),
    **dict.fromkeys(names("expand expand_copy"), _expanded),
    "aten::unbind.int": _unbound,
    "aten::stack": _stacked,
    "getitem": _item,
}
"""Waits have no rule: a chain of views ends at a wait, and the reader of the site looks at its launch."""
