"""Sizes that only the data decides, priced by stated assumptions.

A graph of a mixture of experts has symbols for the numbers of rows that its ranks exchange. No hint exists for them.
To price such a graph, assume their values: by name, as its listing names them, or `balanced`, where each rank sends
the same number of rows to each other rank, and receives as many. With other shares of the experts, stated one by one or
as `zipf:1.2`, the rank is the one whose experts get the most rows: the others wait for it.

Contract: only prices use these values. Dependencies, eligibility, rewrites and proofs see unknown sizes. Assumptions
stay with the graph and its copies until others are stated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
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
ZIPF = "zipf:"
"""Begins an assumption in which the k-th expert gets rows in proportion to 1 / k to a power, which follows."""
EXPERTS = "experts"
"""The name of an assumption that lists the share of the rows that each expert gets, in any unit."""
Sizes = Mapping[str, int | Sequence[float]] | str
MAX_NAMED = 4
"""Number of sizes that a note names."""

_ASSUMED: WeakKeyDictionary[ShapeEnv, dict[sympy.Symbol, int]] = WeakKeyDictionary()
_ROUTING: WeakKeyDictionary[ShapeEnv, str] = WeakKeyDictionary()
"""A sentence about the assumed shares of the experts, if any are stated."""


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
        _ROUTING.pop(env, None)
    if sizes == BALANCED:
        _route(module, unknown, [])
        return
    if isinstance(sizes, str):
        _route(module, unknown, _zipf(sizes, module))
        return
    by_name = {name: symbol for symbol, name in symbol_names(module).items() if symbol in unknown}
    if EXPERTS in sizes:
        _route(module, unknown, _checked_shares(sizes[EXPERTS]))
    for name, value in sizes.items():
        if name == EXPERTS:
            continue
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
    envs = dict.fromkeys(number.node.shape_env for number in unknown.values())
    notes = [_ROUTING[env] for env in envs if env in _ROUTING]
    assumed = "sizes that the data decides are assumed"
    notes += [f"{assumed}: {_named(found)} = {value}" for value, found in by_value.items()]
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


def _zipf(sizes: str, module: GraphModule) -> list[float]:
    """The shares of all experts of a graph, by a power of their number."""
    power = sizes.removeprefix(ZIPF)
    if not sizes.startswith(ZIPF) or not power.replace(".", "", 1).isdecimal():
        do = f"use {BALANCED!r}, '{ZIPF}1.2' or {{'u0': 512}}"
        raise GraphError(compose("sizes", f"no assumption is called {sizes!r}", do=do))
    ends = (ops.bind(node)["offs"] for node in module.graph.nodes if ops.name_of(node.target) == "_grouped_mm")
    num_local = next((size_of(ops.value_of(node).shape[0]) for node in ends if isinstance(node, Node)), None)
    num_ranks = max((len(splits) for _, splits in _exchanges(module)), default=1)
    if num_local is None:
        do = f"list their shares: {{{EXPERTS!r}: [0.5, 0.25, ...]}}"
        raise GraphError(compose("sizes", "the graph has no grouped product, so its experts are not known", do=do))
    return [1 / k ** float(power) for k in range(1, num_local * num_ranks + 1)]


def _checked_shares(given: Any) -> list[float]:
    shares = list(given) if isinstance(given, list | tuple) else []
    is_number = all(type(share) in (int, float) and 0 <= share < float("inf") for share in shares)
    if not shares or not is_number or not sum(shares):
        what = f"{EXPERTS} is {given!r}, expected a list with the share of the rows that each expert gets"
        raise GraphError(compose("sizes", what, do=f"write {{{EXPERTS!r}: [0.5, 0.25, 0.125, 0.125]}}"))
    return shares


def _exchanges(module: GraphModule) -> Iterator[tuple[Node, Sequence[Any]]]:
    """The rows and the sizes sent of each exchange whose sizes the data decides."""
    for collective in collectives(module.graph):
        if collective.kind is not Kind.ALL_TO_ALL:
            continue
        bound = ops.bind(collective.launch)
        sent, received = bound["input_split_sizes"], bound["output_split_sizes"]
        if any(isinstance(split, Node) for split in [*sent, *received]):
            yield collective.launch, sent


def _route(module: GraphModule, unknown: Mapping[sympy.Symbol, torch.SymInt], shares: Sequence[float]) -> None:
    """State the sizes of all exchanges, for the rank that receives most; other sizes become its rows of one rank.

    `shares` are the shares of all experts, in the order of their ranks; none: all alike.
    """
    received: int | None = None
    left = dict(unknown)
    for launch, splits in _exchanges(module):
        extent = size_of(ops.value_of(launch.args[0]).shape[0])  # type: ignore[arg-type]
        if extent is None:
            continue
        sent = _sent(extent, len(splits), shares)
        for sizes, values in (
            (splits, sent),
            (ops.bind(launch)["output_split_sizes"], [max(sent)] * len(splits)),
        ):
            for split, value in zip(sizes, values, strict=True):
                number = ops.value_of(split) if isinstance(split, Node) else split
                symbol = expression_of(number) if isinstance(number, torch.SymInt) and size_of(number) is None else None
                if isinstance(symbol, sympy.Symbol) and symbol in left:
                    received = max(sent)
                    _state(unknown, symbol, value)
                    del left[symbol]
        if shares:
            most, even = (round(100 * share) for share in (max(sent) / max(extent, 1), 1 / len(splits)))
            _ROUTING[next(iter(unknown.values())).node.shape_env] = (
                f"experts are assumed to get unequal shares: times are those of the rank that gets most rows, {most} % "
                f"instead of {even} %"
            )
    for symbol in left if received is not None else ():
        _state(unknown, symbol, received or 0)


def _sent(extent: int, num_ranks: int, shares: Sequence[float]) -> list[int]:
    """The rows that a rank sends to each rank."""
    if not shares:
        return [extent // num_ranks] * num_ranks
    if len(shares) % num_ranks:
        what = f"{len(shares)} experts cannot be spread evenly over {num_ranks} ranks"
        raise GraphError(compose("sizes", what, do="give the share of every expert of all ranks"))
    each = len(shares) // num_ranks
    ends = [sum(shares[: k * each]) / sum(shares) for k in range(num_ranks + 1)]
    places = [round(extent * end) for end in ends]
    return [end - start for start, end in pairwise(places)]
