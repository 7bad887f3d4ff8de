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

Views of the result, found by what they do and not by their names, go down with the wait. A wait never passes a write to a
buffer that its launch still sends or has not received.

Declines: a wait that stands before its first use already.
Numerics: exact. Memory: what a launch sends and receives is held until the later wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from weft.graph.dag import Dag
from weft.graph.profiles import is_alias
from weft.passes.base import Context, Numerics, Pass
from weft.planning.plan import Decision, Move, Reason, Step


@dataclass(frozen=True)
class SinkWaits(Pass):
    """Move each wait, with the views of its result, down to the first node that needs it."""

    numerics = Numerics.EXACT

    def plan(self, graph: Graph, context: Context) -> Step:
        dag = Dag(graph)
        units = [(i, *_unit(dag, i)) for i, profile in dag.effects.special if profile.wait]
        beside: dict[int, set[int]] = {}
        for _, unit, anchor in units:
            beside.setdefault(anchor, set()).update(unit)
        settled = {anchor: _first_of_block(anchor, members) for anchor, members in beside.items()}
        actions: list[Move] = []
        decisions: list[Decision] = []
        for i, unit, anchor in units:
            wait, first_use = dag.nodes[i].name, dag.nodes[anchor].name
            if unit[0] >= settled[anchor]:
                sentence = f"{wait} stands before its first use, {first_use}, already"
                decisions.append(self.decision(Reason.ALREADY_DONE, sentence, wait, blocking=first_use))
                continue
            actions.append(Move(tuple(dag.nodes[j].name for j in unit), first_use, "before"))
            sentence = f"{wait} sinks to its first use, {first_use}"
            decisions.append(self.decision(Reason.APPLIED, sentence, wait, blocking=first_use))
        return self.step(actions, decisions)


def _unit(dag: Dag, wait: int) -> tuple[list[int], int]:
    """The wait with the views that follow it, in order, and the first node that cannot go down with them."""
    unit = {wait}
    stack = [wait]
    anchor = len(dag.nodes) - 1
    while stack:
        for j in dag.succs[stack.pop()]:
            if j in unit:
                continue
            if is_alias(dag.nodes[j]) and not dag.effects.completes(j):
                unit.add(j)
                stack.append(j)
            else:
                anchor = min(anchor, j)
    return sorted(j for j in unit if j < anchor), anchor


def _first_of_block(anchor: int, members: set[int]) -> int:
    """Where the unbroken run of members right before the anchor begins."""
    first = anchor
    while first - 1 in members:
        first -= 1
    return first
