"""Inline the nested graphs that communicate, so that launches and waits are nodes of one graph.

Inductor wraps a wait in `control_deps` to order it after other nodes, and a repeated layer in `invoke_subgraph`. Both
run their nested graph once on their operands. Any other call decides by itself whether and how often it runs a graph,
so it stays.

Contract: the module does not change. Attributes of a nested graph keep their path in the module.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from weft.compat import CONTROL_DEPS, INVOKE, HigherOrderOperator, input_nodes
from weft.graph import ops
from weft.graph.edit import Edit, append_copy
from weft.graph.operator_effects import graph_arguments


def inlined_graph(module: GraphModule) -> Graph:
    """The graph of a module with the nodes of each nested graph that communicates in place of its call."""
    if not any(_nested_path(node) for node in module.graph.nodes):
        return module.graph
    edit = Edit(Graph(module))
    edit.output(_copy_into(edit.graph, module.graph, (), ""))
    return edit.graph


def _copy_into(made: Graph, graph: Graph, operands: tuple[Any, ...], prefix: str) -> Any:
    """Copy the nodes of a graph; returns its result. Without operands, placeholders are copied too."""
    values: dict[Node, Any] = {}
    given = iter(operands)
    for node in graph.nodes:
        if node.op == "output":
            return map_arg(node.args[0], values.__getitem__)
        path = _nested_path(node)
        if node.op == "placeholder" and prefix:
            values[node] = next(given)
        elif path:
            (nested,) = graph_arguments(node)
            inside = tuple(map_arg(node.args[2:], values.__getitem__))
            values[node] = _copy_into(made, nested.graph, inside, f"{prefix}{path}.")
        elif node.op != "get_attr" or not all(_nested_path(user) == node.target for user in node.users):
            values[node] = append_copy(made, node, values, prefix)
    return None


def _nested_path(node: Node) -> str:
    """The path of the nested graph that a call runs once, if that communicates; otherwise empty."""
    if not isinstance(node.target, HigherOrderOperator) or node.target.name() not in (CONTROL_DEPS, INVOKE):
        return ""
    nested = graph_arguments(node)
    if len(nested) != 1 or not any(communicates(inner) for inner in nested[0].modules()):
        return ""
    named = [source for source in input_nodes(node) if source.op == "get_attr"]
    owner = node.graph.owning_module
    return next(str(source.target) for source in named if ops.attribute(owner, str(source.target)) is nested[0])


def communicates(module: Any) -> bool:
    """Whether a node of a graph module launches a collective or waits for one."""
    nodes = module.graph.nodes if isinstance(module, GraphModule) else ()
    targets = [node.target for node in nodes if node.op == "call_function"]
    return any(ops.is_communication(target) or ops.is_wait(target) for target in targets)
