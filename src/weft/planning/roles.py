"""What a collective carries: parameters, gradients or activations.

Contract: told by what it gathers and where its result goes, never by names. A collective that reduces nothing carries a
parameter if it sends one graph input, at most cast, scaled or reshaped. It carries a gradient if no matrix product,
convolution, attention or embedding is behind its result: what is left is scaling, clipping, accumulation, the optimizer
and other collectives.
"""

from __future__ import annotations

import functools
from enum import StrEnum
from typing import Any

from torch.fx import Node

from weft.compat import OpOverload
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.profiles import is_cheap, profile

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
PRODUCT_PREFIXES = ("_scaled_dot_product", "scaled_dot_product", "_flash_attention", "_efficient_attention")


class Role(StrEnum):
    """What a collective carries."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"


@functools.cache
def is_product(target: Any) -> bool:
    """Whether the operator multiplies matrices or does what a layer does besides: what a gradient never goes to."""
    if not isinstance(target, OpOverload):
        return False
    name = target.name().partition("::")[2].partition(".")[0]
    return name in PRODUCTS or name.startswith(PRODUCT_PREFIXES)


class Roles:
    """The roles of the collectives of one Dag."""

    def __init__(self, dag: Dag) -> None:
        self.dag = dag

    def of(self, collective: Collective) -> Role:
        """What the collective carries."""
        if collective.kind not in ops.REDUCTIONS and all(_is_parameter(source) for source in collective.inputs):
            return Role.PARAMETERS
        return Role.ACTIVATIONS if self._feeds_product[self.dag.index[collective.launch]] else Role.GRADIENTS

    @functools.cached_property
    def _feeds_product(self) -> list[bool]:
        """For each node whether a product, or what is opaque, is behind it."""
        dag = self.dag
        feeds = [False] * len(dag.nodes)
        for i in range(len(dag.nodes) - 1, -1, -1):
            for user in dag.nodes[i].users:
                j = dag.index[user]
                opaque = user.op == "call_function" and profile(user.target).opaque
                if feeds[j] or opaque or is_product(user.target):
                    feeds[i] = True
                    break
        return feeds


def _is_parameter(node: Node) -> bool:
    """Whether the node is a graph input or a constant, or one through cheap operators that take nothing else."""
    while node.op == "call_function":
        sources = node.all_input_nodes
        if len(sources) != 1 or not is_cheap(node.target) or ops.is_wait(node.target):
            return False
        node = sources[0]
    return node.op in ("placeholder", "get_attr")
