"""The vocabulary: which operators communicate, the kind of each, and how its arguments are read.

Contract: arguments are found by schema, never by position or by spelling. A new kind of collective is one row of
`ROWS`. Communication without a row still counts as communication: `is_communication` is true and its kind is
`BARRIER`, across which nothing may be reordered.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
from torch.fx import Node

from weft.compat import FUNCTIONAL, HigherOrderOperator, OpOverload, find_op, higher_order_op, schema_of
from weft.graph import understated

Result = TypeVar("Result")


class Kind(Enum):
    """The kind of a launch. The value is the word used in listings, plans and reports."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"
    RECV = "recv"
    BATCH_P2P = "batch_p2p"
    BARRIER = "barrier"

    @property
    def phrase(self) -> str:
        """The kind as prose spells it: `all-gather`."""
        return self.value.replace("_", "-")


POINT_TO_POINT = frozenset({Kind.SEND, Kind.RECV, Kind.BATCH_P2P})
REDUCTIONS = frozenset({Kind.ALL_REDUCE, Kind.REDUCE_SCATTER})

# Operator, its name in listings, its kind. Schemas distinguish in-place, out and coalesced forms.
ROWS: tuple[tuple[str, str, Kind], ...] = (
    ("all_gather_into_tensor", "all_gather", Kind.ALL_GATHER),
    ("all_gather_into_tensor_out", "all_gather_out", Kind.ALL_GATHER),
    ("all_gather_into_tensor_coalesced", "all_gather_coalesced", Kind.ALL_GATHER),
    ("reduce_scatter_tensor", "reduce_scatter", Kind.REDUCE_SCATTER),
    ("reduce_scatter_tensor_out", "reduce_scatter_out", Kind.REDUCE_SCATTER),
    ("reduce_scatter_tensor_coalesced", "reduce_scatter_coalesced", Kind.REDUCE_SCATTER),
    ("all_reduce", "all_reduce", Kind.ALL_REDUCE),
    ("all_reduce_", "all_reduce_", Kind.ALL_REDUCE),
    ("all_reduce_coalesced", "all_reduce_coalesced", Kind.ALL_REDUCE),
    ("all_reduce_coalesced_", "all_reduce_coalesced_", Kind.ALL_REDUCE),
    ("all_to_all_single", "all_to_all", Kind.ALL_TO_ALL),
    ("broadcast", "broadcast", Kind.BROADCAST),
    ("broadcast_", "broadcast_", Kind.BROADCAST),
    ("isend", "send", Kind.SEND),
    ("irecv", "recv", Kind.RECV),
    ("batch_p2p_ops", "batch_p2p", Kind.BATCH_P2P),
)
WAITS: tuple[tuple[str, str], ...] = (("wait_tensor", "wait"), ("wait_tensors", "wait_all"))
WAIT_OPERATORS = frozenset({*(f"{FUNCTIONAL}::{row}" for row, _ in WAITS), "weft::wait_copy"})
"""Operators that complete launches or copies; the first argument is what they complete."""

COPIED: dict[str, Kind] = {
    "weft::copy_all_gather": Kind.ALL_GATHER,
    "weft::copy_reduce_scatter": Kind.REDUCE_SCATTER,
    "symm_mem::_low_contention_all_gather": Kind.ALL_GATHER,
    "symm_mem::_low_contention_reduce_scatter": Kind.REDUCE_SCATTER,
}
"""Launches that copy through symmetric memory."""


class HostCopy(Enum):
    """The direction of a copy between device and host memory. The value names its queue and its link."""

    TO_HOST = "to-host"
    FROM_HOST = "from-host"


HOST_COPIES: dict[str, HostCopy] = {"weft::offload": HostCopy.TO_HOST, "weft::fetch": HostCopy.FROM_HOST}
"""Copies between device and host memory that are launched, and waited for, like collectives."""
READ_NUMBER: Any = torch.ops.aten._local_scalar_dense.default
"""Reads one number from a tensor, for the host."""
COMMUNICATION_NAMESPACES = ("_dtensor", "fsdp", "symm_mem")
GROUP_ARGUMENTS = ("group_name", "group", "process_group")


