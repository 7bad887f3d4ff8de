"""Hazards of tensors in flight: a read before the wait, or a write while a launch still reads or writes the tensor.

Contract: decided by the storages of the actual tensors. Whether a node reads a tensor is decided by its results: a node
that returns only views of its arguments, and writes nothing, has read no values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from weft.compat import HigherOrderOperator, OpOverload, schema_of, storage_key
from weft.verification.rank import tensors_in
from weft.verification.virtual.in_flight import TensorsInFlight

# Operators and methods that look at the shape of a tensor and never at its values.
SHAPE_METHODS = frozenset({"size", "stride", "numel", "dim"})
SHAPE_OPERATORS = frozenset(
    f"aten::{name}"
    for name in (
        *SHAPE_METHODS,
        *("sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "_assert_tensor_metadata"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)


@dataclass(frozen=True)
class Hazard:
    """A forbidden access to a tensor in flight."""

    verb: str
    """`reads` or `writes`."""
    name: str
    """The argument that holds the tensor."""
    launch: Node
    role: str
    """How the launch still uses the tensor: `reads` or `writes`."""

    def __str__(self) -> str:
        if self.name == self.launch.name:
            return f"{self.verb} {self.name} before its wait"
        return f"{self.verb} {self.name}, which {self.launch.name} still {self.role}"


@dataclass(frozen=True)
class Given:
    """The tensors that a node takes, each with the name of its argument."""

    items: Sequence[tuple[str, Tensor]]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in self.items]

    def name_of(self, tensor: Tensor) -> str:
        """The argument that holds this tensor, or another tensor on the same storage."""
        same = [name for name, other in self.items if other is tensor]
        key = storage_key(tensor)
        return (same or [name for name, other in self.items if storage_key(other) == key])[0]

    def is_only_renamed(self, node: Node, value: Any) -> bool:
        """Whether a node without writes read no values: it returned shapes, or views of its arguments."""
        target: Any = node.target
        if isinstance(target, OpOverload) and target.name().partition(".")[0] in SHAPE_OPERATORS:
            return True
        if (node.op == "call_method" and target in SHAPE_METHODS) or target is getattr:
            return True
        if isinstance(target, HigherOrderOperator) or node.op == "call_module":
            return False
        results, storages = list(tensors_in(value)), {storage_key(tensor) for tensor in self.tensors}
        return bool(results) and all(storage_key(result) in storages for result in results)


def read_hazard(flights: TensorsInFlight, given: Given, tensors: Iterable[Tensor]) -> Hazard | None:
    """The hazard of the first tensor that has not arrived, or None."""
    for tensor in tensors:
        for flight in flights.writing(tensor):
            return Hazard("reads", given.name_of(tensor), flight.launch, "writes")
    return None


def write_hazard(flights: TensorsInFlight, given: Given, tensors: Iterable[Tensor]) -> Hazard | None:
    """The hazard of the first tensor that a launch still reads or writes, or None."""
    for tensor in tensors:
        for role, found in (("writes", flights.writing(tensor)), ("reads", flights.reading(tensor))):
            if found:
                return Hazard("writes", given.name_of(tensor), found[0].launch, role)
    return None


@functools.cache
def written_arguments(target: Any) -> tuple[str, ...]:
    """The arguments that an operator writes according to its schema."""
    if not isinstance(target, OpOverload):
        return ()
    arguments = schema_of(target).arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
