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
        """The number of a node's value. Chains of operators may be longer than Python's stack is deep."""
        pending = [node]
        while pending:
            last = pending[-1]
            is_seen_through = last not in self.numbers and (_is_launch(last) or self._computes(last))
            missing = [each for each in last.all_input_nodes if each not in self.numbers] if is_seen_through else []
            if missing:
                pending += reversed(missing)
            else:
                pending.pop()
                if last not in self.numbers:
                    self.numbers[last] = self.known.setdefault(self._key(last), len(self.known))
        return self.numbers[node]

    def _key(self, node: Node) -> Hashable:
        if self._computes(node):
            return node.target, self._freeze([node.args, list(node.kwargs.items())], node)
        return self.of_launch(Collective(node)) if _is_launch(node) else node

    def _computes(self, node: Node) -> bool:
        """Whether the value follows from the operator and the arguments alone."""
        if node.op != "call_function":
            return False
        return ops.is_wait(node.target) or is_cheap(node.target) or (self.all_operators and only_computes(node))

    def _freeze(self, arguments: Any, reader: Node) -> Hashable:
        """Arguments as text. Each node becomes its number and the count of writes to its storages before the reader."""
        position, effects = self.dag.index[reader], self.dag.effects

        def leaf(value: Any) -> Any:
            if not isinstance(value, Node):
                return value
            held = effects.held(self.dag.index[value])
            return self.of(value), [effects.memory.num_writes_before(storage, position) for storage in held]

        return repr(map_aggregate(arguments, leaf))


def _is_launch(node: Node) -> bool:
    """Whether the node launches a collective that has a result of its own."""
    form = ops.launch_form(node.target) if node.op == "call_function" else None
    return form is not None and form.written is None and form.kind not in ops.POINT_TO_POINT
