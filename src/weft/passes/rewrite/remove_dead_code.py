"""Remove nodes without users or observable effects.

Why: tracing leaves dead nodes in the graph, and a dead collective still occupies the network.

Before::

    ag: f32[4, 4] = all_gather(x, 2, 'dp')
    w: f32[4, 4] = wait(ag)
    r: f32[2, 4] = relu(x)
    return [r]

After::

    r: f32[2, 4] = relu(x)
    return [r]

A write is live if its memory may be read afterwards: by a later node, by the caller (inputs, constants and outputs), or
by a collective in flight. The wait of a live launch is live. Every rank runs the same graph, so all ranks remove the
same collectives. Point-to-point operations always stay, since the graph of the peer is another one.

Declines: an unused node that draws random numbers (later draws would change), has effects outside the graph, or is
unknown.
Numerics: exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from weft.compat import input_nodes
from weft.graph import ops
from weft.graph.dag import Dag
from weft.graph.effects import Effects
from weft.graph.operator_effects import Profile, profile_of
from weft.graph.versions import dag_of
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Step
from weft.rewriting.nested import removal_of


@dataclass(frozen=True)
class RemoveDeadCode(GraphwisePass):
    """Remove nodes that have no effect on outputs, inputs or other ranks."""

    numerics = Numerics.EXACT

    def plan_one(self, graph: Graph, context: Context) -> Step:
        dag = dag_of(graph)
        alive, kept_dead = _alive(dag)
        dead = [node for i, node in enumerate(dag.nodes) if i not in alive]
        decisions = [self._removed(node) for node in dead] + [self._kept(node) for node in kept_dead]
        return self.step(removal_of(dead), decisions)

    def _removed(self, node: Node) -> Decision:
        collective = ops.is_communication(node.target)
        why = "its result is unused, and every rank removes it" if collective else "its result is unused"
        return self.decision(Reason.APPLIED, f"removed {node.name}: {why}", node.name)

    def _kept(self, node: Node) -> Decision:
        return self.decision(Reason.HAS_EFFECT, f"{node.name} is unused and stays: {_effect(node)}", node.name)


def _effect(node: Node) -> str:
    found = profile_of(node)
    if found.opaque:
        return "its effects are unknown"
    if found.random:
        return "it draws random numbers"
    return "other ranks take part in it" if found.launch or found.wait else "it has effects outside the graph"


def _alive(dag: Dag) -> tuple[set[int], list[Node]]:
    """The live nodes, and those of them that are live only for their effects."""
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
    """Keep the waits of live launches.

    An unused wait still marks the end of the transfer: a later write may overwrite the buffer that the launch sends.
    """
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
