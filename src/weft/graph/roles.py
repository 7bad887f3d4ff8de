"""Roles of collectives: each carries parameters, gradients or activations.

Contract: decided by the input of a collective and the uses of its result, never by names. A collective without a
reduction carries parameters if it sends graph inputs, at most cast, scaled, reshaped or packed. It carries activations
if a product takes these inputs as rows: as its left operand, next to a weight that this group does not gather. A
collective carries a gradient if its result reaches no matrix product, convolution, attention or embedding: gradients
only go through scaling, clipping, accumulation, the optimizer and other collectives. A reduce-scatter of products
carries activations all the same in a group that gathers activations and no parameters: only tensor parallelism does so.
"""

from __future__ import annotations

import functools
import heapq
from enum import StrEnum

from torch.fx import Node

from weft.graph import ops
from weft.graph.collective import Collective, collectives, num_bytes
from weft.graph.dag import Dag
from weft.graph.groups import GroupTable
from weft.graph.operator_effects import is_cheap, is_pointwise, profile
from weft.graph.products import OPERANDS, is_product

PACKS = frozenset({"aten::cat", "weft::pack"})
"""Operators that put several tensors into the buffer of a bucket."""
ROW_REDUCTIONS = frozenset({"aten::mean.dim", "aten::sum.dim_IntList", "aten::amax", "aten::amin"})
"""Reductions that norms apply to rows."""


