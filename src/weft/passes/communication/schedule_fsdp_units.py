"""Order the launches and waits of FSDP as FSDP2 issues them at run time.

Why: a prediction for a model that trains with `fully_shard` needs the order that FSDP2 runs, not a better one.

Before::

    ag0: f32[4, 4] = all_gather(p, 2, 'dp')
    w0: f32[4, 4] = wait(ag0)
    a: f32[4, 4] = mm(x, w0)
    ag1: f32[4, 4] = all_gather(q, 2, 'dp')
    w1: f32[4, 4] = wait(ag1)
    b: f32[4, 4] = mm(a, w1)

After::

    ag0: f32[4, 4] = all_gather(p, 2, 'dp')
    ag1: f32[4, 4] = all_gather(q, 2, 'dp')
    w0: f32[4, 4] = wait(ag0)
    a: f32[4, 4] = mm(x, w0)
    w1: f32[4, 4] = wait(ag1)
    b: f32[4, 4] = mm(a, w1)

The pass expects one gather and one reduce-scatter for each unit and phase, as the bucket passes make them with
`units`. Launches that could not be merged count as one unit if they belong to one block.

- The wait and the copies out of the buffer come right before the first use of the unit.
- In forward, the gather of a unit is launched after the copies of the unit before the previous one: FSDP2 keeps one
  buffer until the next copy, so the host may issue two gathers ahead. In backward, it is launched after the copies of
  the previous unit. A gather belongs to backward if its shards have been gathered before.
- A reduce-scatter is launched where its last gradient exists. Its wait comes before the copy into the buffer of the
  next unit; the wait of the last one comes before the first use of any gradient, such as clipping or the optimizer.

Compute keeps its order, and so do all other collectives.

Declines: a gather or reduce-scatter whose launch the graph returns, or that nothing waits for; a graph in which no
order puts every launch and wait in its place.
Numerics: exact. Bytes on the wire: unchanged. Memory: that of FSDP2; two units are gathered at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from weft.bucketing.units import units_of
from weft.errors import PipelineError, compose
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.ops import Kind
from weft.graph.versions import dag_of
from weft.passes.base import Numerics, Pass
from weft.passes.portfolio import arrange
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Step
from weft.scheduling.runtime_order import (
    LAUNCHES,
    TOP,
    UNSETTLED,
    WAITS,
    Carried,
    RuntimeOrder,
    copy_in,
    copy_out,
    preparation,
    settle,
)


@dataclass(frozen=True)
class ScheduleFsdpUnits(Pass):
    """Launch and wait for the gathers and reduce-scatters of FSDP where FSDP2 does."""

    numerics = Numerics.EXACT
    reorders_launches = True

    ahead: int = 2
    """Number of units by which forward gathers are launched ahead of their use. 2: the host runs ahead of the device.
    1: the host is just in time, as with explicit prefetching of one unit. 0: nothing overlaps."""

    def __post_init__(self) -> None:
        if self.ahead < 0:
            what = f"ahead is {self.ahead}, expected 0 or more"
            raise PipelineError(compose(self.name(), what, do="use ahead=2, as FSDP2 runs"))

    def plan(self, graph: Graph, context: Context) -> Step:
        dag = dag_of(graph)
        carried = Carried(dag, context.groups)
        first = self._put(carried)
        order = settle(first, lambda dag: self._put(Carried(dag, context.groups)), keep_issue_order=False)
        changed = first.changed(order) if order is not None else None
        decisions = [self._decide(each, changed) for each in (*carried.gathers, *carried.scatters)]
        refused = [(c, r) for c, r in carried.refused.items() if c.kind is not Kind.ALL_REDUCE]
        decisions += [self.decision(r.reason, r.sentence, c.launch.name, blocking=r.blocking) for c, r in refused]
        return self.step(
            arrange([node.name for node in order or dag.nodes], [node.name for node in dag.nodes]), decisions
        )

    def _put(self, carried: Carried) -> RuntimeOrder:
        order = RuntimeOrder(carried.dag)
        self._put_gathers(carried, order)
        self._put_scatters(carried, order)
        return order

    def _put_gathers(self, carried: Carried, order: RuntimeOrder) -> None:
        dag = carried.dag
        copies = {c.launch: copy_out(dag, c) for c in carried.gathers}
        uses = {launch: _first_use(dag, found) for launch, found in copies.items()}
        fronts = {c.launch: preparation(dag, c.launch) for c in carried.gathers}
        shards = {launch: inputs for launch, (_, inputs) in fronts.items()}
        in_order = sorted(carried.gathers, key=lambda c: (uses[c.launch], dag.index[c.launch]))
        gathered: set[Node] = set()
        anchors: list[int] = []
        for turn, unit in enumerate(_runs([c.launch for c in in_order], shards)):
            anchors.append(min(uses[launch] for launch in unit))
            again = not all(shards[launch].isdisjoint(gathered) for launch in unit)
            ahead = min(self.ahead, 1) if again else self.ahead
            launch_at = anchors[turn - ahead] if turn >= ahead else TOP
            for launch in unit:
                order.put(fronts[launch][0], launch_at, LAUNCHES if ahead else WAITS, turn)
                order.put(copies[launch], anchors[turn], WAITS, turn)
                gathered |= shards[launch]

    def _put_scatters(self, carried: Carried, order: RuntimeOrder) -> None:
        dag = carried.dag
        by_launch = {c.launch: c for c in carried.scatters}
        units = _runs(list(by_launch), {})
        nexts = [min(copy_in(dag, launch) for launch in unit) for unit in units[1:]]
        for turn, (unit, following) in enumerate(zip(units, [*nexts, carried.end_of_backward], strict=False)):
            for launch in unit:
                anchor = min(following, carried.first_use(by_launch[launch]))
                order.put(carried.epilogues[launch], anchor, WAITS, turn)

    def _decide(self, collective: Collective, changed: set[Node] | None) -> Decision:
        launch, (wait, *_) = collective.launch, collective.waits
        if changed is None:
            return self.decision(Reason.DEPENDENCY, f"{launch.name} {UNSETTLED}", launch.name, wait.name)
        if changed.isdisjoint({launch, wait}):
            sentence = f"{launch.name} and {wait.name} are already where FSDP2 has them"
            return self.decision(Reason.ALREADY_DONE, sentence, launch.name, wait.name)
        sentence = f"moved {launch.name} and {wait.name} to where FSDP2 has them"
        return self.decision(Reason.APPLIED, sentence, launch.name, wait.name)


def _first_use(dag: Dag, copies: set[int]) -> int:
    users = (dag.index[user] for i in copies for user in dag.nodes[i].users)
    return min((i for i in users if i not in copies), default=len(dag.nodes) - 1)


def _runs(launches: Sequence[Node], shards: Mapping[Node, set[Node]]) -> list[list[Node]]:
    """The launches of each unit, in order; a shard that is gathered again begins another unit."""
    units = units_of(launches, "split")
    runs: list[list[Node]] = []
    sent: set[Node] = set()
    for launch in launches:
        mine = shards.get(launch, set())
        if runs and units and units[launch] == units[runs[-1][-1]] and sent.isdisjoint(mine):
            runs[-1].append(launch)
            sent |= mine
        else:
            runs.append([launch])
            sent = set(mine)
    return runs
