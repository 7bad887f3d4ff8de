"""Choose the order of all nodes, and the collectives to merge, for the shortest step.

Why: launching early and waiting late is not enough. A weight gradient that nothing waits for can run while a collective
is in flight, a queue runs one collective at a time, and buffers in flight occupy memory.

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

A search (`scheduling/search.py`) finds the order; the simulator on the given cluster judges it. By that judgement the
step is never longer than in the order of the graph. The peak memory never exceeds the limit. Without a limit, it
exceeds the graph's own peak by at most 5 % or 64 MiB, whichever is more. If no order keeps the limit, the pass raises
an error with the smallest peak found. Collectives that queue up at the same time are merged by the operator that takes
lists, without copies. Reductions may be delayed until their bucket is full.

The step is also never longer than that of `sink-waits` or `hoist-launches,sink-waits`. In graphs of up to 300 nodes the
same holds for simple pipelines that merge launches first: each bucketing pass in each strategy, DDP's buckets and
FSDP2's layers. In graphs of up to 1000 nodes (500 with effort `fast`, 20 000 with `best`) it holds if a plain order
comes within 5 % of the best. Pipelines that exceed the planner's memory limit do not count. The search continues from
the best of these graphs, so gathers of several dtypes, which no list operator takes, can be packed. In larger graphs
the search uses plain orders with its own buckets (`scheduling/recipes.py`).

Declines: collectives that stay exposed, each with the cause: a dependency, its queue, its link or memory. Merging
launches of a group whose other ranks hold other graphs.
Numerics: reassociates; merged reductions may round differently on some backends. With `merge=gathers` or `merge=none`
the pass is exact. Memory: within the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import Graph

from weft.bucketing.eligibility import COALESCED
from weft.bucketing.prices import BucketPrices
from weft.errors import MemoryLimitError, compose
from weft.graph.collective import collectives
from weft.graph.dag import Dag
from weft.graph.ops import Kind
from weft.graph.versions import dag_of
from weft.passes.base import Numerics, Pass
from weft.passes.bucket_pass import BucketPass
from weft.passes.portfolio import Variant, all_choices, variants
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Action, Merge, Settle, Step
from weft.scheduling.explanation import explain_exposed
from weft.scheduling.jobs import Jobs
from weft.scheduling.search import Outcome, search
from weft.simulation.build import program_of
from weft.simulation.memory import Footprint
from weft.simulation.program import OpKind, Program
from weft.simulation.simulator import run

OTHERS = frozenset({Kind.ALL_TO_ALL, Kind.BROADCAST})
"""Kinds that are merged only by copying: no operator takes lists of them."""
KINDS = {
    "all": COALESCED | OTHERS,
    "gathers": frozenset({Kind.ALL_GATHER}),
    "none": frozenset[Kind](),
}
FEW_NODES = 300
"""Number of nodes up to which all simple pipelines are tried. In larger graphs they are tried only if a plain order
comes close to the best one found."""
MOST_NODES = {"fast": 500, "default": 1000, "best": 20_000}
"""Number of nodes, by effort, above which pipelines that merge launches are not tried: each takes at least half as long
as a default search. Hoisting and sinking alone edits no graph, takes an eighth of that, and is always tried."""


@dataclass(frozen=True)
class ScheduleOverlap(Pass):
    """Order the graph, and merge collectives, for the shortest step on the cluster."""

    numerics = Numerics.REASSOCIATES
    reorders_launches = True
    keeps_memory_limit = True

    merge: Literal["all", "gathers", "none"] = "all"
    """The collectives that may be merged."""
    max_bucket_bytes: int | None = None
    """Maximum bytes of the full tensors of one bucket. None: the size that gives the shortest step."""

    def __post_init__(self) -> None:
        if self.merge != "all":
            object.__setattr__(self, "numerics", Numerics.EXACT)

    def plan(self, graph: Graph, context: Context) -> Step:
        planner = Planner(self, graph, context)
        best = planner.best()
        limit = context.memory_limit_bytes
        if limit is not None and best.outcome.peak_bytes > limit:
            least = best.outcome.peak_bytes
            what = f"found no order that fits in {limit} bytes; the smallest peak found is {least}"
            raise MemoryLimitError(compose(self.name(), what, do=f"allow {least} bytes"), least)
        decisions = best.decisions(self.name(), planner.exposed_ns)
        return self.step(best.actions(), [*decisions, *self._withheld(graph, context)])

    def _withheld(self, graph: Graph, context: Context) -> list[Decision]:
        """One decision for each group whose launches may not be merged because other ranks hold other graphs."""
        if not context.withheld:
            return []
        launches: dict[str, list[str]] = {}
        for each in collectives(graph):
            group = context.groups.canonical(each.group)
            if group in context.withheld and each.kind in KINDS[self.merge]:
                launches.setdefault(group, []).append(each.launch.name)
        return [
            self.decision(
                Reason.OTHER_RANKS, f"{len(names)} launches in {group!r} stay apart: {context.withheld[group]}", *names
            )
            for group, names in launches.items()
            if len(names) > 1
        ]


@dataclass(frozen=True)
class Candidate:
    """A variant of the graph, and the best order found for it."""

    variant: Variant
    program: Program
    outcome: Outcome

    def actions(self) -> list[Action]:
        names, outcome = self.program.names, self.outcome
        merges = [Merge(tuple(names[op] for op in b), "coalesced", keeps_waits=True) for b in outcome.buckets]
        actions = self.variant.actions(outcome.order)
        is_settled = not merges or not self.variant.steps or not isinstance(actions[-1], Merge)
        return [*actions, *([] if is_settled else [Settle()]), *merges]

    def decisions(self, name: str, exposed_ns: Mapping[str, int]) -> list[Decision]:
        """The decisions about the variant's merges, and about each of its launches."""
        members, names = self.variant.members(), self.program.names
        given = {op: (names[op],) if names[op] in exposed_ns else members[names[op]] for op in _launches(self.program)}
        before = {op: sum(exposed_ns.get(name, 0) for name in given[op]) for op in given}
        outcome = replace(self.outcome, given_exposed_ns=before)
        merged = [replace(decision, pass_name=name) for decision in self.variant.decisions]
        return [*merged, *explain_exposed(name, self.program, outcome)]