class Role(StrEnum):
    """The kind of tensor that a collective carries."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"


class Roles:
    """The roles of the collectives of one Dag."""

    def __init__(self, dag: Dag) -> None:
        self.dag = dag

    def of(self, collective: Collective) -> Role:
        """The role of a collective."""
        if collective.kind not in ops.REDUCTIONS:
            role = self._gathered(collective)
            if role is not None:
                return role
        elif collective.kind is ops.Kind.REDUCE_SCATTER and self._is_of_rows(collective):
            return Role.ACTIVATIONS
        return Role.GRADIENTS if self._product_after[self.dag.index[collective.launch]] is None else Role.ACTIVATIONS

    def _gathered(self, collective: Collective) -> Role | None:
        """The role of a collective that sends graph inputs; None if it sends anything else."""
        if any(_not_cheap(source) is not None for source in collective.inputs):
            return None
        return Role.PARAMETERS if self._product_of_rows(collective) is None else Role.ACTIVATIONS

    def tensor_groups(self, groups: GroupTable) -> set[str]:
        """The canonical names of the groups of tensor parallelism, which carry mostly activations, by bytes.

        A group of data parallelism may carry a few too: a count of tokens, or the statistics of a batch norm.
        """
        carried: dict[str, list[tuple[int, int]]] = {}
        for each in collectives(self.dag.nodes[0].graph) if self.dag.nodes else ():
            totals = carried.setdefault(groups.canonical(each.group), [(0, 0), (0, 0)])
            number = int(self.of(each) is Role.ACTIVATIONS)
            num_bytes, count = totals[number]
            totals[number] = (num_bytes + max(each.input_bytes or 0, each.output_bytes or 0), count + 1)
        return {name for name, (others, activations) in carried.items() if activations > others}

    def told_by(self, collective: Collective) -> Node | None:
        """The node that decided: the one that rules out a parameter, or the product that rules out a gradient."""
        if collective.kind not in ops.REDUCTIONS:
            computed = next((node for node in map(_not_cheap, collective.inputs) if node is not None), None)
            return computed or self._product_of_rows(collective)
        return self._product_after[self.dag.index[collective.launch]]

    def _product_of_rows(self, collective: Collective) -> Node | None:
        """The product that takes the result of a collective as its left operand, next to a weight; None without one."""
        index = self.dag.index
        known = {collective.launch, *collective.results, *collective.waits}
        front = sorted({index[user] for node in known for user in node.users})
        seen = set(front)
        while front:
            node = self.dag.nodes[heapq.heappop(front)]
            if node.op != "call_function" or node in known or is_product(node.target):
                if self._takes_rows(node, known, collective):
                    return node
                continue
            others = [source for source in node.all_input_nodes if source not in known]
            if not _keeps_rows(node) or any(not self._scales(other, node) for other in others):
                continue
            known.add(node)
            for user in map(index.__getitem__, node.users):
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(front, user)
        return None

    def _takes_rows(self, node: Node, known: set[Node], collective: Collective) -> bool:
        """Whether a node is a product whose left operand is known, and whose right one is a weight."""
        operands = OPERANDS.get(ops.qualified_name(node.target))
        if operands is None:
            return False
        left, right = (ops.bind(node)[name] for name in operands[:2])
        return left in known and right not in known and self._is_weight(right, collective.group)

    def _is_weight(self, node: Node, group: str) -> bool:
        """Whether a tensor consists of graph inputs, perhaps gathered, but not by this group."""
        source = _not_cheap(node)
        while source is not None and ops.is_wait(source.target):
            launch = next((n for n in source.all_input_nodes if ops.kind_of(n.target) is ops.Kind.ALL_GATHER), None)
            if launch is None or Collective(launch).group == group:
                return False
            source = next((n for n in map(_not_cheap, Collective(launch).inputs) if n is not None), None)
        return source is None

    def _scales(self, other: Node, node: Node) -> bool:
        """Whether an operand of a pointwise call is only broadcast over its rows, such as the weight of a norm."""
        small, large = num_bytes(ops.value_of(other)), num_bytes(ops.value_of(node))
        return _not_cheap(other) is None and small is not None and large is not None and small < large

    @functools.cached_property
    def _groups_of_rows(self) -> set[str]:
        """The run-time names of the groups that gather activations, and no parameters."""
        rows, parameters = set[str](), set[str]()
        for each in collectives(self.dag.nodes[0].graph):
            if each.kind is ops.Kind.ALL_GATHER:
                (parameters if self._gathered(each) is Role.PARAMETERS else rows).add(each.group)
        return rows - parameters

    def _is_of_rows(self, collective: Collective) -> bool:
        """Whether a reduction sums products, in a group that gathers activations."""
        return all(map(_is_of_products, collective.inputs)) and collective.group in self._groups_of_rows

    @functools.cached_property
    def _product_after(self) -> list[Node | None]:
        """For each node, the first product or opaque call among its transitive users."""
        dag = self.dag
        found: list[Node | None] = [None] * len(dag.nodes)
        for i in range(len(dag.nodes) - 1, -1, -1):
            for user in dag.nodes[i].users:
                opaque = user.op == "call_function" and profile(user.target).opaque
                found[i] = user if opaque or is_product(user.target) else found[dag.index[user]]
                if found[i] is not None:
                    break
        return found


def _not_cheap(node: Node) -> Node | None:
    """The first node on the way back that does more than prepare or pack graph inputs; None if all are cheap."""
    stack = [node]
    while stack:
        node = stack.pop()
        if node.op in ("placeholder", "get_attr"):
            continue
        packs = ops.qualified_name(node.target) in PACKS
        cheap = packs or (len(node.all_input_nodes) == 1 and is_cheap(node.target))
        if node.op != "call_function" or not cheap or ops.is_wait(node.target):
            return node
        stack += node.all_input_nodes
    return None


def _keeps_rows(node: Node) -> bool:
    """Whether a call moves or maps elements, or reduces the columns of rows."""
    name = ops.qualified_name(node.target)
    return is_cheap(node.target) or is_pointwise(node.target) or name in PACKS or name in ROW_REDUCTIONS


def _is_of_products(node: Node) -> bool:
    """Whether pointwise calls make a tensor from the results of products, perhaps with other tensors."""
    stack, seen = [node], {node}
    while stack:
        node = stack.pop()
        if is_product(node.target):
            return True
        if node.op == "call_function" and (is_cheap(node.target) or is_pointwise(node.target)):
            stack += [source for source in node.all_input_nodes if source not in seen]
            seen.update(node.all_input_nodes)
    return False
