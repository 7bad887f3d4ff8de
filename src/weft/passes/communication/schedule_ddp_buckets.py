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

Declines: an all-reduce whose launch the graph returns, or that nothing waits for; a graph in which no order puts every
wait in its place.
Numerics: exact. Bytes on the wire: unchanged. Memory: every bucket stays alive until the end of backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.ops import Kind
from weft.passes.base import Numerics, Pass
from weft.passes.portfolio import arrange
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Step
from weft.scheduling.runtime_order import UNSETTLED, WAITS, Carried, RuntimeOrder, settle


@dataclass(frozen=True)
class ScheduleDdpBuckets(Pass):
    """Move the waits for all-reduces of gradients to the end of backward."""

    numerics = Numerics.EXACT

    def plan(self, graph: Graph, context: Context) -> Step:
        dag = Dag(graph, keep_issue_order=True)
        carried = Carried(dag, context.groups)
        first = _put(carried)
        order = settle(first, lambda dag: _put(Carried(dag, context.groups)), keep_issue_order=True)
        changed = first.changed(order) if order is not None else None
        decisions = [self._decide(c, changed) for c in carried.sums]
        refused = [(c, r) for c, r in carried.refused.items() if c.kind is Kind.ALL_REDUCE]
        decisions += [self.decision(r.reason, r.sentence, c.launch.name, blocking=r.blocking) for c, r in refused]
        return self.step(
            arrange([node.name for node in order or dag.nodes], [node.name for node in dag.nodes]), decisions
        )

    def _decide(self, collective: Collective, changed: set[Node] | None) -> Decision:
        launch, (wait, *_) = collective.launch, collective.waits
        if changed is None:
            return self.decision(Reason.DEPENDENCY, f"{launch.name} {UNSETTLED}", launch.name, wait.name)
        if wait not in changed:
            sentence = f"{wait.name} is already where DDP waits for {launch.name}"
            return self.decision(Reason.ALREADY_DONE, sentence, launch.name, wait.name)
        return self.decision(Reason.APPLIED, f"moved {wait.name} to the end of backward", launch.name, wait.name)


def _put(carried: Carried) -> RuntimeOrder:
    """Each wait at the end of backward."""
    order = RuntimeOrder(carried.dag)
    for turn, c in enumerate(carried.sums):
        order.put(carried.epilogues[c.launch], carried.first_use(c), WAITS, turn)
    return order
