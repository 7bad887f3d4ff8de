"""Types in listings: `f32[2, 4]`, `int[s0]`, `[f32[2], f32[2]]`, and strides and devices that differ from the default.

Symbols of sizes are renamed s0, s1, ... (u0, u1, ... where unbacked) by first use, so that the text does not depend on
the names that a trace happened to give them.
"""

from __future__ import annotations

import functools
import keyword
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor

from weft.compat import expression_of, storage_key, symbols_of

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, full)
    for name, full in {
        **{"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "b8": "bool"},
        **{"i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8"},
        **{"u64": "uint64", "u32": "uint32", "u16": "uint16", "u8": "uint8"},
        **{"c128": "complex128", "c64": "complex64", "c32": "complex32"},
        **{"f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "f8e4m3fnuz": "float8_e4m3fnuz"},
        **{"f8e5m2fnuz": "float8_e5m2fnuz", "f8e8m0fnu": "float8_e8m0fnu", "f4e2m1fn_x2": "float4_e2m1fn_x2"},
    }.items()
    if hasattr(torch, full)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


MAX_SHARED_BYTES = 1 << 20
"""Maximum size in bytes of shared memory whose constants a listing shows with their values."""
MAY_SHARE = "may share memory"
"""The declaration that the memory of the inputs is unknown: `inputs('may share memory')`."""


def torch_literal(value: Any) -> str | None:
    """The text of a dtype, a device, a layout or a memory format; None for other values."""
    if isinstance(value, torch.dtype) and value in DTYPE_NAMES:
        return DTYPE_NAMES[value]
    if isinstance(value, torch.device):
        return f"device({str(value)!r})"
    if isinstance(value, torch.layout | torch.memory_format):
        kind = "layout" if isinstance(value, torch.layout) else "memory_format"
        return f"{kind}.{str(value).rpartition('.')[2]}"
    return None


RESERVED = frozenset(
    {*DTYPES, *keyword.kwlist, "inf", "nan", "device", "layout", "memory_format", "attribute", "graph"}
)
"""Reserved names: a node of such a name is written with a suffix."""


@functools.lru_cache(maxsize=65536)
def listed_name(name: str) -> str:
    """The name of a node as a listing writes it."""
    return f"{name}_" if name.rstrip("_") in RESERVED else name


@functools.lru_cache(maxsize=65536)
def plain_name(listed: str) -> str:
    """The name of a node that a listing writes so; the inverse of `listed_name`."""
    return listed[:-1] if listed.endswith("_") and listed.rstrip("_") in RESERVED else listed


class TypeText:
    """Writes types. One instance serves one listing: it holds the names of its symbols and its default device."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.symbols: dict[sympy.Symbol, str] = {}
        self.of_inputs: set[sympy.Symbol] = set()
        self._cache: dict[Any, str] = {}

    def of(self, value: Any) -> str:
        """The type of a value; the empty string if it has none."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self._item, value))}]"
        if isinstance(value, tuple):
            return f"({', '.join(map(self._item, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, dict):
            items: Mapping[Any, Any] = value
            return f"{{{', '.join(f'{key!r}: {self._item(item)}' for key, item in items.items())}}}"
        return self._scalar(value)

    def _item(self, value: Any) -> str:
        return self.of(value) or "None"

    def of_input(self, value: Any, shared: dict[int, str], name: str, constant: str | None = None) -> str:
        """The type of an input: also its strides where not contiguous, and whose storage it shares."""
        text = self.of(value)
        if not isinstance(value, Tensor):
            self.of_inputs.update(symbols_of(value) if isinstance(value, torch.SymInt) else ())
            return text
        self.of_inputs.update(s for size in value.shape if isinstance(size, torch.SymInt) for s in symbols_of(size))
        base = shared.setdefault(storage_key(value), name)
        return self.placed(value, value.storage_offset(), base if base != name else None, constant)

    def placed(self, value: Tensor, offset: Any, base: str | None, constant: str | None = None) -> str:
        """The type of a tensor that begins at an offset in its storage, which may be that of another."""
        extras: dict[str, str] = {}
        if not _is_contiguous(value):
            extras["strides"] = f"({', '.join(map(self.number, value.stride()))}{',' if value.dim() == 1 else ''})"
        if not (isinstance(offset, int) and offset == 0):
            extras["offset"] = self.number(offset)
        if base is not None:
            extras["base"] = repr(base)
        if constant is not None:
            extras["constant"] = repr(constant)
        extras |= {"conj": "True"} if value.is_conj() else {}
        extras |= {"neg": "True"} if value.is_neg() else {}
        return with_extras(self.of(value), extras)

    def _tensor(self, value: Tensor) -> str:
        shape = tuple(value.shape)
        plain = all(type(size) is int for size in shape)
        key = (value.dtype, value.device, shape)
        if plain and key in self._cache:
            return self._cache[key]
        sizes = ", ".join(map(self.number, shape)) or "()"
        text = f"{DTYPE_NAMES.get(value.dtype, str(value.dtype))}[{sizes}]"
        if self.device is not None and value.device != self.device:
            text = with_extras(text, {"device": repr(str(value.device))})
        if plain:
            self._cache[key] = text
        return text

    def _scalar(self, value: Any) -> str:
        if isinstance(value, bool | torch.SymBool):
            return "bool"
        if isinstance(value, int | torch.SymInt):
            return f"int[{self.number(value)}]"
        return "float" if isinstance(value, float | torch.SymFloat) else ""

    def number(self, value: Any) -> str:
        """A size: digits, or an expression in the listing's own symbols."""
        if isinstance(value, int):
            return str(value)
        expression = expression_of(value)
        for symbol in symbols_of(value):
            self.name_symbol(symbol)
        return str(expression.xreplace({s: sympy.Symbol(n, integer=True) for s, n in self.symbols.items()}))

    def name_symbol(self, symbol: sympy.Symbol, name: str = "") -> str:
        """Give a symbol its name in this listing."""
        if symbol not in self.symbols:
            prefix = "u" if symbol.name.startswith("u") else "s"
            number = sum(n.startswith(prefix) for n in self.symbols.values())
            self.symbols[symbol] = name or f"{prefix}{number}"
        return self.symbols[symbol]


def _is_contiguous(value: Tensor) -> bool:
    """Whether the tensor has contiguous strides, decided without a guard on unknown sizes."""
    if all(type(size) is int for size in (*value.shape, *value.stride())):
        return value.is_contiguous()
    step: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if _expression(stride) != _expression(step):
            return False
        step = step * (max(size, 1) if type(size) is int else size)
    return True


def _expression(number: Any) -> Any:
    return expression_of(number) if isinstance(number, torch.SymInt) else sympy.Integer(number)


def with_extras(text: str, extras: dict[str, str]) -> str:
    """`f32[4]` and `{'offset': '2'}` give `f32[4](offset=2)`; existing extras are kept."""
    if not extras:
        return text
    inside = ", ".join(f"{key}={value}" for key, value in extras.items())
    return f"{text[:-1]}, {inside})" if text.endswith(")") else f"{text}({inside})"
