"""Launch collectives as early as their inputs allow.

Why: a collective that starts earlier overlaps with more compute before its wait.

Before::

    a: f32[4, 4] = mm(x, x)
    c: bf16[2, 4] = _to_copy(p, dtype=bf16)
    ag: bf16[4, 4] = all_gather(c, 2, 'dp')
    w: bf16[4, 4] = wait(ag)

After::

    c: bf16[2, 4] = _to_copy(p, dtype=bf16)
    ag: bf16[4, 4] = all_gather(c, 2, 'dp')
    a: f32[4, 4] = mm(x, x)
    w: bf16[4, 4] = wait(ag)

Cheap nodes that only prepare the launch (views, casts, scalings; never a matmul) move with it. Launches of one group
keep their order. A launch does not move above a wait if more than `max-in-flight-bytes` of its group would then be in
flight, so that not all gathered weights are in memory at once.

Declines: a launch that already follows its last dependency; one of unknown size, if there is a limit.
Numerics: exact. Memory: results are allocated earlier, up to the limit per group.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch.fx import Graph, Node

from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.groups import group_argument, runtime_name
from weft.graph.operator_effects import is_cheap
from weft.graph.versions import dag_of
from weft.passes.base import Numerics, Pass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Action, Move, Step
from weft.quantities import exact_size_text


@dataclass(frozen=True)
class HoistLaunches(Pass):
    """Move each launch, with the cheap nodes that prepare it, up to its last dependency."""

    numerics = Numerics.EXACT

    max_in_flight_bytes: int | None = 256 * 1024 * 1024
    """Maximum bytes of results in flight per group. None: no limit."""

    def plan(self, graph: Graph, context: Context) -> Step:
        return self.plan_on(dag_of(graph))

    def plan_on(self, dag: Dag) -> Step:
        """The same for a Dag whose order may differ from that of the graph."""
        windows = _Windows(dag, self.max_in_flight_bytes)
        queue = {later: earlier for earlier, later in dag.queue}
        place = _Places(dag)
        actions: list[Action] = []
        decisions: list[Decision] = []
        for i, profile in dag.effects.special:
            if not profile.launch or ops.launch_form(dag.nodes[i].target) is None:
                continue
            node = dag.nodes[i]
            limit = windows.add(i)
            if limit is None:
                sentence = f"{node.name} stays: its size is unknown, and the bytes in flight are limited"
                decisions.append(self.decision(Reason.UNKNOWN_SIZE, sentence, node.name))
                continue
            unit = _unit(dag, i)
            blockers = [p for j in unit for p in dag.preds[j] if p not in unit]
            blockers += [queue[i]] if i in queue else []
            blockers += [limit] if limit >= 0 else []
            anchor = max(blockers, key=place.of) if blockers else -1
            moved = place.put(anchor, unit) if anchor < i else []
            decisions.append(self._decide(dag, node, anchor, anchor == limit, moved))
            if moved:
                actions.append(
                    Move(tuple(dag.nodes[j].name for j in moved), dag.nodes[place.end(anchor)].name, "after")
                )
        return self.step(actions, decisions)

    def _decide(self, dag: Dag, node: Node, anchor: int, limited: bool, moved: list[int]) -> Decision:
        blocking = dag.nodes[anchor].name if anchor >= 0 else None
        where = f"to just after {blocking}" if blocking else "to the top"
        if moved:
            return self.decision(Reason.APPLIED, f"moved {node.name} up {where}", node.name, blocking=blocking)
        if limited and anchor >= 0:
            limit = exact_size_text(self.max_in_flight_bytes or 0)
            sentence = f"{node.name} stays: above {blocking} more than {limit} would be in flight"
            return self.decision(Reason.IN_FLIGHT_LIMIT, sentence, node.name, blocking=blocking)
        where = f"just after {blocking}" if blocking else "at the top"
        return self.decision(Reason.ALREADY_DONE, f"{node.name} is already {where}", node.name, blocking=blocking)


class _Windows:
    """The wait that each launch must stay after to keep its group's bytes in flight within the limit."""

    def __init__(self, dag: Dag, limit: int | None) -> None:
        self.dag, self.limit = dag, limit
        self.last_wait: dict[int, int] = {}
        for flight in dag.effects.flights:
            end = len(dag.nodes) - 1 if flight.wait is None else flight.wait
            self.last_wait[flight.launch] = max(self.last_wait.get(flight.launch, -1), end)
        self.flying: dict[str, deque[tuple[int, int]]] = {}
        self.total: dict[str, int] = {}
        self.landed: dict[str, int] = {}

    def add(self, i: int) -> int | None:
        """The last wait that launch i must stay after; -1 if it may pass all, None if the size of i is unknown."""
        if self.limit is None:
            return -1
        size = Collective(self.dag.nodes[i]).output_bytes
        if size is None:
            return None
        group = runtime_name(group_argument(self.dag.nodes[i]))
        flying = self.flying.setdefault(group, deque())
        flying.append((size, i))
        self.total[group] = self.total.get(group, 0) + size
        while len(flying) > 1 and self.total[group] > self.limit:
            oldest, launch = flying.popleft()
            self.total[group] -= oldest
            self.landed[group] = max(self.landed.get(group, -1), self.last_wait[launch])
        return self.landed.get(group, -1)


class _Places:
    """Positions of nodes in the new order: their old one, or within the block of launches moved to after a node."""

    def __init__(self, dag: Dag) -> None:
        self.top = max((i for i, node in enumerate(dag.nodes) if node.op == "placeholder"), default=-1)
        self.blocks: dict[int, tuple[int, int]] = {}
        self.ends: dict[int, int] = {}

    def of(self, i: int) -> tuple[int, int]:
        """The node whose block a node belongs to, and its index in that block; comparable between nodes."""
        return self.blocks.get(i, (max(i, self.top), 0))

    def end(self, anchor: int) -> int:
        """The last node of the block of `anchor` that does not have to move."""
        root = self.of(anchor)[0]
        return self.ends.get(root, root)

    def put(self, anchor: int, unit: list[int]) -> list[int]:
        """Append a unit to the anchor's block; returns those of its nodes that have to move."""
        root, end = self.of(anchor)[0], self.end(anchor)
        late = [j for j in unit if j > root]
        for j in late:
            self.blocks[j] = (root, len(self.blocks) + 1)
        if root < 0 or late == list(range(end + 1, end + 1 + len(late))):
            self.ends[root] = end + len(late)
            return []
        return late


def _unit(dag: Dag, launch: int) -> list[int]:
    """A launch and the cheap nodes that only it needs, in order."""
    unit = {launch}
    stack = list(dag.preds[launch])
    while stack:
        j = stack.pop()
        node = dag.nodes[j]
        cheap = node.op == "get_attr" or (node.op == "call_function" and is_cheap(node.target))
        if j in unit or not cheap:
            continue
        if all(k in unit for k in dag.succs[j]):
            unit.add(j)
            stack += dag.preds[j]
    return sorted(unit)
