"""Nodes that a CUDA graph cannot hold, because the host takes part in them each time that they run.

Contract: a node without an entry may still be refused by a compiler. A graph without tensors on a GPU has no entries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from weft.compat import OpOverload
from weft.graph import ops
from weft.graph.host import is_read_on_host


def why_not_captured(graph: Graph) -> Iterator[tuple[Node, str]]:
    """The nodes that the host takes part in, each with a clause that says how."""
    places = {node: {value.device.type for value in _tensors(node)} for node in graph.nodes}
    if not any("cuda" in found for found in places.values()):
        return
    for node in graph.nodes:
        target = node.target
        if node.op == "placeholder" and "cpu" in places[node]:
            yield node, "this input is in host memory"
        elif node.op != "call_function":
            continue
        elif ops.host_copy(target) is not None:
            yield node, "it copies to or from host memory on a stream of its own"
        elif is_read_on_host(node):
            yield node, "the host waits for data of the device"
        elif isinstance(target, OpOverload) and torch.Tag.cudagraph_unsafe in target.tags:
            yield node, "its operator says so (cudagraph_unsafe)"
        elif "cpu" in places[node] and not ops.is_wait(target):
            yield node, "it computes on the host"


def _tensors(node: Node) -> list[Tensor]:
    value = ops.value_of(node)
    return [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, Tensor)]
