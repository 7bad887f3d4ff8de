"""Move waits down to the first use of their result.

Why: nodes between a launch and its wait run while the collective is in flight.

Before::

    w: f32[4, 4] = wait(ag)
    v: f32[16] = view(w, [16])
    a: f32[4, 4] = mm(x, x)
    r: f32[16] = relu(v)

After::

    a: f32[4, 4] = mm(x, x)
    w: f32[4, 4] = wait(ag)
    v: f32[16] = view(w, [16])
    r: f32[16] = relu(v)

Views of the result move down with the wait. A wait never passes a write to a buffer that its launch sends or receives.

Many gradients are used only at the end of the graph. If all their waits moved there, every buffer would stay alive
until then. So a wait does not pass the launch with which more than `max-in-flight-bytes` of its group would be in
flight.

Declines: a wait that is already just before its first use; one that the limit on bytes in flight holds back.
Numerics: exact. Memory: send and receive buffers stay alive until the later wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.operator_effects import is_alias
from weft.graph.versions import dag_of
from weft.passes.base import Numerics, Pass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Move, Step


@dataclass(frozen=True)
class SinkWaits(Pass):
    """Move each wait, with the views of its result, down to the first node that needs it."""

    numerics = Numerics.EXACT

    max_in_flight_bytes: int | None = 1 << 28
    """Maximum bytes in flight per group; a wait does not sink past a launch that would exceed it. None: no limit."""

    def plan(self, graph: Graph, context: Context) -> Step:
        return self.plan_on(dag_of(graph))

    def plan_on(self, dag: Dag) -> Step:
        """The same for a Dag whose order may differ from that of the graph."""
        limits = _limits(dag, self.max_in_flight_bytes) if self.max_in_flight_bytes is not None else {}
        units = _units(dag, limits)
        beside: dict[int, list[list[int]]] = {}
        for unit, anchor in units.values():
            beside.setdefault(anchor, []).append(unit)
        settled = {anchor: _first_settled(anchor, members) for anchor, members in beside.items()}
        actions: list[Move] = []
        decisions: list[Decision] = []
        for i, (unit, anchor) in sorted(units.items()):
            wait, first_use = dag.nodes[i].name, dag.nodes[anchor].name
            limited = limits.get(i) == anchor
            if unit[0] >= settled[anchor] and limited:
                sentence = f"{wait} stays before {first_use}: after it too many bytes would be in flight"
                decisions.append(self.decision(Reason.IN_FLIGHT_LIMIT, sentence, wait, blocking=first_use))
                continue
            if unit[0] >= settled[anchor]:
                sentence = f"{wait} is already just before its first use, {first_use}"
                decisions.append(self.decision(Reason.ALREADY_DONE, sentence, wait, blocking=first_use))
                continue
            actions.append(Move(tuple(dag.nodes[j].name for j in unit), dag.nodes[settled[anchor]].name, "before"))
            where = "the launch that would exceed the bytes in flight" if limited else "its first use"
            sentence = f"moved {wait} down to {where}, {first_use}"
            decisions.append(self.decision(Reason.APPLIED, sentence, wait, blocking=first_use))
        return self.step(actions, decisions)


def _limits(dag: Dag, limit: int) -> dict[int, int]:
    """For each wait, the first later launch of its group with which the bytes in flight would exceed the limit."""
    queues: dict[str, list[tuple[int, int]]] = {}
    for i, profile in dag.effects.special:
        if profile.launch and ops.launch_form(dag.nodes[i].target) is not None:
            collective = Collective(dag.nodes[i])
            size = max(collective.input_bytes or 0, collective.output_bytes or 0)
            queues.setdefault(collective.group, []).append((i, size))
    last: dict[int, int] = {}
    for queue in queues.values():
        end, total = 0, 0
        for launch, size in queue:
            while end < len(queue) and (total + queue[end][1] <= limit or queue[end][0] <= launch):
                total += queue[end][1]
                end += 1
            if end < len(queue):
                last[launch] = queue[end][0]
            total -= size
    found: dict[int, int] = {}
    for flight in dag.effects.flights:
        if flight.wait is not None and flight.launch in last:
            bound = max(last[flight.launch], flight.wait + 1)  # a wait that is past its limit already does not move up
            found[flight.wait] = min(found.get(flight.wait, bound), bound)
    return found


def _units(dag: Dag, limits: dict[int, int]) -> dict[int, tuple[list[int], int]]:
    """For each wait: the wait and the views that move with it, in order, and the first node that they must stay before.

    Waits are visited from last to first: a wait that must not pass a later one is limited by that one's new position.
    """
    units: dict[int, tuple[list[int], int]] = {}
    for i, profile in reversed(dag.effects.special):
        if not profile.wait:
            continue
        closure, others = _views(dag, i)
        siblings = [j for storage in dag.effects.surely_held(i) for j in dag.effects.waits_on.get(storage, []) if j > i]
        stops = [units[j][1] if j in units else j for j in (*others, *siblings) if j not in closure]
        anchor = min([*stops, limits.get(i, len(dag.nodes) - 1)])
        units[i] = (sorted(j for j in closure if j < anchor), anchor)
    return units


def _views(dag: Dag, wait: int) -> tuple[set[int], list[int]]:
    """The wait and the views of its result, and the other nodes that must come after one of them."""
    closure, others = {wait}, []
    stack = [wait]
    while stack:
        for j in dag.succs[stack.pop()]:
            if j in closure:
                continue
            if is_alias(dag.nodes[j]) and not dag.effects.completes(j):
                closure.add(j)
                stack.append(j)
            else:
                others.append(j)
    return closure, others


def _first_settled(anchor: int, units: list[list[int]]) -> int:
    """The start of the contiguous run of whole units just before their anchor; these need not move."""
    members = {j for unit in units for j in unit}
    first = anchor
    while first - 1 in members:
        first -= 1
    while straddling := [unit[-1] for unit in units if unit[0] < first <= unit[-1]]:
        first = max(straddling) + 1
    return first
