"""Literals, sizes and types in listings: the leaves that `reader` combines. They are looked up and built, never run."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Node

from weft.compat import FakeTensorMode, fake_tensor, fake_view, new_fake_mode, with_bits
from weft.errors import ListingError, compose, nearest, point_at
from weft.graph import metadata, ops
from weft.graph.listings.types import DTYPES, TypeText

MAX_BITS = 64
PROPERTIES = ("strides", "offset", "base", "constant", "device", "conj", "neg")
"""Properties of a tensor that its type may state after dtype and shape."""


def power(base: Any, exponent: Any) -> Any:
    """A power, bounded so that a size cannot exhaust the memory."""
    if not isinstance(exponent, int) or not 0 <= exponent <= 8:
        raise OverflowError("an exponent is a number from 0 to 8")
    if isinstance(base, int) and base.bit_length() * exponent > MAX_BITS:
        raise OverflowError(f"it has more than {MAX_BITS} bits")
    return base**exponent


NUMBERS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: power,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {"Max": torch.sym_max, "Min": torch.sym_min, "Mod": lambda a, b: a % b}


class LiteralReader:
    """Reads the leaves of one listing; holds its lines, symbols and fake mode."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.mode: FakeTensorMode = new_fake_mode()
        self.types = TypeText(torch.device("cpu"))
        self.numbers: dict[str, Any] = {}
        self.fakes: dict[str, Tensor] = {}
        """The fake values of the constants that were declared, by path."""

    def fail(self, at: ast.AST, what: str, do: str = "", name: str = "") -> NoReturn:
        number = getattr(at, "lineno", 1)
        line = self.lines[number - 1].strip() if number <= len(self.lines) else ""
        raise ListingError(compose(f"listing line {number}", what, where=point_at(line, name or line[:1]), do=do))

    # Types.

    def value_of_type(self, at: ast.expr, names: Mapping[str, Node | Tensor] | None = None) -> Any:
        """A fake value of a written type; `names` holds the values whose memory it may share."""
        if isinstance(at, ast.List | ast.Tuple):
            items = [self.value_of_type(item) for item in at.elts]
            return items if isinstance(at, ast.List) else tuple(items)
        if isinstance(at, ast.Dict) and None not in at.keys:
            keys = [self.literal(key) for key in at.keys if key is not None]
            return dict(zip(keys, map(self.value_of_type, at.values), strict=True))
        extras: dict[str, Any] = {}
        if isinstance(at, ast.Call):
            if at.args:
                self.fail(at, "a property of a type needs a name", "write f32[2, 4](strides=(1, 2))")
            extras = self.keywords(at, PROPERTIES, sizes=("strides", "offset"))
            at = at.func
        if isinstance(at, ast.Constant) and at.value is None:
            return None
        if isinstance(at, ast.Name) and at.id in ("float", "bool", "int"):
            return {"float": 0.0, "bool": False, "int": 0}[at.id]
        if not isinstance(at, ast.Subscript) or not isinstance(at.value, ast.Name):
            self.fail(at, "expected a type such as f32[2, 4]", "the empty shape is f32[()]")
        kind = at.value.id
        if kind == "group":
            return str(self.literal(at.slice))
        dims = self.dims(at.slice)
        if kind == "int":
            return dims[0] if isinstance(dims, tuple) else dims
        if kind not in DTYPES:
            self.fail(at, f"no dtype is called {kind!r}", nearest(kind, DTYPES), kind)
        size = list(dims) if isinstance(dims, tuple) else [dims]
        return self._fake(at, DTYPES[kind], size, extras, {} if names is None else names)

    def _fake(
        self,
        at: ast.AST,
        dtype: torch.dtype,
        size: list[Any],
        extras: dict[str, Any],
        names: Mapping[str, Node | Tensor],
    ) -> Any:
        strides = extras.get("strides")
        strides = metadata.contiguous_strides(size) if strides is None else strides
        strides = list(strides) if isinstance(strides, tuple | list) else [strides]
        base, offset = self._base(at, extras, names), extras.get("offset", 0)
        bits: dict[str, Any] = {name: extras.get(name, False) for name in ("conj", "neg")}
        try:
            if not all(isinstance(bit, bool) for bit in bits.values()) or (bits["conj"] and not dtype.is_complex):
                raise ValueError("conj and neg are True or False, and only complex numbers have a conjugate")
            device = torch.device(extras["device"]) if "device" in extras else self.types.device
            if base is None:
                made = fake_tensor(self.mode, size, strides, dtype, device)  # type: ignore[arg-type]
                if not extras.get("offset"):
                    return with_bits(made, **bits)
                base = fake_tensor(self.mode, [1], [1], dtype, device)  # type: ignore[arg-type]
            if base.device != device:
                raise ValueError(f"it is on {device}, but shares memory with a tensor on {base.device}")
            return with_bits(fake_view(base, size, strides, offset, dtype), **bits)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            self.fail(at, f"no tensor has this type: {str(error).splitlines()[0]}")

    def _base(self, at: ast.AST, extras: dict[str, Any], names: Mapping[str, Node | Tensor]) -> Any:
        """The fake value whose memory a type declares to share; None if it declares none."""
        if "base" not in extras and "constant" not in extras:
            return None
        word = "base" if "base" in extras else "constant"
        known: Mapping[str, Node | Tensor] = names if word == "base" else self.fakes
        if extras[word] not in known:
            kind = "constant" if known is self.fakes else "input"
            self.fail(at, f"no {kind} above is called {extras[word]!r}", nearest(str(extras[word]), known), word)
        found = known[extras[word]]
        value = ops.value_of(found) if isinstance(found, Node) else found
        if not isinstance(value, Tensor):
            self.fail(at, f"{extras[word]!r} is not a tensor, so its memory cannot be shared", name=word)
        return with_bits(value, conj=False, neg=False)

    def keywords(
        self, at: ast.Call, known: Sequence[str], *, sizes: Sequence[str] = (), names: Mapping[str, Node] | None = None
    ) -> dict[str, Any]:
        """The keyword arguments of a call; any name is known if none is given."""
        for word in at.keywords:
            if word.arg is None or (known and word.arg not in known):
                shown = "**" if word.arg is None else word.arg
                do = nearest(shown, known) or f"it knows {', '.join(known)}" if known else "write name=value"
                self.fail(at, f"{shown!r} has no meaning here", do, shown)
        return {str(k.arg): self.dims(k.value) if k.arg in sizes else self.literal(k.value, names) for k in at.keywords}

    def dims(self, at: ast.expr) -> Any:
        """A size or a tuple of sizes: whole numbers and expressions in declared symbols."""
        if isinstance(at, ast.Tuple):
            return tuple(self.dims(item) for item in at.elts)
        if isinstance(at, ast.Constant) and type(at.value) is int:
            return at.value
        if isinstance(at, ast.Name) and at.id in self.numbers:
            return self.numbers[at.id]
        if isinstance(at, ast.UnaryOp) and isinstance(at.op, ast.USub):
            return -self.dims(at.operand)
        if isinstance(at, ast.BinOp) and type(at.op) in NUMBERS:
            try:
                return NUMBERS[type(at.op)](self.dims(at.left), self.dims(at.right))
            except (ZeroDivisionError, OverflowError, TypeError) as error:
                self.fail(at, f"not a size: {error}")
        if isinstance(at, ast.Call) and dotted(at.func) in FUNCTIONS and not at.keywords:
            return FUNCTIONS[str(dotted(at.func))](*map(self.dims, at.args))
        symbol = at.id if isinstance(at, ast.Name) else ast.unparse(at)
        self.fail(at, f"{symbol!r} is not a size", f"declare it: symbol({symbol!r}, hint=8)", symbol)

    # Literals, which may name nodes.

    def literal(self, at: ast.expr, names: Mapping[str, Node] | None = None) -> Any:
        if isinstance(at, ast.Constant):
            return at.value
        if isinstance(at, ast.Name):
            return self._name(at, names or {})
        if isinstance(at, ast.List | ast.Tuple):
            items = [self.literal(item, names) for item in at.elts]
            return items if isinstance(at, ast.List) else tuple(items)
        if isinstance(at, ast.Dict):
            if None in at.keys:
                self.fail(at, "'**' has no meaning here", "write key: value", "**")
            keys = [self.literal(key, names) for key in at.keys if key is not None]
            return dict(zip(keys, (self.literal(value, names) for value in at.values), strict=True))
        if isinstance(at, ast.UnaryOp) and isinstance(at.op, ast.USub):
            inner = self.literal(at.operand, names)
            if isinstance(inner, int | float | complex):
                return -inner
        if isinstance(at, ast.Attribute) and dotted(at.value) in ("layout", "memory_format"):
            found = getattr(torch, at.attr, None)
            if isinstance(found, torch.layout | torch.memory_format):
                return found
        if isinstance(at, ast.Call):
            return self._literal_call(at, names)
        self.fail(at, f"{ast.unparse(at)!r} is not an argument", "use names, numbers, strings, lists and dtypes")

    def _name(self, at: ast.Name, names: Mapping[str, Node]) -> Any:
        if at.id in names:
            return names[at.id]
        if at.id in DTYPES:
            return DTYPES[at.id]
        if at.id in ("inf", "nan"):
            return math.inf if at.id == "inf" else math.nan
        self.fail(at, f"{at.id!r} is not defined", nearest(at.id, names), at.id)

    def _literal_call(self, at: ast.Call, names: Mapping[str, Node] | None) -> Any:
        kind = dotted(at.func)
        arguments = at.args
        if kind == "symbolic" and len(arguments) == 1:
            return self.dims(arguments[0])
        values = [self.literal(a, names) for a in arguments]
        if kind == "complex" and len(values) == 2 and all(isinstance(v, int | float) for v in values):
            return complex(*values)
        if kind == "slice" and len(values) == 3:
            return slice(*values)
        if kind == "operator" and len(values) == 1 and ops.op_of(str(values[0])) is not None:
            return ops.op_of(str(values[0]))
        if kind == "device" and len(values) == 1:
            try:
                return torch.device(values[0])
            except (RuntimeError, TypeError):
                pass
        self.fail(at, f"{ast.unparse(at)!r} is not an argument", name=str(kind))


def dotted(at: ast.expr) -> str | None:
    """`a.b.c` of a chain of names, or None."""
    parts: list[str] = []
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    return ".".join([at.id, *reversed(parts)]) if isinstance(at, ast.Name) else None
