"""Remove assertions about a tensor's metadata that the graph's types already prove.

Why: tracing guards casts with assertions. Each costs a call on the host and may keep a tensor alive.

Before::

    check = _assert_tensor_metadata(x, None, None, f32)
    r: f32[4] = relu(x)

After::

    r: f32[4] = relu(x)

Declines: an assertion that the types do not prove, because it would fail or depends on an unknown size.
Numerics: exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from weft.graph import metadata, ops
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Step
from weft.rewriting.nested import removal_of

ASSERTION = "_assert_tensor_metadata"


@dataclass(frozen=True)
class RemoveAssertions(GraphwisePass):
    """Remove assertions that the graph's types prove."""

    numerics = Numerics.EXACT

    def plan_one(self, graph: Graph, context: Context) -> Step:
        target = ops.op_of(f"{ASSERTION}.default")
        found = [node for node in graph.nodes if node.target is target]
        holds = [node for node in found if not node.users and _holds(node)]
        return self.step(removal_of(holds), [self._decide(node, node in holds) for node in found])

    def _decide(self, node: Node, holds: bool) -> Decision:
        if holds:
            return self.decision(Reason.APPLIED, f"removed {node.name}: the types prove it", node.name)
        sentence = f"{node.name} stays: the types do not prove it"
        return self.decision(Reason.HAS_EFFECT, sentence, node.name)


def _holds(node: Node) -> bool:
    bound = ops.bind(node)
    value = ops.value_of(bound["a"]) if isinstance(bound.get("a"), Node) else None
    if not isinstance(value, Tensor):
        return False
    facts: dict[str, Any] = {
        "size": list(value.shape),
        "stride": list(value.stride()),
        "dtype": value.dtype,
        "device": value.device,
        "layout": value.layout,
    }
    return all(_agrees(bound.get(name), fact) for name, fact in facts.items())


def _agrees(claimed: Any, fact: Any) -> bool:
    if claimed is None:
        return True
    if isinstance(claimed, list | tuple):
        values = [ops.value_of(item) if isinstance(item, Node) else item for item in claimed]
        return metadata.same(values, fact)
    return claimed == fact
