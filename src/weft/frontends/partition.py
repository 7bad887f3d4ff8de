"""A joint graph cut into a forward and a backward graph.

Contract: forward returns the loss and the values that backward uses, in one flat list; backward takes those values
under the same names, then the gradient of the loss, and returns the gradients. Values are saved where autograd saves
them; values that the joint graph recomputes in backward are not saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from weft.compat import input_nodes
from weft.frontends.provenance import BACKWARD
from weft.graph import metadata, ops
from weft.graph.edit import Edit, finish


def cut(joint: GraphModule, tangent: str) -> tuple[GraphModule, GraphModule]:
    """Forward and backward; the first output of the joint graph is the loss, the input `tangent` its gradient."""
    nodes = list(joint.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder" and node.name != tangent]
    seed = [node for node in nodes if node.op == "placeholder" and node.name == tangent]
    loss, *gradients = nodes[-1].args[0]
    calls = [node for node in nodes if node.op not in ("placeholder", "output")]
    second = _backward_of(calls, seed)
    first = [node for node in calls if node not in second]
    wanted = dict.fromkeys(source for node in second for source in input_nodes(node))
    wanted.update((node, None) for node in gradients if isinstance(node, Node))
    available = {*inputs, *first}
    saved = [node for node in nodes if node in wanted and node in available and node.op != "get_attr"]
    constants = [node for node in first if node.op == "get_attr" and node in wanted]
    forward = _extract(joint, inputs, first, [loss, *saved])
    backward = _extract(joint, [*saved, *seed], [*constants, *second], gradients)
    return forward, backward


def _backward_of(calls: Sequence[Node], seed: Iterable[Node]) -> dict[Node, None]:
    """The nodes made in backward, and those that need one of them."""
    found: dict[Node, None] = dict.fromkeys(seed)
    for node in calls:
        if node.meta.get("partitioner_tag") == BACKWARD or any(source in found for source in input_nodes(node)):
            found[node] = None
    return {node: None for node in found if node.op != "placeholder"}


def _extract(joint: GraphModule, inputs: Iterable[Node], calls: Iterable[Node], outputs: list[Any]) -> GraphModule:
    edit = Edit(Graph(), mode=metadata.mode_of(joint.graph.nodes))
    made: dict[Node, Node] = {node: edit.placeholder(node.name, ops.value_of(node)) for node in inputs}
    for node in calls:
        if node.op == "get_attr":
            made[node] = edit.attribute(str(node.target), ops.value_of(node), name=node.name)
            continue
        args, kwargs = map_arg((node.args, dict(node.kwargs)), made.__getitem__)
        target: Any = node.target
        made[node] = edit.call(target, args, kwargs, name=node.name, value=ops.value_of(node))
        made[node].meta.update(node.meta)
    edit.output(map_arg(outputs, made.__getitem__))
    return finish(joint, edit.graph)
