"""Choose the order of everything: launches, waits, compute, and which collectives are one, for the shortest step.

Why: launching early and waiting late is not enough. A weight gradient that nothing waits for can run while a collective
is on the wire, a queue takes one collective at a time, and whatever is in flight holds memory.

Before::

    ag = all_gather(x, 4, 'tp')
    g = wait(ag)
    y = mm(g, w)
    dw = mm(xt, dy)

After::

    ag = all_gather(x, 4, 'tp')
    dw = mm(xt, dy)
    g = wait(ag)
    y = mm(g, w)

The order comes from a search (`planning/search.py`) that is judged by the simulator on the cluster that is described:
it is never longer than the order of the graph, and never uses more than the limit of memory; without a limit, than a
twentieth more than the graph uses. A limit that no order keeps is refused with the least that was found.
Collectives that wait beside each other in one queue are launched as one, by the operator that takes lists: no copies.

Declines: what stays exposed, with what holds it back: a dependency, its queue, its link or memory.
Numerics: reassociates: merged reductions may round otherwise on some backends. With `merge=gathers` or `merge=none` it
is exact. Memory: the limit is a promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch.fx import Graph

from weft.errors import MemoryLimitError, compose
from weft.graph.dag import Dag
from weft.graph.ops import Kind
from weft.passes.base import Context, Numerics, Pass
from weft.planning.blocked import explain_exposed
from weft.planning.bucket_prices import BucketPrices
from weft.planning.members import COALESCED
from weft.planning.plan import Arrange, Merge, Step
from weft.planning.policies import assumed_cluster
from weft.planning.search import search
from weft.simulation.build import program_of

GATHERS = frozenset({Kind.ALL_GATHER})


@dataclass(frozen=True)
class ScheduleOverlap(Pass):
    """Order the graph, and merge collectives, for the shortest step on the cluster."""

    numerics = Numerics.REASSOCIATES
    reorders_launches = True
    keeps_memory_limit = True

    merge: Literal["all", "gathers", "none"] = "all"
    """Which collectives may be launched as one."""
    max_bucket_bytes: int | None = None
    """Of the full tensors that are launched as one, at most. None: whatever makes the step shortest."""

    def __post_init__(self) -> None:
        if self.merge != "all":
            object.__setattr__(self, "numerics", Numerics.EXACT)

    def plan(self, graph: Graph, context: Context) -> Step:
        dag = Dag(graph)
        cluster = context.cluster or assumed_cluster(context.groups)
        program = program_of(dag, context.groups, cluster)
        kinds = {"all": COALESCED, "gathers": GATHERS, "none": frozenset[Kind]()}[self.merge]
        outcome = search(
            program,
            context.effort,
            context.memory_limit_bytes,
            lambda jobs: BucketPrices(
                dag, jobs, context.groups, cluster, kinds, context.withheld, self.max_bucket_bytes
            ),
        )
        limit = context.memory_limit_bytes
        if limit is not None and outcome.peak_bytes > limit:
            least = outcome.peak_bytes
            what = f"no order was found that fits in {limit} bytes; the least that one needs is {least}"
            raise MemoryLimitError(compose(self.name(), what, do=f"allow {least} bytes"), least)
        names = program.names
        merges = [Merge(tuple(names[op] for op in b), "coalesced", keeps_waits=True) for b in outcome.buckets]
        actions = [*_arrange(outcome.order, names), *merges]
        return self.step(actions, explain_exposed(self.name(), program, outcome))


def _arrange(order: Sequence[int], names: Sequence[str]) -> list[Arrange]:
    """The order as stretches of the graph; none where it stays."""
    runs: list[list[int]] = []
    for op in order:
        if runs and op == runs[-1][1] + 1:
            runs[-1][1] = op
        else:
            runs.append([op, op])
    return [Arrange(tuple((names[first], names[last]) for first, last in runs))] if len(runs) > 1 else []
