"""FrozenGraph: a graph as it is now, for analyses that are made later, if at all.

Contract: later edits of the module change nothing here. A graph that nobody edited serves as it is, with the Dag that
is known already; one that was edited is built again from the records that were taken.
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from operator import is_
from typing import Any

from torch.fx import GraphModule, Node

from weft.graph import ops
from weft.graph.dag import Dag
from weft.graph.edit import finish, graph_of


class FrozenGraph:
    """A graph module as it was."""

    def __init__(self, module: GraphModule, dag: Dag) -> None:
        self._given, self._dag = module, dag
        self._meta = dict(module.meta)
        self._records = [_record(node) for node in module.graph.nodes]
        held = {str(node.target): None for node in module.graph.nodes if node.op == "get_attr"}
        self._attributes = {path: ops.attribute(module, path) for path in held}

    @property
    def has_nested_graphs(self) -> bool:
        """Whether it has nested graphs, whose edits nobody can see here."""
        return any(isinstance(value, GraphModule) for value in self._attributes.values())

    @property
    def dag(self) -> Dag:
        """Its dependencies."""
        return self._dag if self.module is self._given else self._built_dag

    @property
    def module(self) -> GraphModule:
        """The module itself while it is as it was, otherwise one with an equal graph."""
        return self._given if self._is_as_it_was() else self._built

    @cached_property
    def _built_dag(self) -> Dag:
        return Dag(self._built.graph)

    def _is_as_it_was(self) -> bool:
        nodes = self._given.graph.nodes
        return (
            len(nodes) == len(self._records)
            and all(map(_is_as_recorded, nodes, self._records))
            and all(ops.attribute(self._given, path) is value for path, value in self._attributes.items())
            and self._given.meta.keys() == self._meta.keys()
            and all(self._given.meta[key] is value for key, value in self._meta.items())
        )

    @cached_property
    def _built(self) -> GraphModule:
        records = ((*record[:7], dict(zip(record[7::2], record[8::2], strict=True))) for record in self._records)
        module = finish(self._attributes, graph_of(records))
        module.meta = dict(self._meta)
        return module


def _record(node: Node) -> tuple[Any, ...]:
    """All that analyses read of a node: its call, its name and its metadata, key by key."""
    return node, node.op, node.target, node.args, node.kwargs, node.name, node.type, *chain(*node.meta.items())


def _is_as_recorded(node: Node, record: tuple[Any, ...]) -> bool:
    now = _record(node)
    return len(now) == len(record) and all(map(is_, now, record))
