"""Carry out a `Repeat` in a graph."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from weft.compat import input_nodes
from weft.cost.execution import BACKWARD
from weft.graph import ops
from weft.graph.edit import Edit
from weft.graph.host_copies import FETCH, OFFLOAD, WAIT_COPY
from weft.graph.operator_effects import is_alias, only_computes
from weft.plan.plan import Offload, Repeat


def repeat(edit: Edit, nodes: MutableMapping[str, Node], action: Repeat) -> None:
    """Make the copies, redirect users to them, and remove nodes that nothing uses any more."""
    latest = {nodes[name]: nodes[value] for name, value in action.values}
    for offload in action.offloads:
        latest[nodes[offload.value]] = _offload(edit, nodes, offload)
    for name, copy, before in action.copies:
        node = nodes[name]
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: latest.get(n, n))
        target: Any = node.target
        made = edit.call(target, args, kwargs, before=nodes[before], name=copy, like=[node])
        nodes[copy] = latest[node] = _in_backward(made)
    for name in action.users:
        user = nodes[name]
        args, kwargs = map_arg((user.args, dict(user.kwargs)), lambda n: latest.get(n, n))
        edit.set_arguments(user, args, kwargs)
    edit.replace_each({nodes[old]: nodes[new] for old, new in action.replaced})
    _erase_unused(edit, [*(nodes[old] for old, _ in action.replaced), *(nodes[name] for name, _, _ in action.copies)])


def _offload(edit: Edit, nodes: MutableMapping[str, Node], offload: Offload) -> Node:
    """Copy a value to host memory and back; return the node that holds it again."""
    value, fetch_before = nodes[offload.value], nodes[offload.fetch_before]
    first, second, third, last = offload.names
    launch = edit.call(OFFLOAD, (value,), before=value.next, name=first, like=[value])
    copy = edit.call(WAIT_COPY, (launch, value), before=nodes[offload.wait_before], name=second, like=[value])
    arguments = (copy, ops.value_of(value).device)
    fetch = _in_backward(edit.call(FETCH, arguments, before=fetch_before, name=third, like=[value]))
    nodes[last] = _in_backward(edit.call(WAIT_COPY, (fetch, copy), before=fetch_before, name=last, like=[value]))
    return nodes[last]


def _in_backward(node: Node) -> Node:
    if "partitioner_tag" in node.meta:
        node.meta["partitioner_tag"] = BACKWARD
    return node


def _erase_unused(edit: Edit, candidates: list[Node]) -> None:
    erased: dict[Node, None] = {}
    waiting = list(candidates)
    while waiting:
        node = waiting.pop()
        if node in erased or not is_removable(node) or any(user not in erased for user in node.users):
            continue
        erased[node] = None
        edit.erase(node)
        waiting += input_nodes(node)


def is_removable(node: Node) -> bool:
    """Whether a node whose value nothing uses may go."""
    if node.op != "call_function":
        return False
    form = ops.launch_form(node.target)
    is_launch = form is not None and form.written is None
    return is_launch or only_computes(node) or is_alias(node) or ops.is_wait(node.target)
