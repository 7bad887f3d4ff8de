"""Remove the marks that `record_function` leaves for a profiler.

Why: each mark is a host call between kernels, and a barrier for other rewrites.

Before::

    mark = profiler._record_function_enter_new.default('block')
    r: f32[4] = relu(x)
    done = profiler._record_function_exit._RecordFunction(mark)

After::

    r: f32[4] = relu(x)

Declines: a mark whose result is used by anything but its end.
Numerics: exact; profiles of the graph no longer show the marks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from weft.graph import ops
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Step
from weft.rewriting.nested import removal_of

BEGINS = ("profiler._record_function_enter_new.default", "profiler._record_function_enter.default")
ENDS = ("profiler._record_function_exit._RecordFunction", "profiler._record_function_exit.default")


@dataclass(frozen=True)
class RemoveProfilerMarks(GraphwisePass):
    """Remove the marks that `record_function` leaves."""

    numerics = Numerics.EXACT

    def plan_one(self, graph: Graph, context: Context) -> Step:
        begins, ends = ({ops.op_of(name) for name in names} - {None} for names in (BEGINS, ENDS))
        marks = [node for node in graph.nodes if node.target in begins or node.target in ends]
        kept = {n for n in marks if n.target in begins and any(user.target not in ends for user in n.users)}
        kept |= {n for n in marks if n.target in ends and (n.users or kept.intersection(n.all_input_nodes))}
        gone = [node for node in marks if node not in kept]
        return self.step(removal_of(gone), [self._decide(node, node in kept) for node in marks])

    def _decide(self, node: Node, is_kept: bool) -> Decision:
        if is_kept:
            return self.decision(Reason.HAS_EFFECT, f"{node.name} stays: its result is used", node.name)
        return self.decision(Reason.APPLIED, f"removed {node.name}: it only marks a region for a profiler", node.name)
