"""Roles of collectives: each carries parameters, gradients or activations.

Contract: decided by the input of a collective and the uses of its result, never by names. A collective without a
reduction carries parameters if it sends graph inputs, at most cast, scaled, reshaped or packed. A collective carries a
gradient if its result reaches no matrix product, convolution, attention or embedding: gradients only go through
scaling, clipping, accumulation, the optimizer and other collectives.
"""

from __future__ import annotations

import functools
from enum import StrEnum
from typing import Any

from torch.fx import Node

from weft.compat import OpOverload
from weft.graph import ops
from weft.graph.collective import Collective, collectives
from weft.graph.dag import Dag
from weft.graph.groups import GroupTable
from weft.graph.operator_effects import is_cheap, profile

PRODUCTS = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "matmul",
        "linear",
        "mv",
        "addmv",
        "dot",
        "vdot",
        "einsum",
        "convolution",
        "convolution_backward",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "_int_mm",
        "_weight_int8pack_mm",
        "embedding",
        "embedding_dense_backward",
    ]
)
PACKS = frozenset({"aten::cat", "weft::pack"})
"""Operators that put several tensors into the buffer of a bucket."""
PRODUCT_PREFIXES = ("_scaled_dot_product", "scaled_dot_product", "_flash_attention", "_efficient_attention")


class Role(StrEnum):
    """The kind of tensor that a collective carries."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"


@functools.cache
def is_product(target: Any) -> bool:
    """Whether the operator is the main computation of a layer, such as a matrix product, which no gradient feeds."""
    if not isinstance(target, OpOverload):
        return False
    name = target.name().partition("::")[2].partition(".")[0]
    return name in PRODUCTS or name.startswith(PRODUCT_PREFIXES)


class Roles:
    """The roles of the collectives of one Dag."""

    def __init__(self, dag: Dag) -> None:
        self.dag = dag

    def of(self, collective: Collective) -> Role:
        """The role of a collective."""
        if collective.kind not in ops.REDUCTIONS and all(_not_cheap(source) is None for source in collective.inputs):
            return Role.PARAMETERS
        return Role.GRADIENTS if self._product_after[self.dag.index[collective.launch]] is None else Role.ACTIVATIONS

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
            return next((node for node in map(_not_cheap, collective.inputs) if node is not None), None)
        return self._product_after[self.dag.index[collective.launch]]

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
