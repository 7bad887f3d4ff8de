"""Fake values of nodes: in closed form for communication, by torch's own fake kernels for the rest.

Contract: no real data is touched and no process group is needed. `update` recomputes only the values that a change
reaches, and stops where a recomputed value has the same metadata as the old one.

Results are cached by the types of the arguments. The type, strides and offset of a pure operator's result follow from
those of its arguments and from its constants, so a repeated call need not go through the dispatcher. Only operators
that return one tensor of known size, either new or a view of the first argument, are cached.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from weft.compat import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    call_fake,
    expression_of,
    fake_mode_of,
    fake_tensor,
    fake_view,
    higher_order_op,
    new_fake_mode,
    schema_of,
    storage_key,
)
from weft.errors import GraphError, compose
from weft.graph import ops
from weft.graph.operator_effects import ATTENTIONS, profile
from weft.graph.ops import Kind, cached_by_target

CLONE = torch.ops.aten.clone.default
MAX_RESULTS = 1 << 12
"""Maximum number of results of one call: protects the reader of listings from malicious splits."""
# Operators with effects outside the graph even when their arguments are fake.
FORBIDDEN = frozenset({"aten::from_file", "aten::_print", "aten::save", "aten::load"})
MAX_REMEMBERED = 1 << 16
"""Maximum number of cached result types; the cache is emptied when it is full."""
FUNCTIONAL_KERNEL = "triton_kernel_wrapper_functional"
"""The higher-order operator that runs a kernel on copies of the tensors that the kernel writes, and returns these."""
CONSTANTS = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def mode_of(nodes: Iterable[Node]) -> FakeTensorMode:
    """The fake mode in which the nodes were traced, or a new one."""
    return fake_mode_of(ops.value_of(node) for node in nodes) or new_fake_mode()


def compute(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode) -> Any:
    """The fake value of a call on fake values. Raises GraphError if the call is invalid."""
    if target is getitem:
        return args[0][args[1]]
    if ops.is_wait(target):
        return args[0]
    try:
        if target is higher_order_op(FUNCTIONAL_KERNEL):
            return {name: call_fake(CLONE, [kwargs["kwargs"][name]], {}, mode) for name in kwargs["tensors_to_clone"]}
        form = ops.launch_form(target)
        if form is not None and not form.copied:
            return _launched(target, _bind_values(target, args, kwargs), mode)
        if isinstance(target, OpOverload) and target.name() in FORBIDDEN:
            raise RuntimeError("the operator reaches outside the graph")
        _check_enumerations(target, args, kwargs)
        _check_number_of_results(target, args, kwargs)
        if isinstance(target, OpOverload) and torch.Tag.inplace_view in target.tags:
            with mode, torch.no_grad():  # such a call gives its argument another shape; the node keeps the old one
                args = [value.detach() if isinstance(value, Tensor) else value for value in args]
        return call_remembered(target, args, kwargs, mode)
    except GraphError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise GraphError(compose(str(ops.name_of(target) or target), reason)) from None


def has_own_kernel(target: Any) -> bool:
    """Whether `compute` knows a higher-order operator without running the graphs that it takes.

    The fake kernels of flex attention ignore its nested graphs.
    """
    return isinstance(target, HigherOrderOperator) and target.name() in (FUNCTIONAL_KERNEL, *ATTENTIONS)


def _check_enumerations(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a number in place of a dtype: torch accepts it and may then abort the process."""
    positions, names = _enumerations(target)
    given = [args[i] for i in positions if i < len(args)] + [kwargs[name] for name in names if name in kwargs]
    if any(isinstance(value, int) for value in given):
        raise RuntimeError(f"{' and '.join(names)}: a number is not accepted")


@cached_by_target
def _enumerations(target: Any) -> tuple[list[int], list[str]]:
    """The arguments that take a dtype, a layout or a memory format: their positions, and their names."""
    arguments = schema_of(target).arguments if isinstance(target, OpOverload) else ()
    kinds = ("ScalarType", "Layout", "MemoryFormat")
    found = [(i, a) for i, a in enumerate(arguments) if any(kind in str(a.real_type) for kind in kinds)]
    return [i for i, a in found if not a.kwarg_only], [a.name for _, a in found]


