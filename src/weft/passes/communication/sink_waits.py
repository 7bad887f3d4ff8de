"""Wait for collectives as late as their first use allows.

Why: whatever stands between a launch and its wait runs while the collective is on the wire.

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

Views of the result, found by what they do and not by their names, go down with the wait. A wait never passes a write
to a buffer that its launch still sends or has not received.

A gradient is often used only at the end of a graph; if its wait went there, all that was ever sent would be held until
then. So a wait stays before the launch with which too many bytes of its group would be in flight.

Declines: a wait that stands before its first use already; one that the bytes in flight hold back.
Numerics: exact. Memory: what a launch sends and receives is held until the later wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.profiles import is_alias
from weft.passes.base import Numerics, Pass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Move, Step


@dataclass(frozen=True)
class SinkWaits(Pass):
    """Move each wait, with the views of its result, down to the first node that needs it."""

    numerics = Numerics.EXACT

    max_in_flight_bytes: int | None = 1 << 28
    """A wait does not sink past a launch of its group with which more bytes would be in flight. None: no limit."""

    def plan(self, graph: Graph, context: Context) -> Step:
        return self.plan_on(Dag(graph))

    def plan_on(self, dag: Dag) -> Step:
        """The same for nodes that need not stand in a graph in this order."""
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
                sentence = f"{wait} stays before {first_use}: behind it too many bytes would be in flight"
                decisions.append(self.decision(Reason.IN_FLIGHT_LIMIT, sentence, wait, blocking=first_use))
                continue
            if unit[0] >= settled[anchor]:
                sentence = f"{wait} stands before its first use, {first_use}, already"
                decisions.append(self.decision(Reason.ALREADY_DONE, sentence, wait, blocking=first_use))
                continue
            actions.append(Move(tuple(dag.nodes[j].name for j in unit), dag.nodes[settled[anchor]].name, "before"))
            where = "the launch that would be one too many" if limited else "its first use"
            sentence = f"{wait} sinks to {where}, {first_use}"
            decisions.append(self.decision(Reason.APPLIED, sentence, wait, blocking=first_use))
        return self.step(actions, decisions)


def _limits(dag: Dag, limit: int) -> dict[int, int]:
    """For each wait the first launch, behind its own, of the group with which more bytes would be in flight."""
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
            bound = max(last[flight.launch], flight.wait + 1)  # what is too late already stays where it is
            found[flight.wait] = min(found.get(flight.wait, bound), bound)
    return found


def _units(dag: Dag, limits: dict[int, int]) -> dict[int, tuple[list[int], int]]:
    """For each wait: itself with the views that follow it, in order, and the first node that cannot go down with them.

    From the last wait to the first, so that a wait which another one must not pass is known by where it will stand.
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
    """The wait with the views of its result, and the other nodes that must come behind one of these."""
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
    """Where the unbroken run of whole units right before their anchor begins: these need not move."""
    members = {j for unit in units for j in unit}
    first = anchor
    while first - 1 in members:
        first -= 1
    while straddling := [unit[-1] for unit in units if unit[0] < first <= unit[-1]]:
        first = max(straddling) + 1
    return first
