"""Arguments and results of calls in a symbolic run: values for tensors, numbers, and names for everything else.

Contract: a symbol in the shape of an input means the same on both sides, since both have the same inputs. Any other
symbol (such as the number of nonzero elements) is renamed after the call that made it, so equal names mean equal
numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from weft.compat import OpOverload, expression_of, symbols_of
from weft.graph import ops
from weft.verification.symbolic.index_maps import Call
from weft.verification.symbolic.storage import Contents, StorageView, Tangle
from weft.verification.symbolic.tensors import Size, Terms, Undecided, Value, product, settle

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_DETERMINED_BY_REPR = (
    *(bool, int, float, complex, str, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, *SYMBOLIC),
)


@dataclass(frozen=True, slots=True)
class Token:
    """A value that is neither a tensor nor a number; it is known only by the call that made it."""

    atom: int


class SymbolicArguments:
    """Arguments and results of the nodes of one graph."""

    def __init__(self, terms: Terms, *, ignores_strides: bool) -> None:
        self.terms = terms
        self.ignores_strides = ignores_strides
        self.contents = Contents(terms)
        self.held: dict[Node, Any] = {}
        """The value of each node: a `Value`, a view of a written storage, a number, a token, or a list of these."""
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self._layouts: dict[Node, Hashable] = {}
        self._num_made = 0

    # From the arguments of a node to values.

    def read(self, held: Any) -> Any:
        """The current value, with views of written storages resolved."""
        if isinstance(held, StorageView | Tangle):
            return self.contents.read(held)
        return [self.read(item) for item in held] if isinstance(held, list) else held

    def places(self, argument: Any) -> Any:
        """An argument with each node replaced by what it holds, views unresolved."""
        if isinstance(argument, Node):
            return self.held[argument]
        if isinstance(argument, list | tuple):
            return [self.places(item) for item in argument]
        if isinstance(argument, dict):
            return {key: self.places(item) for key, item in argument.items()}
        return self._number(argument, None) if isinstance(argument, SYMBOLIC) else argument

    def resolve(self, argument: Any) -> Any:
        """An argument with each node replaced by its current value."""
        if isinstance(argument, Node):
            return self.read(self.held[argument])
        if isinstance(argument, list | tuple):
            return [self.resolve(item) for item in argument]
        if isinstance(argument, dict):
            return {key: self.resolve(item) for key, item in argument.items()}
        return self._number(argument, None) if isinstance(argument, SYMBOLIC) else argument

    def by_name(self, node: Node) -> dict[str, Any]:
        """The arguments of a call by the names of its schema."""
        return {name: self.resolve(value) for name, value in ops.bind(node).items()}

    def call(self, node: Node) -> Call:
        """The call of a node in the form that the rules of laws take."""
        value, target = ops.value_of(node), node.target
        results: Any = value if isinstance(value, list | tuple) else [value]
        if value is None:  # the call writes the tensors of a list and returns nothing
            written = ops.bind(node).get("self")
            results = [ops.value_of(item) for item in written] if isinstance(written, list | tuple) else []
        types = [self.type_of(v) for v in results]
        name = base_of(target).partition("::")[2] if isinstance(target, OpOverload) else ""
        device = str(results[0].device) if results else ""
        return Call(self.terms, self.by_name(node), types, _is_on_one_device(node, results), device, name)

    def freeze(self, argument: Any, numbers: list[int]) -> Hashable:
        """An argument as part of a label. Values are not part of it; their numbers are appended to `numbers`."""
        if isinstance(argument, Node):
            return self._freeze_held(self.read(self.held[argument]), numbers), self.layout(argument)
        if isinstance(argument, list | tuple):
            return tuple(self.freeze(item, numbers) for item in argument)
        if isinstance(argument, dict):
            return tuple((key, self.freeze(item, numbers)) for key, item in argument.items())
        if isinstance(argument, slice):
            return "slice", self.freeze([argument.start, argument.stop, argument.step], numbers)
        if isinstance(argument, SYMBOLIC):
            return self._number(argument, None)
        return literal(argument)

    def _freeze_held(self, held: Any, numbers: list[int]) -> Hashable:
        if isinstance(held, Value):
            numbers.append(self.terms.number(held))
            return "value"
        if isinstance(held, list):
            return tuple(self._freeze_held(item, numbers) for item in held)
        if isinstance(held, Token):
            return "token", held.atom
        return held if isinstance(held, sympy.Basic) else literal(held)

    # From metadata to results.

    def result(self, value: Any, call: int) -> Any:
        """New atoms for the results of a call, named after the atom of the call; numbers where metadata has them."""
        self._num_made = 0
        return self._result(value, call, ())

    def _result(self, value: Any, call: int, path: tuple[int, ...]) -> Any:
        if isinstance(value, list | tuple):
            return [self._result(item, call, (*path, k)) for k, item in enumerate(value)]
        if isinstance(value, Tensor):
            shape = tuple(self._number(n, call) for n in value.shape)
            size = product(shape)
            atom = self.terms.atom(("result", path), size, value.dtype, ((call, 0),))
            return Value(shape, value.dtype, ((atom, 0, size),) if size != 0 else ())
        if isinstance(value, SYMBOLIC):
            return self._number(value, call)
        if isinstance(value, int | float | bool | str):
            return value
        return Token(self.terms.atom(("result", path), None, None, ((call, 0),)))

    def type_of(self, value: Any) -> tuple[tuple[Size, ...], torch.dtype]:
        """Shape and dtype from metadata."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            raise Undecided
        return tuple(n if type(n) is int else self._number(n, None) for n in value.shape), value.dtype

    def layout(self, node: Node) -> Hashable:
        """The strides of a tensor that is not contiguous; None otherwise."""
        if node in self._layouts:
            return self._layouts[node]
        value = ops.value_of(node)
        found: Hashable = None
        if isinstance(value, Tensor) and not self.ignores_strides:
            sizes = [self._number(n, None, missing="?") for n in value.shape]
            strides = [self._number(n, None, missing="?") for n in value.stride()]
            used = [(n, step) for n, step in zip(sizes, strides, strict=True) if n != 1]
            found = None if _is_contiguous(used) else tuple(step for _, step in used)
        self._layouts[node] = found
        return found

    def learn(self, value: Any) -> None:
        """Keep the names of the symbols of an input."""
        for number in [*value.shape, *value.stride()] if isinstance(value, Tensor) else [value]:
            for symbol in symbols_of(number) if isinstance(number, SYMBOLIC) else ():
                self._symbols.setdefault(symbol, _renamed(symbol, symbol.name))

    def _number(self, number: Any, call: int | None, missing: str | None = None) -> Any:
        """A number in the symbols of this run; new symbols are named after the call that made them."""
        if type(number) is int:
            return number
        new = [symbol for symbol in symbols_of(number) if symbol not in self._symbols]
        if new and call is None:
            if missing is not None:
                return missing
            raise Undecided
        for symbol in new:
            # The two sides may order two new symbols in one number differently, so these get names of one side only.
            name = f"call{call}_{self._num_made}" if len(new) == 1 else f"{self.terms.side}_{symbol.name}"
            self._symbols[symbol] = _renamed(symbol, name)
            self._num_made += 1
        expression: Any = expression_of(number).xreplace(self._symbols)
        return settle(expression) if isinstance(number, torch.SymInt) else expression


