"""Remove nodes whose results nobody needs and that change nothing anybody can see.

Why: tracing leaves dead nodes behind, and a dead collective still costs its time on the wire.

Before::

    ag: f32[4, 4] = all_gather(x, 2, 'dp')
    w: f32[4, 4] = wait(ag)
    r: f32[2, 4] = relu(x)
    return [r]

After::

    r: f32[2, 4] = relu(x)
    return [r]

A write is needed while somebody may read what it wrote: a later node, the caller (inputs, constants and outputs), or
a collective in flight. A wait is needed while what it completes is. Every rank holds the same graph, so every rank
drops the same collectives; point-to-point communication has a peer with another view of it and always stays.

Declines: a dead node that draws random numbers (later draws would change), acts outside the graph, or is unknown.
Numerics: exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from weft.compat import input_nodes
from weft.graph import ops
from weft.graph.dag import Dag
from weft.graph.effects import Effects
from weft.graph.profiles import Profile, profile_of
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Step
from weft.rewriting.nested import taken_out


@dataclass(frozen=True)
class RemoveDeadCode(GraphwisePass):
    """Remove nodes that have no effect on outputs, inputs or other ranks."""

    numerics = Numerics.EXACT

    def plan_one(self, graph: Graph, context: Context) -> Step:
        dag = Dag(graph)
        alive, kept_dead = _alive(dag)
        dead = [node for i, node in enumerate(dag.nodes) if i not in alive]
        decisions = [self._removed(node) for node in dead] + [self._kept(node) for node in kept_dead]
        return self.step(taken_out(dead), decisions)

    def _removed(self, node: Node) -> Decision:
        collective = ops.is_communication(node.target)
        why = "nobody needs its result, and every rank drops it" if collective else "nobody needs its result"
        return self.decision(Reason.APPLIED, f"{node.name} is removed: {why}", node.name)

    def _kept(self, node: Node) -> Decision:
        return self.decision(Reason.HAS_EFFECT, f"{node.name} is unused and stays: {_effect(node)}", node.name)


def _effect(node: Node) -> str:
    found = profile_of(node)
    if found.opaque:
        return "what it does is unknown"
    if found.random:
        return "it draws random numbers"
    return "other ranks count on it" if found.launch or found.wait else "it acts outside the graph"


def _alive(dag: Dag) -> tuple[set[int], list[Node]]:
    """The nodes to keep, and those among them that are kept for their effects alone."""
    effects = dag.effects
    profiles = dict(effects.special)
    accesses = effects.memory.by_node
    needed = set(effects.held_by_outputs)
    for i, node in enumerate(dag.nodes):
        if node.op in ("placeholder", "get_attr"):
            needed.update(effects.held(i))
    alive: set[int] = set()
    kept: list[Node] = []
    for i in range(len(dag.nodes) - 1, -1, -1):
        node, touched = dag.nodes[i], accesses.get(i, [])
        profile = profiles.get(i)
        used = node.op in ("placeholder", "output") or any(dag.index[user] in alive for user in node.users)
        writes_needed = any(is_write and storage in needed for storage, is_write in touched)
        pinned = profile is not None and _is_pinned(i, profile, effects)
        if used or writes_needed or pinned:
            alive.add(i)
            needed.update(storage for storage, is_write in touched if not is_write)
            if pinned and not used and not writes_needed:
                kept.append(node)
    _keep_waits_of_living_launches(dag, alive)
    return alive, kept[::-1]


def _keep_waits_of_living_launches(dag: Dag, alive: set[int]) -> None:
    """A wait that nobody uses still ends its flight: what is written behind it may be what the launch sends."""
    for flight in dag.effects.flights:
        stack = [flight.wait] if flight.launch in alive and flight.wait is not None else []
        while stack:
            i = stack.pop()
            if i not in alive:
                alive.add(i)
                stack += [dag.index[source] for source in input_nodes(dag.nodes[i])]


def _is_pinned(i: int, profile: Profile, effects: Effects) -> bool:
    if profile.random or profile.ordered or profile.opaque:
        return True
    return (profile.launch or profile.wait) and effects.is_barrier(i, profile)
