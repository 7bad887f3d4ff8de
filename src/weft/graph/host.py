"""Copies between a device and the host, and the synchronisation that makes their results safe to access.

A copy with `non_blocking` returns before it is complete. A program reads the result on the host after something has
waited for the device: a blocking copy, `.item()`, an event. No data edge expresses this; only the order does.

Contract: decided by schema and by the devices in the metadata. If the devices are unknown, a copy that may be
asynchronous counts as asynchronous, and a copy that may block does not count as a synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from weft.compat import OpOverload, input_nodes
from weft.graph import ops, understated
from weft.graph.host_copies import COPY_TO_HOST
from weft.graph.ops import cached_by_target

EARLY = "non_blocking"
"""The argument that makes a copy asynchronous."""
DESTINATIONS = ("dst", "self")
"""The argument that a two-argument copy writes; the other one is the source."""
INDEXING = frozenset(
    f"aten::{name}" for name in ("index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put")
) | {"aten::_index_put_impl_"}
"""Operators that count the elements of a mask on the host. Indices that are numbers need no such count."""
MASKS = (torch.bool, torch.uint8)


class Wait(Enum):
    """The effect of a node on the order of host and device."""

    LANDS = "a copy to the host that may still be in flight after the node"
    LEAVES = "a copy from the host that may still be in flight after the node"
    SYNCS = "the host waits for all earlier work of the device"
    MAY_SYNC = "the host may wait for the device"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A node that copies between host and device, or makes the host wait."""

    wait: Wait
    sources: tuple[Node, ...] = ()
    destinations: tuple[Node, ...] = ()
    """The nodes whose storage is written: arguments, or the copy itself."""


@cached_by_target
def may_transfer(target: Any) -> bool:
    """Whether calls of an operator may copy between host and device, or make the host wait for the device."""
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.dynamic_output_shape in target.tags or _reads_on_host(target) or _name(target) in INDEXING:
        return True
    return _may_be_early(target)


def _reads_on_host(op: OpOverload) -> bool:
    return torch.Tag.data_dependent_output in op.tags or _name(op) in understated.READS_ON_HOST


def _name(op: OpOverload) -> str:
    return op.name().partition(".")[0]


def is_read_on_host(node: Node) -> bool:
    """Whether the host waits for device data at a node: `.item()`, a size that depends on data, a blocking copy.

    Captures often pretend that the CPU is the device. A read therefore counts on any device, and a copy only if its
    metadata names another device and the CPU.
    """
    if node.op != "call_function" or not may_transfer(node.target):
        return False
    target: Any = node.target
    if _name(target) in INDEXING:
        values = [ops.value_of(index) for index in _nodes([ops.bind(node)["indices"]])]
        return any(isinstance(value, Tensor) and value.dtype in MASKS for value in values)
    if torch.Tag.dynamic_output_shape in target.tags or _reads_on_host(target):
        return not (_has_arrived(node) or _is_size_given(node))
    transfer = transfer_of(node)
    return transfer is not None and transfer.wait is Wait.SYNCS


def _has_arrived(node: Node) -> bool:
    """Whether a call reads what a copy has brought to the host, so that only the copy waits for the device."""
    source: Node | None = next(iter(input_nodes(node)), None)
    while source is not None and source.op == "call_function":
        if source.target is COPY_TO_HOST:
            return True
        if _may_be_early(source.target):
            found = transfer_of(source)
            return found is not None and found.wait in (Wait.SYNCS, Wait.LANDS) and _device(source) == "cpu"
        if _device(source) != "cpu" or len(input_nodes(source)) != 1:
            return False
        source = next(iter(input_nodes(source)))
    return False


def _is_size_given(node: Node) -> bool:
    """Whether a call such as `repeat_interleave` takes the size of its result as an argument, and need not count."""
    target: Any = node.target
    names = [name for name, *_ in ops.parameters(target)]
    return "output_size" in names and ops.bind(node).get("output_size") is not None


def transfer_of(node: Node) -> Transfer | None:
    """The transfer or synchronisation of a node; None if it has none."""
    target: Any = node.target
    if not may_transfer(target) or (_may_be_early(target) and _is_on_one_device(node)):
        return None
    bound = ops.bind(node)
    if _name(target) in INDEXING and _has_plain_indices(bound):
        return None
    if EARLY not in bound:
        on_host = all(_device(source) == "cpu" for source in _nodes([list(bound.values())]))
        waits = Wait.SYNCS if _reads_on_host(target) else Wait.MAY_SYNC
        return None if on_host else Transfer(waits)
    sources, destinations = _ends(node, bound)
    begins, ends = ([_device(end) for end in both] for both in (sources, destinations))
    is_early = bound[EARLY] is not False and bound[EARLY] is not None
    may_land = any(place != "cpu" for place in begins) and any(place in ("cpu", None) for place in ends)
    if may_land and is_early:
        return Transfer(Wait.LANDS, sources, destinations)
    if may_land:
        is_known = None not in (*begins, *ends)
        return Transfer(Wait.SYNCS if is_known else Wait.MAY_SYNC)
    may_leave = any(place in ("cpu", None) for place in begins) and any(place != "cpu" for place in ends)
    return Transfer(Wait.LEAVES, sources, destinations) if may_leave and is_early else None


def _has_plain_indices(bound: dict[str, Any]) -> bool:
    """Whether all indices are known to be numbers on the device of the indexed tensor."""
    place = _device(bound["self"]) if isinstance(bound.get("self"), Node) else None
    values = [ops.value_of(index) for index in _nodes([bound["indices"]])]
    plain = [isinstance(v, Tensor) and v.dtype not in MASKS and v.device.type == place for v in values]
    return place is not None and all(plain)


@cached_by_target
def _may_be_early(target: Any) -> bool:
    """Whether an operator has the argument that makes a copy asynchronous."""
    return isinstance(target, OpOverload) and any(name == EARLY for name, *_ in ops.parameters(target))


def _is_on_one_device(node: Node) -> bool:
    """Whether all tensors that a node takes and returns are known to be on one device."""
    place = _device(node)
    return place is not None and all(_device(source) == place for source in input_nodes(node))


def _ends(node: Node, bound: dict[str, Any]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The nodes that a copy reads, and those that it writes."""
    names = [name for name, value in bound.items() if _nodes([value])]
    into = next((name for name in DESTINATIONS if name in names), None) if len(names) > 1 else None
    sources = [bound[name] for name in names if name != into]
    return _nodes(sources), _nodes([bound[into]]) if into is not None else (node,)


def _device(node: Node) -> str | None:
    """The device of a node's tensors; None if it is unknown or they are on several devices."""
    value = ops.value_of(node)
    if isinstance(value, Tensor):
        return value.device.type
    found = {t.device.type for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, Tensor)}
    return found.pop() if len(found) == 1 else None


def _nodes(parts: Iterable[Any]) -> tuple[Node, ...]:
    found: list[Node] = []
    for part in parts:
        if isinstance(part, Node):
            found.append(part)
        elif isinstance(part, list | tuple):
            found += _nodes(part)
    return tuple(found)