class Planner:
    """Searches on the original graph, and again on the result of a simple pipeline if that is better."""

    def __init__(self, rewrite: ScheduleOverlap, graph: Graph, context: Context) -> None:
        self.rewrite, self.graph, self.context = rewrite, graph, context
        self.cluster = context.target_cluster
        self.kinds = KINDS[rewrite.merge]
        self.exposed_ns: dict[str, int] = {}
        """Exposed time of each launch in the original graph."""

    def best(self) -> Candidate:
        dag = dag_of(self.graph)
        program = program_of(dag, self.context.groups, self.cluster)
        outcome = self._search(dag, program, self.context.memory_limit_bytes)
        self.exposed_ns = {program.names[op]: ns for op, ns in outcome.given_exposed_ns.items()}
        return self._better(Candidate(Variant((), program.names, dag.nodes), program, outcome), dag)

    def _better(self, best: Candidate, dag: Dag) -> Candidate:
        """The better of a candidate and the best variant of its graph."""
        if not best.program.queues:
            return best
        limit = best.outcome.limit_bytes
        quick: list[tuple[tuple[bool, int, int], int, Variant]] = []
        for number, variant in enumerate(variants(self.graph, dag, self.context, self._choices(best))):
            if variant.steps:
                program = program_of(variant.dag, self.context.groups, self.cluster)
                order: Sequence[int] = range(len(program.names))
            else:  # another order of the same program
                program, order = best.program, [dag.index[node] for node in variant.nodes]
            step, peak = run(program, order).step_ns, Footprint(program).peak(order)
            quick.append((fit_rank(step, peak, limit), number, variant))
        if not quick:
            return best
        rank, _, variant = min(quick)
        known = fit_rank(best.outcome.step_ns, best.outcome.peak_bytes, limit)
        if rank[:2] >= known[:2]:  # an equal step with less memory does not justify the copies
            return best
        program = program_of(variant.dag, self.context.groups, self.cluster)
        return Candidate(variant, program, self._search(variant.dag, program, limit))

    def _choices(self, best: Candidate) -> Iterable[Sequence[BucketPass]]:
        """The merging passes to try; the empty choice only hoists launches and sinks waits."""
        num_nodes, outcome = len(best.program.names), best.outcome
        is_near = num_nodes <= FEW_NODES or outcome.is_near_plain or outcome.peak_bytes > outcome.limit_bytes
        if is_near and num_nodes <= MOST_NODES[self.context.effort]:
            return all_choices(self.graph, self.kinds, self.rewrite.max_bucket_bytes)
        return [()]

    def _search(self, dag: Dag, program: Program, limit: int | None) -> Outcome:
        context, kinds = self.context, self.kinds - OTHERS
        for known, outcome in context.known_orders:
            if known == program and outcome.limit_bytes == limit:
                return outcome

        def merging(jobs: Jobs) -> BucketPrices:
            most = self.rewrite.max_bucket_bytes
            return BucketPrices(dag, jobs, context.groups, self.cluster, kinds, context.withheld, most)

        return search(program, context.effort, limit, merging)


def fit_rank(step_ns: int, peak_bytes: int, limit_bytes: int) -> tuple[bool, int, int]:
    """A sort key, smallest first: orders within the limit by their step, others by their memory."""
    is_over = peak_bytes > limit_bytes
    return (True, peak_bytes, step_ns) if is_over else (False, step_ns, peak_bytes)


def _launches(program: Program) -> list[int]:
    return [op for op, kind in enumerate(program.kinds) if kind is OpKind.LAUNCH]
