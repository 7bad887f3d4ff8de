"""Execution: which nodes a compiler fuses, and how long the host takes to issue each node.

    compiled      forward and backward are compiled, the optimizer runs eagerly over lists of tensors
    blocks        only repeated blocks (modules whose path has a number, such as `layers.7`) are compiled
    eager         every operator is a kernel
    cuda-graphs   as `compiled`, and forward and backward are replayed without work for the host

Without an execution, everything is compiled if the device says so, and the host is never in the way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any, Literal, get_args

from torch.fx import Node

from weft.cost.device import Device
from weft.cost.kernels import HostTimes
from weft.cost.traffic import TrafficKind
from weft.errors import ClusterError, compose, nearest
from weft.graph.dag import Dag
from weft.graph.edit import IN_POLICY_KEY

Execution = Literal["", "compiled", "blocks", "eager", "cuda-graphs"]
EXECUTIONS = tuple(name for name in get_args(Execution) if name)
BACKWARD, OPTIMIZER = "is_backward", "is_optimizer"
"""The values of `partitioner_tag` in the metadata of a node of backward, and of one that updates parameters."""
_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")


def check_execution(name: str) -> None:
    """Raise unless an execution has this name."""
    if name not in EXECUTIONS:
        do = nearest(name, EXECUTIONS) or f"use one of {', '.join(EXECUTIONS)}"
        raise ClusterError(compose("execution", f"no execution is called {name!r}", do=do))


def is_optimizer(node: Node) -> bool:
    """Whether a node belongs to the optimizer."""
    return node.meta.get("partitioner_tag") == OPTIMIZER


def is_backward(node: Node) -> bool:
    """Whether a node belongs to backward."""
    return node.meta.get("partitioner_tag") == BACKWARD


def compiled_nodes(dag: Dag, device: Device) -> list[bool]:
    """For each node, whether a compiler may fuse it with its neighbours."""
    execution = device.execution
    if execution == "":
        return [device.fuses] * len(dag.nodes)
    if execution == "eager":
        return [False] * len(dag.nodes)
    if execution == "blocks":
        return [is_in_block(node) and not is_optimizer(node) for node in dag.nodes]
    return [not is_optimizer(node) for node in dag.nodes]


def host_ns(dag: Dag, device: Device, kinds: Sequence[TrafficKind], regions: Sequence[int]) -> tuple[int, ...]:
    """The time that the host takes to issue each node; empty if the host is never in the way."""
    times = device.host
    if device.execution == "" or times is None:
        return ()
    compiled = compiled_nodes(dag, device)
    is_replayed = device.execution == "cuda-graphs"
    is_issued = [node.op == "call_function" and not (compiled[i] and is_replayed) for i, node in enumerate(dag.nodes)]
    return tuple(
        round(_issue_us(node, kinds[i], compiled[i], regions[i] == i, times) * 1000) if is_issued[i] else 0
        for i, node in enumerate(dag.nodes)
    )


def _issue_us(node: Node, kind: TrafficKind, is_compiled: bool, is_head: bool, times: HostTimes) -> float:
    if kind is TrafficKind.BOUNDARY:
        return times.collective_us
    if is_compiled:
        return times.launch_us if is_head and kind >= TrafficKind.FUSED else 0.0
    if is_optimizer(node):
        return times.optimizer_us if kind >= TrafficKind.FUSED else 0.0
    if node.target is getitem:  # an item of a tuple or list calls no operator
        return 0.0
    own_us = times.operator_us if kind >= TrafficKind.FUSED else times.view_us if kind is TrafficKind.VIEW else 0.0
    return own_us + (times.policy_us if node.meta.get(IN_POLICY_KEY) else 0.0)


def is_in_block(node: Node) -> bool:
    """Whether a node belongs to a repeated block: a module whose path has a number."""
    stack: Mapping[str, Any] | None = node.meta.get("nn_module_stack")
    return bool(stack) and any(_NUMBER.search(str(path)) for path in stack)