def _check_number_of_results(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a split into more than MAX_RESULTS parts, which could exhaust the memory."""
    if not _returns_list(target):
        return
    bound = _bind_values(target, args, kwargs)
    if "split_sizes" in bound:  # the listing spells out every part, so the text bounds their number
        return
    tensor, dim = next(iter(bound.values()), None), bound.get("dim", 0)
    if not isinstance(tensor, Tensor) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        return
    extent: Any = tensor.shape[dim]
    part = bound.get("split_size", 1)
    parts = bound.get("chunks", bound.get("sections", extent // part if isinstance(part, int) and part > 0 else 0))
    if isinstance(extent, int) and isinstance(parts, int) and min(extent, parts) > MAX_RESULTS:
        raise RuntimeError(f"it has {min(extent, parts)} results, at most {MAX_RESULTS} are possible")


@cached_by_target
def _returns_list(target: Any) -> bool:
    returns = schema_of(target).returns if isinstance(target, OpOverload) else ()
    return len(returns) == 1 and str(returns[0].type) == "List[Tensor]"


def of_node(node: Node, mode: FakeTensorMode) -> Any:
    """The fake value of a call, recomputed from the values of its inputs."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), ops.value_of)
    return compute(node.target, args, kwargs, mode)


def update(nodes: Sequence[Node], changed: Iterable[Node], mode: FakeTensorMode) -> list[tuple[Node, Any]]:
    """Recompute the values of `changed` and of their users. Returns the changed nodes with their old values."""
    index = {node: i for i, node in enumerate(nodes)}
    heap = [index[node] for node in changed if node in index]
    heapq.heapify(heap)
    undo: list[tuple[Node, Any]] = []
    last = -1
    while heap:
        i = heapq.heappop(heap)
        node = nodes[i]
        known = isinstance(node.target, OpOverload | type(getitem)) and not ops.has_unknown_result(node.target)
        if i == last or node.op != "call_function" or not known:
            continue
        last = i
        old, new = ops.value_of(node), of_node(node, mode)
        if not same(old, new) or (profile(node.target).aliases and not _share_storages(old, new)):
            undo.append((node, old))
            node.meta["val"] = new
            for user in node.users:
                if user in index:
                    heapq.heappush(heap, index[user])
    return undo


def same(first: Any, second: Any) -> bool:
    """Whether two fake values have the same type, sizes, strides and offset."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and first.device == second.device and numbers(first) == numbers(second)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.SymInt) and isinstance(second, torch.SymInt):
        return expression_of(first) == expression_of(second)
    return type(first) is type(second) and first == second


def _share_storages(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return storage_key(first) == storage_key(second)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return all(map(_share_storages, first, second))
    return True


def numbers(tensor: Tensor) -> list[Any]:
    """Sizes, strides and offset of a tensor, in a form in which symbolic numbers compare."""
    found = [*tensor.shape, *tensor.stride(), tensor.storage_offset()]
    return [expression_of(n) if isinstance(n, torch.SymInt) else n for n in found]


def _bind_values(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by schema name; raises if one is missing or unknown."""
    schema = schema_of(target).arguments
    positional = [a.name for a in schema if not a.kwarg_only]
    bound = dict(zip(positional, args, strict=False)) | dict(kwargs)
    missing = [a.name for a in schema if a.name not in bound and not a.has_default_value()]
    unknown = [name for name in bound if name not in {a.name for a in schema}]
    if len(args) > len(positional) or missing or unknown:
        takes = ", ".join(a.name for a in schema)
        raise RuntimeError(f"takes ({takes}), got {len(args)} arguments" + (f" and {list(kwargs)}" if kwargs else ""))
    return bound


def _launched(target: OpOverload, bound: dict[str, Any], mode: FakeTensorMode) -> Any:
    form = ops.launch_form(target)
    if form is None:
        raise RuntimeError("it is not a launch of a known kind")
    if form.kind is Kind.BATCH_P2P:
        pairs = zip(bound["op_list"], bound[form.tensors], strict=True)
        return [t if op == "irecv" else _resized(t, [0], mode) for op, t in pairs]
    if form.written is not None:
        return bound[form.written]
    if form.coalesced:
        return [_received(form.kind, tensor, bound, mode) for tensor in bound[form.tensors]]
    result = _received(form.kind, bound[form.tensors], bound, mode)
    if form.kind is Kind.ALL_REDUCE:  # torch traces only this one as contiguous for every input
        return _resized(result, list(result.shape), mode)
    return result


def _received(kind: Kind, tensor: Any, bound: dict[str, Any], mode: FakeTensorMode) -> Tensor:
    """The result that a collective gives for one tensor."""
    if not isinstance(tensor, Tensor):
        raise RuntimeError(f"takes tensors, got {type(tensor).__name__}")
    if kind in (Kind.ALL_REDUCE, Kind.BROADCAST):
        return fake_tensor(mode, tensor.shape, dense_strides(tensor), tensor.dtype, tensor.device)
    if kind is Kind.SEND:
        return _resized(tensor, [0], mode)
    if tensor.dim() == 0:
        raise RuntimeError(f"{kind.value} takes tensors with at least one dim, got one with none")
    sizes: list[Any] = list(tensor.shape)
    first, rest = sizes[0], sizes[1:]
    if kind is Kind.ALL_GATHER:
        return _resized(tensor, [first * bound["group_size"], *rest], mode)
    if kind is Kind.REDUCE_SCATTER:
        size = bound["group_size"]
        if isinstance(first, int) and first % size:
            raise RuntimeError(f"dim 0 of size {first} does not split over {size} ranks")
        return _resized(tensor, [first // size, *rest], mode)
    return _resized(tensor, [sum(bound["output_split_sizes"]), *rest], mode)


def _resized(tensor: Tensor, size: list[Any], mode: FakeTensorMode) -> Tensor:
    return fake_tensor(mode, size, contiguous_strides(size), tensor.dtype, tensor.device)


def contiguous_strides(size: Sequence[Any]) -> list[Any]:
    """The strides of a contiguous tensor of this size."""
    strides: list[Any] = []
    step: Any = 1
    for extent in reversed(size):
        strides.append(step)
        step = step * (extent if not isinstance(extent, int) else max(extent, 1))
    return strides[::-1]


def dense_strides(tensor: Tensor) -> Sequence[Any]:
    """The strides of `empty_like`, as torch traces these kinds: those of the tensor if it is dense."""
    if tensor.is_contiguous():
        return tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: tensor.stride(d))
    expected = contiguous_strides([tensor.shape[d] for d in reversed(order)])[::-1]
    dense = all(tensor.stride(d) == step for d, step in zip(order, expected, strict=True))
    return tensor.stride() if dense else contiguous_strides(tensor.shape)


@dataclass(frozen=True, slots=True)
class _Type:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_view: bool
    """Whether the result is a view of the first argument."""


class _Unknown(Exception):  # noqa: N818  # a signal inside this module
    """An argument that cannot be part of a key, such as a symbolic size or a real tensor."""


_TYPES: dict[Hashable, _Type] = {}


def call_remembered(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode) -> Any:
    """The fake result of a call, from the cache if a call with arguments of the same types was made before.

    A new tensor always gets offset 0. For `slice_scatter` of a view, the offset that torch reports depends on earlier
    calls.
    """
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


@cached_by_target
def _kind(target: Any) -> str | None:
    """`new` for operators that return a new tensor, `view` for views of the first argument, `either` if that depends on
    the arguments, None for operators that are not cached."""
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
    if isinstance(value, CONSTANTS):  # repr separates 0.0 from -0.0 and makes nan equal to itself
        return type(value), repr(value) if isinstance(value, float) else value
    raise _Unknown


def _tensor_key(value: Tensor) -> Hashable:
    if type(value) is not FakeTensor or value.is_conj() or value.is_neg() or value.layout is not torch.strided:
        raise _Unknown
    size, stride, offset = tuple(value.shape), value.stride(), value.storage_offset()
    if any(type(n) is not int for n in (*size, *stride, offset)):
        raise _Unknown
    return value.dtype, value.device, size, stride, offset