def base_of(target: OpOverload) -> str:
    """The name of an operator without overload and without the underscore of a call in place."""
    name = target.name().partition(".")[0]
    return name if name.endswith("__") else name.removesuffix("_")


def literal(argument: Any) -> Hashable:
    """A constant argument as part of a label: by its repr where that determines it, otherwise by its identity."""
    if isinstance(argument, OpOverload):
        return "operator", argument.name()
    if argument is None or isinstance(argument, _DETERMINED_BY_REPR):
        return type(argument).__name__, repr(argument)
    return type(argument).__name__, id(argument)


def containers(tree: Any) -> Hashable:
    """The nesting of containers in an argument, without leaves; dicts with their keys in order."""
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple" if type(tree) is tuple else type(tree)
        return kind, tuple(containers(item) for item in tree)
    if isinstance(tree, dict):
        return "dict", tuple((key, containers(item)) for key, item in tree.items())
    return None


def leaves(tree: Any) -> Iterable[Any]:
    """The leaves of nested lists."""
    if isinstance(tree, list):
        for item in tree:
            yield from leaves(item)
    else:
        yield tree


def name_of(target: Any) -> str:
    """The full name of an operator, with its overload."""
    if isinstance(target, OpOverload):
        return target.name()
    return ops.name_of(target) or f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', repr(target))}"


def _is_on_one_device(node: Node, results: Iterable[Any]) -> bool:
    values = [*results, *(ops.value_of(source) for source in node.all_input_nodes)]
    return len({value.device for value in values if isinstance(value, Tensor)}) <= 1


def _is_contiguous(used: list[tuple[Any, Any]]) -> bool:
    step: Any = 1
    for extent, stride in reversed(used):
        if isinstance(stride, str) or isinstance(extent, str) or stride != step:
            return False
        step = settle(step * extent)
    return True


def _renamed(symbol: sympy.Symbol, name: str) -> sympy.Symbol:
    """A symbol of another name with the same assumptions."""
    known: dict[str, bool] = {"integer": True} if symbol.is_integer else {}
    if symbol.is_positive:
        known["positive"] = True
    elif symbol.is_nonnegative:
        known["nonnegative"] = True
    return sympy.Symbol(name, **known)
