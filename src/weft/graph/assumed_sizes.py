"""Sizes that only the data decides, priced by stated assumptions.

A graph of a mixture of experts has symbols for the numbers of rows that its ranks exchange. No hint exists for them.
To price such a graph, assume their values: by name, as its listing names them, or `balanced`, where each rank sends
the same number of rows to each other rank, and receives as many.

Contract: only prices use these values. Dependencies, eligibility, rewrites and proofs see unknown sizes. Assumptions
stay with the graph and its copies until others are stated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from weft.compat import ShapeEnv, expression_of, hint_of, symbols_of
from weft.errors import GraphError, compose, nearest
from weft.graph import ops
from weft.graph.collective import collectives
from weft.graph.listings.writer import symbol_names
from weft.graph.ops import Kind

BALANCED = "balanced"
Sizes = Mapping[str, int] | str
MAX_NAMED = 4
"""Number of sizes that a note names."""

_ASSUMED: WeakKeyDictionary[ShapeEnv, dict[sympy.Symbol, int]] = WeakKeyDictionary()


def size_of(number: Any) -> int | None:
    """A size for prices: itself, its hint, or its assumed value; None if it has none of them."""
    known = hint_of(number)
    if known is not None or not isinstance(number, torch.SymInt):
        return known
    values = _ASSUMED.get(number.node.shape_env) if number.node.shape_env is not None else None
    if not values:
        return None
    found: Any = expression_of(number).xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    return max(int(found), 0) if found.is_number else None


def bytes_of(value: Any) -> int | None:
    """Bytes of one tensor for prices; None if a size is unknown."""
    if not isinstance(value, Tensor):
        return None
    num_bytes = value.element_size()
    for extent in map(size_of, value.shape):
        if extent is None:
            return None
        num_bytes *= extent
    return num_bytes


def assume_sizes(module: GraphModule, sizes: Sizes) -> None:
    """State the sizes of a graph that only the data decides, for prices."""
    unknown = _unknown_numbers(module)
    for env in {number.node.shape_env for number in unknown.values()}:
        _ASSUMED[env] = {}
    if sizes == BALANCED:
        _balance(module, unknown)
        return
    if isinstance(sizes, str):
        raise GraphError(
            compose("sizes", f"no assumption is called {sizes!r}", do=f"use {BALANCED!r} or {{'u0': 512}}")
        )
    by_name = {name: symbol for symbol, name in symbol_names(module).items() if symbol in unknown}
    for name, value in sizes.items():
        if name not in by_name:
            do = nearest(name, by_name) or f"the listing has {', '.join(by_name) or 'none'}"
            raise GraphError(compose("sizes", f"{name!r} is not a size that the data decides", do=do))
        if type(value) is not int or value < 0:
            raise GraphError(compose("sizes", f"{name} is {value!r}, expected a whole number of 0 or more"))
        _state(unknown, by_name[name], value)


def assume_part(number: Any, whole: Any, parts: int) -> None:
    """Assume that a new number is an even part of one with an assumed value, as in a chunk of a batch."""
    value = size_of(whole)
    symbol = expression_of(number) if isinstance(number, torch.SymInt) else None
    if isinstance(symbol, sympy.Symbol) and value is not None and hint_of(number) is None:
        _ASSUMED.setdefault(number.node.shape_env, {})[symbol] = value // parts


def notes_on_sizes(module: GraphModule) -> tuple[str, ...]:
    """Sentences for a report: the assumed sizes, and those without a value."""
    unknown = _unknown_numbers(module)
    if not unknown:
        return ()
    names = {symbol: name for symbol, name in symbol_names(module).items() if symbol in unknown}
    by_value: dict[int | None, list[str]] = {}
    for symbol, name in names.items():
        by_value.setdefault(size_of(unknown[symbol]), []).append(name)
    missing = by_value.pop(None, [])
    notes = [f"sizes that the data decides are assumed: {_named(found)} = {value}" for value, found in by_value.items()]
    if missing:
        what = f"sizes that the data decides are unknown and count as nothing: {_named(missing)}"
        notes.append(f"{what}; --assume {BALANCED}, or sizes={BALANCED!r}, prices them")
    return tuple(notes)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _numbers_of(node: Node) -> Iterator[torch.SymInt]:
    value = ops.value_of(node)
    found: list[Any] = [*value.shape, *value.stride()] if isinstance(value, Tensor) else [value]
    return (number for number in found if isinstance(number, torch.SymInt))


def _unknown_numbers(module: GraphModule) -> dict[sympy.Symbol, torch.SymInt]:
    """The symbols without a hint, each with a number that contains it, preferably it alone."""
    found: dict[sympy.Symbol, torch.SymInt] = {}
    for number in chain.from_iterable(map(_numbers_of, module.graph.nodes)):
        if hint_of(number) is not None:
            continue
        for symbol in symbols_of(number):
            if symbol not in found or expression_of(number) == symbol:
                found[symbol] = number
    return found


def _state(unknown: Mapping[sympy.Symbol, torch.SymInt], symbol: sympy.Symbol, value: int) -> None:
    _ASSUMED[unknown[symbol].node.shape_env][symbol] = value


def _balance(module: GraphModule, unknown: Mapping[sympy.Symbol, torch.SymInt]) -> None:
    """Let each part of an exchange be an even share of the rows sent; other sizes become the last such share."""
    share: int | None = None
    left = dict(unknown)
    for collective in collectives(module.graph):
        rows = ops.value_of(collective.inputs[0]) if collective.kind is Kind.ALL_TO_ALL else None
        extent = size_of(rows.shape[0]) if isinstance(rows, Tensor) and rows.dim() else None
        if extent is None:
            continue
        bound = ops.bind(collective.launch)
        splits = [*bound["input_split_sizes"], *bound["output_split_sizes"]]
        numbers = [ops.value_of(split) if isinstance(split, Node) else split for split in splits]
        symbols = [expression_of(n) for n in numbers if isinstance(n, torch.SymInt) and size_of(n) is None]
        for symbol in (symbol for symbol in symbols if isinstance(symbol, sympy.Symbol) and symbol in left):
            share = extent // max(len(bound["input_split_sizes"]), 1)
            _state(unknown, symbol, share)
            del left[symbol]
    for symbol in left if share is not None else ():
        _state(unknown, symbol, share or 0)