@dataclass(frozen=True, slots=True)
class LaunchForm:
    """How one launching operator is read; derived from its row and its schema."""

    kind: Kind
    tensors: str
    """The argument that holds the data sent (the data received, for a recv)."""
    group: str
    coalesced: bool
    """Takes and returns a list of tensors."""
    written: str | None
    """The argument written to: the input of an in-place form, `out` of an out form, the buffer of a recv."""
    copied: bool = False
    """Whether copies through symmetric memory take the place of NCCL."""


def cached_by_target(function: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Remember the results of a function of an operator by its identity: hashing an operator runs Python code."""
    known: dict[int, tuple[Any, Result]] = {}  # with the operator, so that no other object gets its identity

    @functools.wraps(function)
    def look_up(target: Any) -> Result:
        try:
            return known[id(target)][1]
        except KeyError:
            pass
        known[id(target)] = target, function(target)
        return known[id(target)][1]

    return look_up


@cached_by_target
def launch_form(target: Any) -> LaunchForm | None:
    """The form of a launch of a known kind; None for any other target."""
    if not isinstance(target, OpOverload):
        return None
    namespace, _, name = target.name().partition("::")
    if target.name() in COPIED:
        return LaunchForm(COPIED[target.name()], "tensor", "group_name", coalesced=False, written=None, copied=True)
    if namespace not in (FUNCTIONAL, FUNCTIONAL + "_autograd"):
        return None
    kind = next((kind for row, _, kind in ROWS if row == name), None)
    if kind is None:
        return None
    arguments = schema_of(target).arguments
    tensors = next(a for a in arguments if "Tensor" in str(a.type))
    written = next((a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write), None)
    if kind in (Kind.RECV, Kind.BATCH_P2P):
        written = tensors.name  # the schema does not declare it, but the operator fills its argument and returns it
    group = next(a.name for a in arguments if a.name in GROUP_ARGUMENTS)
    return LaunchForm(kind, tensors.name, group, str(tensors.type) == "List[Tensor]", written)


@cached_by_target
def is_wait(target: Any) -> bool:
    """Whether the operator completes launches or copies."""
    return isinstance(target, OpOverload) and target.name() in WAIT_OPERATORS


@cached_by_target
def host_copy(target: Any) -> HostCopy | None:
    """The direction of an operator that copies between device and host memory; None for any other target."""
    return HOST_COPIES.get(target.name()) if isinstance(target, OpOverload) else None


def is_wrapper(target: Any) -> bool:
    """Whether the operator only wraps the result of a launch and returns its argument."""
    return isinstance(target, OpOverload) and target.name() == f"{FUNCTIONAL}::_wrap_tensor_autograd"


@cached_by_target
def is_communication(target: Any) -> bool:
    """Whether the operator launches communication, known or not. Waits are not launches."""
    if not isinstance(target, OpOverload) or is_wait(target) or is_wrapper(target):
        return False
    namespace = target.namespace
    if namespace.startswith(("c10d", "_c10d")) or namespace in COMMUNICATION_NAMESPACES:
        return True
    return any(a.name in GROUP_ARGUMENTS or "ProcessGroup" in str(a.type) for a in schema_of(target).arguments)


def kind_of(target: Any) -> Kind | None:
    """The kind of a launch; `BARRIER` for communication without a row; None for other operators."""
    form = launch_form(target)
    if form is not None:
        return form.kind
    return Kind.BARRIER if is_communication(target) else None


FUSED = frozenset(
    f"symm_mem::{name}"
    for name in (
        "fused_all_gather_matmul",
        "fused_all_gather_scaled_matmul",
        "fused_matmul_reduce_scatter",
        "fused_scaled_matmul_reduce_scatter",
    )
)
"""Operators that multiply while they gather or scatter. They are complete when the compute stream has run them."""


@cached_by_target
def is_fused(target: Any) -> bool:
    """Whether the operator multiplies while it communicates through symmetric memory."""
    return isinstance(target, OpOverload) and target.name() in FUSED


def uses_workspace(target: Any) -> bool:
    """Whether the operator communicates through the symmetric memory of its group."""
    return is_fused(target) or (isinstance(target, OpOverload) and target.name() in COPIED)


@cached_by_target
def has_unknown_result(target: Any) -> bool:
    """Whether only a live group knows the sizes that a communication operator returns."""
    form = launch_form(target)
    return kind_of(target) is Kind.BARRIER or (form is not None and form.copied)


def bind(node: Node) -> dict[str, Any]:
    """The arguments of a call by the names of its schema, defaults filled in."""
    return bind_arguments(node.target, node.args, node.kwargs)


def bind_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an operator by the names of its schema, defaults filled in."""
    bound: dict[str, Any] = {}
    for position, (name, kwarg_only, has_default, default) in enumerate(parameters(target)):
        if position < len(args) and not kwarg_only:
            bound[name] = args[position]
        elif name in kwargs:
            bound[name] = kwargs[name]
        elif has_default:
            bound[name] = default
    return bound


@cached_by_target
def parameters(target: Any) -> list[tuple[str, bool, bool, Any]]:
    """Name, whether by keyword only, whether there is a default, and the default of each argument of an operator."""
    arguments = schema_of(target).arguments
    return [
        (a.name, a.kwarg_only, a.has_default_value(), a.default_value if a.has_default_value() else None)
        for a in arguments
    ]


def attribute(owner: Any, path: str) -> Any:
    """The attribute at a dotted path below a module, or None."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


def value_of(node: Node) -> Any:
    """The fake value of a node, or None where it has no metadata."""
    return node.meta.get("val")


@functools.cache
def op_names() -> dict[str, OpOverload]:
    """Listing names of the communication operators that this torch has."""
    named = [(row, name) for row, name, _ in ROWS] + list(WAITS)
    found = {name: find_op(FUNCTIONAL, row, "default") for row, name in named}
    return {name: op for name, op in found.items() if op is not None}


# Python functions on numbers that tracing leaves in graphs.
PYTHON_FUNCTIONS: dict[str, Any] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (operator, "add sub mul truediv floordiv mod neg pow eq ne lt le gt ge and_ or_ not_ xor getitem abs pos"),
        (math, "floor ceil trunc sqrt"),
        (torch, "sym_max sym_min sym_int sym_float sym_not sym_ite sym_sum"),
    )
    for name in names.split()
    if hasattr(module, name)
}
_PYTHON_NAMES = {function: name for name, function in reversed(PYTHON_FUNCTIONS.items())}
_PYTHON_NAMES[operator.getitem] = "operator.getitem"


@functools.cache
def bare_op(name: str) -> OpOverload | None:
    """The overload that a bare aten name means: `Tensor` if there is one, otherwise `default`."""
    return find_op("aten", name, "Tensor") or find_op("aten", name, "default")


@cached_by_target
def qualified_name(target: Any) -> str:
    """The name of an operator with its namespace and overload, such as `aten::mul.Tensor`; empty for other targets."""
    return target.name() if isinstance(target, OpOverload) else ""


@cached_by_target
def name_of(target: Any) -> str | None:
    """The name of an operator in listings: short for aten and communication, else dotted; None if it has none."""
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if not isinstance(target, OpOverload):
        return _PYTHON_NAMES.get(target)
    short = next((name for name, op in op_names().items() if op is target), None)
    if short is not None:
        return short
    namespace, _, rest = target.name().partition("::")
    name, _, overload = rest.partition(".")
    if namespace == "aten" and name not in op_names() and bare_op(name) is target:
        return name
    overload = overload or "default"
    return f"{name}.{overload}" if namespace == "aten" else f"{namespace}.{name}.{overload}"


@functools.cache
def op_of(name: str) -> Any:
    """The operator that a listing calls `name`, or None. The inverse of `name_of`; a look-up, nothing is evaluated."""
    if name in PYTHON_FUNCTIONS:
        return PYTHON_FUNCTIONS[name]
    if name.startswith("higher_order."):
        return higher_order_op(name.removeprefix("higher_order."))
    parts = name.split(".")
    if len(parts) == 1:
        return op_names().get(name) or bare_op(name)
    if len(parts) == 2:
        return find_op("aten", *parts)
    return find_op(*parts) if len(parts) == 3 else None


@cached_by_target
def reads_data(target: Any) -> bool:
    """False for operators that look only at sizes and strides."""
    return not (isinstance(target, OpOverload) and target.name().startswith("aten::sym_"))


def is_random(op: OpOverload) -> bool:
    """Whether the operator draws from a random number generator."""
    return torch.Tag.nondeterministic_seeded in op.tags or op.name().partition(".")[0] in understated.DRAWS
