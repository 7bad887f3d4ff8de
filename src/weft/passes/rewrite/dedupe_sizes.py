"""Compute each symbolic size once.

Why: tracing with dynamic shapes queries the sizes of every tensor and recomputes the same products. Each costs host
time before a kernel can be launched.

Before::

    n: int[s0] = sym_size.int(x, 0)
    m: int[s0] = sym_size.int(y, 0)
    a: int[4*s0] = operator.mul(n, 4)
    b: int[4*s0] = operator.mul(m, 4)

After::

    n: int[s0] = sym_size.int(x, 0)
    a: int[4*s0] = operator.mul(n, 4)

Two sizes are equal if their symbolic expressions are: here both inputs have size `s0`.

Declines: nothing.
Numerics: exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from weft.compat import expression_of
from weft.graph import ops
from weft.graph.operator_effects import profile_of
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Rewrite, Step

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class DedupeSizes(GraphwisePass):
    """Compute each symbolic size once."""

    numerics = Numerics.EXACT

    def plan_one(self, graph: Graph, context: Context) -> Step:
        first: dict[Any, Node] = {}
        replaced: list[tuple[Node, Node]] = []
        for node in graph.nodes:
            value = ops.value_of(node)
            if not isinstance(value, SYMBOLIC):
                continue
            key = (type(value), expression_of(value))
            if key not in first:
                first[key] = node
            elif node.op == "call_function" and profile_of(node).plain:
                replaced.append((node, first[key]))
        replacements = tuple((node.name, by.name) for node, by in replaced)
        actions = (
            [Rewrite((), replacements[0][0], replacements, tuple(name for name, _ in replacements))]
            if replacements
            else []
        )
        return self.step(actions, [self._replaced(node, by) for node, by in replaced])

    def _replaced(self, node: Node, by: Node) -> Decision:
        return self.decision(
            Reason.APPLIED, f"replaced {node.name} with {by.name}, the same number", node.name, by.name
        )
