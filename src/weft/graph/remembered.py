"""Fake results of calls that were made before with arguments of the same types.

Contract: the type, strides and place of what a pure operator returns follow from those of its arguments and from its
constants, so a call that was made once need not go through the dispatcher again. Only operators that return one tensor
of known size, a new one or a view of their first argument, are remembered; all others are called. A new tensor begins
where its storage begins: what torch says of that for `slice_scatter` of a view depends on what was asked before.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.compat import FakeTensor, FakeTensorMode, OpOverload, call_fake, fake_tensor, fake_view, storage_key
from weft.graph.profiles import profile

MAX_REMEMBERED = 1 << 16
CONSTANTS = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True)
class _Type:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_view: bool
    """Of the first argument."""


class _Unknown(Exception):  # noqa: N818  # a signal inside this module
    """An argument that says too little: a symbolic size, a real tensor."""


_TYPES: dict[Hashable, _Type] = {}


def remembered(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode) -> Any:
    """The fake result of a call."""
    kind = _kind(target)
    if kind is None:
        return call_fake(target, args, kwargs, mode)
    try:
        key = (target, tuple(map(_key, args)), tuple((name, _key(value)) for name, value in kwargs.items()))
    except _Unknown:
        return call_fake(target, args, kwargs, mode)
    found = _TYPES.get(key)
    if found is None:
        value = call_fake(target, args, kwargs, mode)
        found = _remember(key, kind, args, value)
        if found is None or found.is_view:
            return value
    if found.is_view:
        return fake_view(args[0], found.size, found.stride, found.offset, found.dtype)
    return fake_tensor(mode, found.size, found.stride, found.dtype, found.device)


@functools.cache
def _kind(target: Any) -> str | None:
    """`new` for operators that return a new tensor, `view` for views of the first argument, `either` for those whose
    arguments decide, None for others."""
    if not isinstance(target, OpOverload):
        return None
    found = profile(target)
    if found.several or found.random or found.writes or found.launch or found.wait or found.ordered:
        return None
    if found.plain:
        return "new"
    if not found.views_first:
        return None
    return "view" if found.is_view else "either" if found.may_copy else None


def _remember(key: Hashable, kind: str, args: Sequence[Any], value: Any) -> _Type | None:
    if not isinstance(value, FakeTensor) or value.is_conj() or value.is_neg() or value.layout is not torch.strided:
        return None
    offset = value.storage_offset()
    if not isinstance(offset, int) or any(type(n) is not int for n in (*value.shape, *value.stride())):
        return None
    is_view = isinstance(args[0], Tensor) and storage_key(args[0]) == storage_key(value) if args else False
    if kind != "either" and is_view != (kind == "view"):
        return None
    if len(_TYPES) >= MAX_REMEMBERED:
        _TYPES.clear()
    size, stride = tuple(value.shape), tuple(value.stride())
    found = _TYPES[key] = _Type(size, stride, offset, value.dtype, value.device, is_view)
    return found


def _key(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return _tensor_key(value)
    if isinstance(value, list | tuple):
        return ("list", *map(_key, value))
    if isinstance(value, CONSTANTS):
        return type(value), repr(value) if isinstance(value, float) else value  # 0.0 is not -0.0, nan is nan
    raise _Unknown


def _tensor_key(value: Tensor) -> Hashable:
    if type(value) is not FakeTensor or value.is_conj() or value.is_neg() or value.layout is not torch.strided:
        raise _Unknown
    size, stride, offset = tuple(value.shape), value.stride(), value.storage_offset()
    if any(type(n) is not int for n in (*size, *stride, offset)):
        raise _Unknown
    return value.dtype, value.device, size, stride, offset
