"""Placement: where a bucket is launched and where it is waited for.

If the inputs of all members are available where the first member was launched, the bucket is launched there. Cheap
nodes that prepare the other inputs move up with it, so no member starts later than before. Otherwise the bucket is
launched where its last member was. Its wait then comes before its first use, but no later than the launch of a later
bucket (`Policy.defer`), because its send buffer stays in memory until the wait.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from weft.bucketing.eligibility import uses_of
from weft.bucketing.policy import Policy
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.operator_effects import is_cheap

Place = tuple[tuple[str, ...], str | None, str | None]
"""The nodes to move up with the launch, the node to launch before, the node to wait before."""


class Placement:
    """Chooses the places of the buckets of one graph."""

    def __init__(self, dag: Dag, policy: Policy) -> None:
        self.dag, self.policy = dag, policy

    def of(self, buckets: Sequence[Sequence[Collective]]) -> list[Place]:
        """The place of each bucket. The buckets come in the order of their first members."""
        dag = self.dag
        launches = [sorted(dag.index[c.launch] for c in members) for members in buckets]
        carried = [self._carried(indices) for indices in launches]
        starts = [indices[0] if c is not None else indices[-1] for indices, c in zip(launches, carried, strict=True)]
        ordered = sorted(starts)
        places: list[Place] = []
        for number, members in enumerate(buckets):
            start, nodes = starts[number], carried[number]
            if nodes is not None and self.policy.prefetch:
                start = starts[max(number - self.policy.prefetch, 0)]
                nodes = self._carried(launches[number], start)
                if nodes is None:
                    start, nodes = starts[number], carried[number]
            uses = (dag.index[use] for collective in members for use in uses_of(collective))
            wait = min(uses, default=len(dag.nodes) - 1)
            if nodes is None:
                limit = bisect_right(ordered, start) + self.policy.defer - 1
                wait = min(wait, ordered[limit]) if limit < len(ordered) else wait
            names = tuple(dag.nodes[i].name for i in nodes or ())
            launch_before = dag.nodes[start].name if nodes is not None else None
            places.append((names, launch_before, dag.nodes[wait].name if wait > start else None))
        return places

    def _carried(self, launches: Sequence[int], start: int | None = None) -> list[int] | None:
        """The cheap nodes that have to move up for all launches to run at the first of them, or before `start`.

        None if an expensive node would have to move.
        """
        dag = self.dag
        start = launches[0] if start is None else start
        found: set[int] = set()
        stack = [j for i in launches for j in dag.preds[i]]
        while stack:
            j = stack.pop()
            if j < start or j in found:
                continue
            node = dag.nodes[j]
            if node.op != "get_attr" and not (node.op == "call_function" and is_cheap(node.target)):
                return None
            found.add(j)
            stack += dag.preds[j]
        return sorted(found)
