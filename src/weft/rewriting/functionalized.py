"""Functionalized calls: what a wrapper of an operator that writes stands for.

The first version of the wrapper is given the tensors that are written, and returns copies of them behind the results of
the operator. The second is given whole tensors, and for each argument which part of which one it is.

The wrapper of a kernel of Triton is given the kernel's arguments by name, with those that it writes, and returns
copies of these by name.

Contract: a call is read exactly or refused with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from weft.compat import HigherOrderOperator, OpOverload, schema_of
from weft.graph import ops
from weft.graph.profiles import FUNCTIONAL_WRAPPERS
from weft.plan.decision import Reason, Refusal

ITEM = ops.op_of("operator.getitem")
KERNEL_WRAPPER = "triton_kernel_wrapper_functional"
WRAPPERS = {ops.op_of(f"higher_order.{name}"): name for name in sorted(FUNCTIONAL_WRAPPERS - {KERNEL_WRAPPER})}


@dataclass(frozen=True)
class BaseView:
    """An argument as a view of one of the tensors that are written."""

    base: int
    target: str = ""
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class FunctionalizedOp:
    """What a wrapper stands for."""

    op: OpOverload
    kwargs: Mapping[str, Any]
    """Arguments; those that are written are views, or lists of views."""
    bases: tuple[Node, ...]
    num_returns: int
    items: Mapping[int, tuple[Node, ...]]
    """The users by the item that they take."""


@dataclass(frozen=True)
class FunctionalizedKernel:
    """What the wrapper of a kernel stands for: the tensors that it writes, and who takes them, by the argument."""

    bases: Mapping[str, Node]
    items: Mapping[str, tuple[Node, ...]]


def is_kernel(node: Node) -> bool:
    """Whether a node is the functional call of a kernel of Triton."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == KERNEL_WRAPPER


def read_kernel(node: Node) -> FunctionalizedKernel | Refusal:
    """What the wrapper of a kernel stands for, or why it is left."""
    given: Any = node.kwargs.get("kwargs")
    written: Any = node.kwargs.get("tensors_to_clone")
    if not isinstance(given, Mapping) or not isinstance(written, list | tuple):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: it does not say what its kernel writes")
    items: dict[str, tuple[Node, ...]] = {}
    for user in node.users:
        if user.target is not ITEM or not isinstance(user.args[1], str):
            return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: {user.name} takes all results", user.name)
        items[user.args[1]] = (*items.get(user.args[1], ()), user)
    bases: dict[str, Any] = {name: given.get(name) for name in written}
    refusal = _why_not_write(node, list(bases.values()), bool(items))
    return refusal or FunctionalizedKernel(bases, items)


def read_wrapper(node: Node) -> FunctionalizedOp | Refusal:
    """What a wrapper stands for, or why it is left."""
    op = node.args[0] if node.args else None
    if not isinstance(op, OpOverload):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: it wraps no operator but a kernel")
    items: dict[int, tuple[Node, ...]] = {}
    for user in node.users:
        if user.target is not ITEM or not isinstance(user.args[1], int):
            return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: {user.name} takes all results", user.name)
        items[user.args[1]] = (*items.get(user.args[1], ()), user)
    schema = schema_of(op)
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    read = _second if WRAPPERS[node.target].endswith("v2") else _first
    kwargs, bases = read(dict(node.kwargs), written)
    refusal = _why_not_write(node, bases, bool(items))
    return refusal or FunctionalizedOp(op, kwargs, tuple(bases), max(len(schema.returns), 1), items)


def _why_not_write(node: Node, bases: list[Any], is_used: bool) -> Refusal | None:
    """Why a call cannot write these, or copies of them; None if it can."""
    if not all(isinstance(base, Node) and isinstance(ops.value_of(base), Tensor) for base in bases):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: what it writes are not single tensors")
    loose = next((base for base in bases if not _is_plain(base)), None)
    if loose is not None:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: {loose.name} is not contiguous", loose.name)
    return None if is_used else Refusal(Reason.ALONE, f"{node.name} stays: nobody takes its results")


def _is_plain(base: Node) -> bool:
    """Whether a copy has the same layout: strides are counted from the start of memory in strided views of it."""
    value = ops.value_of(base)
    return value.is_contiguous() and value.storage_offset() == 0


def _first(given: dict[str, Any], written: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """Arguments of the first version: what is written is given as it is, each a tensor of its own."""
    bases: list[Any] = []
    for name in written:
        if given.get(name) is not None:
            bases.append(given[name])
            given[name] = BaseView(len(bases) - 1)
    return given, bases


def _second(given: dict[str, Any], written: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """Arguments of the second version: what is written is a view of one of the bases."""
    bases = list(given.pop("_all_bases"))
    made: dict[str, Any] = {name: value for name, value in given.items() if not name.startswith("_")}
    for name in written:
        length = given.get(f"_{name}_length")
        prefixes = [f"_{name}_{k}" for k in range(length)] if length is not None else [f"_{name}"]
        views = [_view(given, prefix) for prefix in prefixes]
        made[name] = views if length is not None else views[0]
    return made, bases


def _view(given: Mapping[str, Any], prefix: str) -> BaseView | None:
    base = given.get(f"{prefix}_base_index")
    if base is None:
        return None
    if f"{prefix}_slice_dim" in given:
        return BaseView(base, "slice", tuple(given[f"{prefix}_slice_{part}"] for part in ("dim", "start", "end")))
    if f"{prefix}_size" in given:
        return BaseView(base, "as_strided", tuple(given[f"{prefix}_{p}"] for p in ("size", "stride", "storage_offset")))
    return BaseView(base)
