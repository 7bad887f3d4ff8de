"""Value numbering: finds values that are equal by construction.

Contract: equal keys mean equal values on every rank; different keys mean nothing. Numbering goes through collectives
and the cheap operators around them, or through all operators that only compute. Each write to a tensor gives it a new
value.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch.fx import Node
from torch.fx.node import map_aggregate

from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.operator_effects import is_cheap, only_computes


class ValueNumbers:
    """Numbers for the values of one Dag."""

    def __init__(self, dag: Dag, *, all_operators: bool = False) -> None:
        self.dag = dag
        self.all_operators = all_operators
        """Whether to number every operator that only computes, not just cheap ones."""
        self.numbers: dict[Node, int] = {}
        self.known: dict[Hashable, int] = {}

    def of_launch(self, collective: Collective) -> Hashable:
        """The key of a launch: operator, arguments and group."""
        arguments = ops.bind(collective.launch) | {collective.form.group: collective.group}
        return collective.launch.target, self._freeze(list(arguments.items()), collective.launch)

    def of(self, node: Node) -> int:
        """The number of a node's value."""
        if node not in self.numbers:
            self.numbers[node] = self.known.setdefault(self._key(node), len(self.known))
        return self.numbers[node]

    def _key(self, node: Node) -> Hashable:
        if node.op != "call_function":
            return node
        if ops.is_wait(node.target) or is_cheap(node.target) or (self.all_operators and only_computes(node)):
            return node.target, self._freeze([node.args, list(node.kwargs.items())], node)
        form = ops.launch_form(node.target)
        if form is not None and form.written is None and form.kind not in ops.POINT_TO_POINT:
            return self.of_launch(Collective(node))
        return node

    def _freeze(self, arguments: Any, reader: Node) -> Hashable:
        """Arguments as text. Each node becomes its number and the count of writes to its storages before the reader."""
        position, effects = self.dag.index[reader], self.dag.effects

        def leaf(value: Any) -> Any:
            if not isinstance(value, Node):
                return value
            held = effects.held(self.dag.index[value])
            return self.of(value), [effects.memory.num_writes_before(storage, position) for storage in held]

        return repr(map_aggregate(arguments, leaf))
