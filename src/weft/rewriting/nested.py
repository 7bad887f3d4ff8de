"""Nested graphs: the graphs that calls of a graph run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.fx import Graph, GraphModule, Node

from weft.compat import HigherOrderOperator
from weft.plan.plan import Rewrite

NESTING = frozenset(
    (
        *("cond", "while_loop", "scan", "map_impl", "invoke_subgraph", "wrap", "tag_activation_checkpoint"),
        *("wrap_activation_checkpoint", "wrap_with_set_grad_enabled", "wrap_with_autocast"),
    )
)
"""Operators that run a nested graph unchanged; others may use it as a template."""


def all_nested_graphs(graph: Graph, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Graph]]:
    """The graphs that calls of a graph run, at any depth, each with the path of attribute names that leads to it."""
    owner = graph.owning_module
    for node in graph.nodes:
        if node.op != "get_attr" or not node.users or owner is None:
            continue
        runs = all(isinstance(u.target, HigherOrderOperator) and u.target.name() in NESTING for u in node.users)
        nested = getattr(owner, str(node.target), None)
        if runs and isinstance(nested, GraphModule) and _has_types(nested):
            inner = (*path, str(node.target))
            yield inner, nested.graph
            yield from all_nested_graphs(nested.graph, inner)


def _has_types(module: GraphModule) -> bool:
    return all("val" in n.meta for n in module.graph.nodes if n.op in ("placeholder", "call_function"))


def removal_of(nodes: Sequence[Node]) -> list[Rewrite]:
    """The action that removes nodes from a graph; no action for no nodes."""
    names = tuple(node.name for node in nodes)
    return [Rewrite((), names[0], (), names)] if names else []
