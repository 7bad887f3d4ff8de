"""Wait for the all-reduces of gradients at the end of backward, as DDP does.

Why: a prediction for a model that trains with `DistributedDataParallel` needs the order that DDP runs, not a better
one.

Before::

    ar0: f32[4, 4] = all_reduce(g, 'sum', 'dp')
    w0: f32[4, 4] = wait(ar0)
    h: f32[4, 4] = mm(g, y)
    ar1: f32[4, 4] = all_reduce(h, 'sum', 'dp')
    w1: f32[4, 4] = wait(ar1)

After::

    ar0: f32[4, 4] = all_reduce(g, 'sum', 'dp')
    h: f32[4, 4] = mm(g, y)
    ar1: f32[4, 4] = all_reduce(h, 'sum', 'dp')
    w0: f32[4, 4] = wait(ar0)
    w1: f32[4, 4] = wait(ar1)

Launches stay where the last gradient of their bucket exists. The waits, and the copies, casts and scalings that follow
them, come before the first use of any gradient after the last launch, in the order of the launches. Under hybrid
sharding, FSDP2 waits for its all-reduces over the replicas at the same place. Compute keeps its order, and so do all
other collectives.

Declines: an all-reduce whose launch the graph returns, or that nothing waits for.
Numerics: exact. Bytes on the wire: unchanged. Memory: every bucket stays alive until the end of backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.ops import Kind
from weft.passes.base import Numerics, Pass
from weft.passes.portfolio import arrange
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Step
from weft.scheduling.runtime_order import WAITS, Carried, RuntimeOrder


@dataclass(frozen=True)
class ScheduleDdpBuckets(Pass):
    """Move the waits for all-reduces of gradients to the end of backward."""

    numerics = Numerics.EXACT

    def plan(self, graph: Graph, context: Context) -> Step:
        dag = Dag(graph)
        carried, order = Carried(dag, context.groups), RuntimeOrder(dag)
        for turn, c in enumerate(carried.sums):
            order.put(carried.epilogues[c.launch], carried.first_use(c), WAITS, turn)
        found = order.order()
        changed = order.changed(found)
        names = [node.name for node in dag.nodes]
        decisions = [self._decide(dag, c, changed) for c in carried.sums]
        refused = [(c, r) for c, r in carried.refused.items() if c.kind is Kind.ALL_REDUCE]
        decisions += [self.decision(r.reason, r.sentence, c.launch.name, blocking=r.blocking) for c, r in refused]
        return self.step(arrange([names[i] for i in found], names), decisions)

    def _decide(self, dag: Dag, collective: Collective, changed: set[int]) -> Decision:
        launch, (wait, *_) = collective.launch, collective.waits
        if dag.index[wait] not in changed:
            sentence = f"{wait.name} is already where DDP waits for {launch.name}"
            return self.decision(Reason.ALREADY_DONE, sentence, launch.name, wait.name)
        return self.decision(Reason.APPLIED, f"moved {wait.name} to the end of backward", launch.name, wait.name)
