"""Move each node to just before its first user.

Why: tracing leaves constants, masks and casts at the top of the graph. A tensor computed long before its first use
occupies memory all that time, and is no longer in cache when it is read.

Before::

    m: f32[4, 4] = neg(y)
    a: f32[4, 4] = mm(x, x)
    b: f32[4, 4] = relu(a)
    c: f32[4, 4] = add(b, m)

After::

    a: f32[4, 4] = mm(x, x)
    b: f32[4, 4] = relu(a)
    m: f32[4, 4] = neg(y)
    c: f32[4, 4] = add(b, m)

Launches, waits, writes, random numbers and calls with side effects stay where they are, and nothing moves across them.
So compute that hides a collective stays between its launch and its wait.

Declines: nothing; nodes that cannot move are left in place.
Numerics: exact. Memory: shorter live ranges within each stretch between such nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch.fx import Graph, Node

from weft.compat import input_nodes
from weft.graph.dag import Dag
from weft.graph.versions import dag_of
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Arrange, Step


@dataclass(frozen=True)
class MoveProducers(GraphwisePass):
    """Move each node to just before its first user."""

    numerics = Numerics.EXACT
    why_not_nested = "a plan can move only nodes of the outermost graph"

    def plan_one(self, graph: Graph, context: Context) -> Step:
        dag = dag_of(graph)
        fixed = {i for i, _, _ in dag.effects.accesses} | {i for i, p in dag.effects.special if not p.is_view}
        fixed |= {i for i, node in enumerate(dag.nodes) if node.op != "call_function"}
        order: list[Node] = []
        stretch: list[Node] = []
        for i, node in enumerate(dag.nodes):
            if i in fixed:
                order += [*_local(stretch), node]
                stretch = []
            else:
                stretch.append(node)
        moved = _moved(dag.nodes, order)
        if not moved:
            return self.step([], [])
        following = dict(pairwise(order))
        return self.step([Arrange(_runs(dag, order))], [self._decision(node, following[node]) for node in moved])

    def _decision(self, node: Node, following: Node) -> Decision:
        return self.decision(Reason.APPLIED, f"moved {node.name} to before {following.name}", node.name)


def _local(stretch: Sequence[Node]) -> list[Node]:
    """The nodes of a stretch, each just before its first user; nodes without users in the stretch keep their order."""
    inside = set(stretch)
    order: dict[Node, None] = {}
    for last in stretch:
        if any(user in inside for user in last.users):
            continue
        stack = [(last, False)]
        while stack:
            node, is_ready = stack.pop()
            if is_ready:
                order[node] = None
            elif node not in order:
                needed = [source for source in input_nodes(node) if source in inside and source not in order]
                stack += [(node, True), *((source, False) for source in reversed(needed))]
    return list(order)


def _moved(before: Sequence[Node], after: Sequence[Node]) -> list[Node]:
    """The nodes whose next node in the new order is a different one."""
    followed_by = dict(pairwise(before))
    return [node for node, now in pairwise(after) if followed_by[node] is not now and node.op == "call_function"]


def _runs(dag: Dag, order: Sequence[Node]) -> tuple[tuple[str, str], ...]:
    """The new order as runs of nodes that are consecutive in the graph today."""
    runs: list[list[Node]] = []
    for node in order:
        if runs and dag.index[runs[-1][-1]] + 1 == dag.index[node]:
            runs[-1].append(node)
        else:
            runs.append([node])
    return tuple((run[0].name, run[-1].name) for run in runs)
