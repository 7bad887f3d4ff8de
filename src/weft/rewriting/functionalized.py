"""Readers of functionalized calls: the wrappers that tracing puts around operators that write their arguments.

Version 1 of the wrapper takes the tensors to write, and returns the operator's results followed by copies of these
tensors. Version 2 takes base tensors, and describes each written argument as a view of one of them.

The wrapper of a Triton kernel takes the kernel's arguments by name and the names of those that it writes, and returns
copies of these by name.

Contract: a call is read exactly, or refused with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from weft.compat import HigherOrderOperator, OpOverload, schema_of
from weft.graph import ops
from weft.graph.operator_effects import FUNCTIONAL_WRAPPERS
from weft.plan.decision import Reason, Refusal

ITEM = ops.op_of("operator.getitem")
KERNEL_WRAPPER = "triton_kernel_wrapper_functional"
WRAPPERS = {ops.op_of(f"higher_order.{name}"): name for name in sorted(FUNCTIONAL_WRAPPERS - {KERNEL_WRAPPER})}


@dataclass(frozen=True)
class BaseView:
    """A written argument as a view of one of the base tensors."""

    base: int
    target: str = ""
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class FunctionalizedOp:
    """The call of an operator that a wrapper stands for."""

    op: OpOverload
    kwargs: Mapping[str, Any]
    """The arguments; each written one is a `BaseView` or a list of them."""
    bases: tuple[Node, ...]
    num_returns: int
    items: Mapping[int, tuple[Node, ...]]
    """The users of each item, by its index."""


@dataclass(frozen=True)
class FunctionalizedKernel:
    """The call of a Triton kernel that a wrapper stands for: by argument, the written tensor and its users."""

    bases: Mapping[str, Node]
    items: Mapping[str, tuple[Node, ...]]


def is_kernel(node: Node) -> bool:
    """Whether a node is the functionalized call of a Triton kernel."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == KERNEL_WRAPPER


def read_kernel(node: Node) -> FunctionalizedKernel | Refusal:
    """The wrapped kernel call, or why it cannot be unwrapped."""
    given: Any = node.kwargs.get("kwargs")
    written: Any = node.kwargs.get("tensors_to_clone")
    if not isinstance(given, Mapping) or not isinstance(written, list | tuple):
        return Refusal(
            Reason.UNSUPPORTED_FORM, f"{node.name} stays: it does not name the arguments that its kernel writes"
        )
    items: dict[str, tuple[Node, ...]] = {}
    for user in node.users:
        if user.target is not ITEM or not isinstance(user.args[1], str):
            return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: {user.name} uses all its results", user.name)
        items[user.args[1]] = (*items.get(user.args[1], ()), user)
    bases: dict[str, Any] = {name: given.get(name) for name in written}
    refusal = _why_not_write(node, list(bases.values()), bool(items))
    return refusal or FunctionalizedKernel(bases, items)


def read_wrapper(node: Node) -> FunctionalizedOp | Refusal:
    """The wrapped operator call, or why it cannot be unwrapped."""
    op = node.args[0] if node.args else None
    if not isinstance(op, OpOverload):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: it does not wrap an operator")
    items: dict[int, tuple[Node, ...]] = {}
    for user in node.users:
        if user.target is not ITEM or not isinstance(user.args[1], int):
            return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: {user.name} uses all its results", user.name)
        items[user.args[1]] = (*items.get(user.args[1], ()), user)
    schema = schema_of(op)
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    read = _second if WRAPPERS[node.target].endswith("v2") else _first
    kwargs, bases = read(dict(node.kwargs), written)
    refusal = _why_not_write(node, bases, bool(items))
    return refusal or FunctionalizedOp(op, kwargs, tuple(bases), max(len(schema.returns), 1), items)


def _why_not_write(node: Node, bases: list[Any], is_used: bool) -> Refusal | None:
    """Why a call cannot write these tensors or copies of them; None if it can."""
    if not all(isinstance(base, Node) and isinstance(ops.value_of(base), Tensor) for base in bases):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: an argument that it writes is not a tensor")
    loose = next((base for base in bases if not _is_plain(base)), None)
    if loose is not None:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: {loose.name} is not contiguous", loose.name)
    return None if is_used else Refusal(Reason.ALONE, f"{node.name} stays: its results are unused")


def _is_plain(base: Node) -> bool:
    """Whether a copy has the same layout; the strided views of version 2 count from the start of the storage."""
    value = ops.value_of(base)
    return value.is_contiguous() and value.storage_offset() == 0


def _first(given: dict[str, Any], written: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """Arguments and bases of version 1: each written tensor is a base of its own."""
    bases: list[Any] = []
    for name in written:
        if given.get(name) is not None:
            bases.append(given[name])
            given[name] = BaseView(len(bases) - 1)
    return given, bases


def _second(given: dict[str, Any], written: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """Arguments and bases of version 2: each written tensor is a view of a base."""
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
