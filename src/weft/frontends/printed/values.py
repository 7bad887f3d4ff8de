"""Arguments and operators in printed graphs: looked up and built, never run."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from weft.compat import HigherOrderOperator, OpOverload, find_op, higher_order_op, register_operators
from weft.errors import nearest
from weft.frontends.printed.text import PrintedText
from weft.frontends.printed.types import PrintedTypes
from weft.graph import ops
from weft.graph.listings.literals import MAX_BITS, dotted

OPERATIONS: dict[type[ast.AST], str] = {
    **{ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv", ast.Mod: "mod"},
    **{ast.Pow: "pow", ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor", ast.USub: "neg", ast.UAdd: "pos"},
    **{ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"},
}
"""Functions of module `operator` that torch prints as Python operators."""
CONSTANTS: dict[str, Any] = {
    f"torch.{name}": value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format)
}
# Functions on numbers: by their names, and by the mangled names that torch prints for functions of other modules.
FUNCTIONS: dict[str, Any] = {
    spelled: function
    for name, function in ops.PYTHON_FUNCTIONS.items()
    for spelled in (name, name.replace(".", "_"), f"_{name.replace('.', '_')}")
}
OPERATORS = "torch.ops."


class ValueReader:
    """Reads the arguments of one text."""

    def __init__(self, text: PrintedText, types: PrintedTypes) -> None:
        self.text, self.types = text, types

    def read(self, at: ast.expr, names: Mapping[str, Node]) -> Any:
        """An argument: a node by its name, a literal, or a container of them."""
        if isinstance(at, ast.Constant):
            return self._constant(at)
        if isinstance(at, ast.Name):
            return self._name(at, names)
        if isinstance(at, ast.List | ast.Tuple):
            items = [self.read(item, names) for item in at.elts]
            return items if isinstance(at, ast.List) else tuple(items)
        if isinstance(at, ast.Dict) and None not in at.keys:
            keys = [self._key(key) for key in at.keys]
            return dict(zip(keys, (self.read(value, names) for value in at.values), strict=True))
        if isinstance(at, ast.UnaryOp) and isinstance(at.op, ast.USub):
            inner = self.read(at.operand, names)
            if isinstance(inner, int | float | complex):
                return -inner
        if isinstance(at, ast.BinOp):
            return self._expression(at)
        if isinstance(at, ast.Attribute):
            found = self._dotted(at)
            if found is not None:
                return found
        if isinstance(at, ast.Call):
            return self._made(at, names)
        self.text.fail(at, f"{shown(at)!r} is not an argument", "use numbers, strings, lists, dtypes and names")

    def _constant(self, at: ast.Constant) -> Any:
        value: Any = at.value
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            self.text.fail(at, "a whole number has more than 64 bits")
        if value is Ellipsis or isinstance(value, bytes):
            self.text.fail(at, f"{shown(at)!r} is not an argument")
        return value

    def _key(self, at: ast.expr | None) -> Any:
        if not isinstance(at, ast.Constant) or not isinstance(at.value, str | int):
            self.text.fail(at or 1, "the keys of a dict must be strings or whole numbers")
        return self._constant(at)

    def _name(self, at: ast.Name, names: Mapping[str, Node]) -> Any:
        if at.id in names:
            return names[at.id]
        if at.id in ("inf", "nan"):
            return math.inf if at.id == "inf" else math.nan
        if at.id in self.types.numbers:
            return self.types.numbers[at.id]
        self.text.fail(at, f"{at.id!r} is not defined here", nearest(at.id, names), at.id)

    def _expression(self, at: ast.BinOp) -> Any:
        """A complex number, or an expression in size symbols."""
        if isinstance(at.right, ast.Constant) and isinstance(at.right.value, complex):
            left = self.read(at.left, {})
            if isinstance(left, int | float) and isinstance(at.op, ast.Add | ast.Sub):
                return left + at.right.value if isinstance(at.op, ast.Add) else left - at.right.value
        number = self.types.size(at, at)
        if number is None:
            self.text.fail(at, f"{shown(at)!r} is not an argument")
        return number

    def _dotted(self, at: ast.Attribute) -> Any:
        name = dotted(at) or ""
        if name in CONSTANTS:
            return CONSTANTS[name]
        return find_operator(name) if name.startswith(OPERATORS) else None

    def _made(self, at: ast.Call, names: Mapping[str, Node]) -> Any:
        kind = dotted(at.func)
        values = [self.read(argument, names) for argument in at.args]
        words = {word.arg: self.read(word.value, names) for word in at.keywords if word.arg is not None}
        if len(words) == len(at.keywords):
            if kind == "slice" and len(values) == 3 and not words:
                return slice(*values)
            if kind == "torch.Size" and len(values) == 1 and isinstance(values[0], list) and not words:
                return values[0]
            if kind in ("device", "torch.device") and set(words) <= {"type", "index"} and (words or values):
                return self._device(at, *values, *words.values())
        self.text.fail(at, f"{shown(at)!r} is not an argument", name=str(kind))

    def _device(self, at: ast.Call, *parts: Any) -> torch.device:
        try:
            return torch.device(*parts)
        except (RuntimeError, TypeError, ValueError, OverflowError):
            self.text.fail(at, f"{shown(at)!r} is not a device", "write device(type='cuda', index=0)", "device")


def operator_called(text: PrintedText, at: ast.Call) -> Any:
    """The target of a call: an operator, or a function on numbers."""
    name = dotted(at.func)
    if name is None or not name.startswith(OPERATORS):
        if name in FUNCTIONS:
            return FUNCTIONS[name]
        what = f"{shown(at.func)!r} is not an operator"
        do = "give a graph of operators, as AOTAutograd (aot_*) and Inductor (*_post_grad_graph) print them"
        text.fail(at, what, do, shown(at.func))
    target = find_operator(name)
    if target is None:
        short = name.removeprefix(OPERATORS)
        do = [nearest(short, known_names(short)), "import the library that registers it, if it is not part of torch"]
        text.fail(at, f"no operator is called {short!r}", "\n".join(filter(None, do)), short)
    return target


_found: dict[str, OpOverload | HigherOrderOperator] = {}


def find_operator(name: str) -> OpOverload | HigherOrderOperator | None:
    """The operator of a name such as `torch.ops.aten.mm.default`, or None; loads lazy parts of torch if needed."""
    if name not in _found:
        parts = name.removeprefix(OPERATORS).split(".")
        found = _look_up(parts) or (_look_up(parts) if register_operators(parts[0]) else None)
        if found is None:
            return None  # not cached: the library that registers it may be imported later
        _found[name] = found
    return _found[name]


def _look_up(parts: list[str]) -> OpOverload | HigherOrderOperator | None:
    if len(parts) == 2 and parts[0] == "higher_order":
        return higher_order_op(parts[1])
    return find_op(*parts) if len(parts) == 3 else None


def known_names(name: str) -> list[str]:
    """The operators in the namespace of a name, each with the overload of that name."""
    namespace, _, rest = name.partition(".")
    overload = rest.partition(".")[2] or "default"
    known = dir(getattr(torch.ops, namespace)) if namespace in dir(torch.ops) else []
    return [f"{namespace}.{known_name}.{overload}" for known_name in known if not known_name.startswith("__")]


def shown(at: ast.AST) -> str:
    """An expression as an error shows it."""
    try:
        return ast.unparse(at)[:80]
    except RecursionError:
        return "..."
