"""Owners of memory: the part of a training step that each node's storage belongs to, and the stream that allocates it.

Contract: decided by data flow, never by names. An input is a parameter if a product depends on it and the optimizer
writes it; it is optimizer state if it is written and no product depends on it. A value that is only moved or cast from
parameters is a weight: a communication buffer before it is gathered, a gathered weight afterwards. A value on which no
later product depends is a gradient, or a temporary of the optimizer if it depends on optimizer state. Everything else
is an activation, or the gradient of one. A graph without an optimizer writes no input: there, every input that a
product depends on counts as a parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from enum import Enum, StrEnum
from typing import Any

from torch import Tensor
from torch.fx import Node

from weft.compat import OpOverload, input_nodes
from weft.cost.execution import is_optimizer
from weft.graph import ops
from weft.graph.dag import Dag
from weft.graph.operator_effects import is_cheap, profile
from weft.graph.ops import Kind
from weft.graph.products import is_product

DEFAULT_STREAM = "default"
GRAPH_POOL = "CUDA graphs"
"""Stands for a stream: torch allocates what a CUDA graph uses in a private pool, which nothing else may use until the
graph is deleted (`aten/src/ATen/cuda/CUDAGraph.cpp`). Graphs of one step share a pool, as torch.compile lets them."""
OWN_STREAMS = frozenset({"fsdp2", "hsdp", "async-tp"})
"""Runtimes that allocate gathered and reduced buffers on streams of their own: torch, `_fsdp_param_group.py`."""
COPIES = frozenset(
    [
        "aten::cat",
        "aten::split_with_sizes_copy",
        "aten::_chunk_cat",
        "aten::constant_pad_nd",
        "aten::_foreach_copy",
        "weft::pack",
    ]
)
"""Operators that only move data, besides the cheap ones."""


class MemoryPart(StrEnum):
    """The purpose that memory serves."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer state"
    INPUTS = "batch and constants"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    GATHERED = "gathered weights"
    COMMUNICATION = "communication buffers"
    TEMPORARIES = "optimizer temporaries"
    WORKSPACE = "workspace"


Owner = tuple[MemoryPart, str]
"""A part, and the stream that allocates."""


class _Weight(Enum):
    NONE = 0
    SHARD = 1
    GATHERED = 2


def owners_of(dags: Sequence[Dag], runtime: str | None = None, execution: str = "") -> list[Owner]:
    """The owner of each node of graphs that run one after the other, in their order."""
    found: list[Owner] = []
    for k, dag in enumerate(dags, 1):
        owners = _owners(dag, runtime in OWN_STREAMS, is_last=k == len(dags))
        if execution == "cuda-graphs":
            owners = [_in_graph_pool(node, owner) for node, owner in zip(dag.nodes, owners, strict=True)]
        found += owners
    return found


def _in_graph_pool(node: Node, owner: Owner) -> Owner:
    """The owner of a node if forward and backward are replayed as CUDA graphs, and the optimizer is not."""
    part, stream = owner
    is_replayed = node.op == "call_function" and not is_optimizer(node) and stream == DEFAULT_STREAM
    return (part, GRAPH_POOL) if is_replayed else owner


def _owners(dag: Dag, own_streams: bool, is_last: bool) -> Iterable[Owner]:
    product_after, sends = _later_uses(dag, is_last)
    written = dag.effects.memory.direct_writes
    weights = [_Weight.NONE] * len(dag.nodes)
    parts = [MemoryPart.INPUTS] * len(dag.nodes)
    updates = [False] * len(dag.nodes)
    streams = [DEFAULT_STREAM] * len(dag.nodes)
    inputs = [i for i, node in enumerate(dag.nodes) if node.op in ("placeholder", "get_attr")]
    is_written = {i: any(storage in written for storage in dag.effects.held(i)) for i in inputs}
    has_updates = any(is_written.values())
    for i in inputs:
        if product_after[i] and (is_written[i] or not has_updates) and _is_floating(dag.nodes[i]):
            parts[i], weights[i] = MemoryPart.PARAMETERS, _Weight.SHARD
        elif is_written[i] and not product_after[i]:
            parts[i], updates[i] = MemoryPart.OPTIMIZER_STATE, True
    for i, node in enumerate(dag.nodes):
        if node.op != "call_function":
            continue
        sources = [dag.index[source] for source in input_nodes(node)]
        form = ops.launch_form(node.target)
        held = [weights[j] for j in sources]
        is_weight = bool(held) and _Weight.NONE not in held and (form is not None or _is_moved(node.target))
        if is_weight and (product_after[i] or sends[i] or form is not None):
            is_gathered = _Weight.GATHERED in held or (form is not None and form.kind is Kind.ALL_GATHER)
            weights[i] = _Weight.GATHERED if is_gathered else _Weight.SHARD
            parts[i] = MemoryPart.GATHERED if is_gathered or not sends[i] else MemoryPart.COMMUNICATION
            if own_streams and (form is not None or parts[i] is MemoryPart.COMMUNICATION):
                streams[i] = Kind.ALL_GATHER.phrase
            continue
        if product_after[i]:
            parts[i] = MemoryPart.ACTIVATIONS
            continue
        updates[i] = any(updates[j] or parts[j] is MemoryPart.PARAMETERS for j in sources)
        if updates[i]:
            parts[i] = MemoryPart.TEMPORARIES
        elif form is not None:
            parts[i] = MemoryPart.GRADIENTS
            streams[i] = form.kind.phrase if own_streams else DEFAULT_STREAM
        elif own_streams and _is_moved(node.target) and any(streams[j] != DEFAULT_STREAM for j in sources):
            # Reduced gradients are views of the buffers that their stream allocated, whatever copies the graph has.
            parts[i], streams[i] = MemoryPart.GRADIENTS, streams[sources[0]]
        else:
            parts[i] = MemoryPart.COMMUNICATION if sends[i] and _is_moved(node.target) else MemoryPart.GRADIENTS
    return zip(parts, streams, strict=True)


def _later_uses(dag: Dag, is_last: bool) -> tuple[list[bool], list[bool]]:
    """For each node, whether a product depends on it, and whether it is sent, at most moved and cast before."""
    product_after, sends = [False] * len(dag.nodes), [False] * len(dag.nodes)
    for i in range(len(dag.nodes) - 1, -1, -1):
        for user in dag.nodes[i].users:
            j = dag.index[user]
            product_after[i] |= product_after[j] or _is_use(user) or (user.op == "output" and not is_last)
            sends[i] |= ops.launch_form(user.target) is not None or (sends[j] and _is_moved(user.target))
    return product_after, sends


def _is_use(node: Node) -> bool:
    return is_product(node.target) or (node.op == "call_function" and profile(node.target).opaque)


@functools.cache
def _is_moved(target: Any) -> bool:
    if ops.is_wait(target) or is_cheap(target):
        return True
    return isinstance(target, OpOverload) and target.name().partition(".")[0] in COPIES


def _is_floating(node: Node) -> bool:
    value = ops.value_of(node)
    return not isinstance(value, Tensor) or value.is_floating_point()
