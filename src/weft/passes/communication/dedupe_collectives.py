"""Remove repeated waits and repeated collectives.

Why: tracing repeats waits, and the same tensor is often gathered twice for two uses close to each other.

Before::

    ag0: f32[4, 4] = all_gather(x, 2, 'dp')
    w0: f32[4, 4] = wait(ag0)
    ag1: f32[4, 4] = all_gather(x, 2, 'dp')
    w1: f32[4, 4] = wait(ag1)
    r: f32[4, 4] = add(w0, w1)

After::

    ag0: f32[4, 4] = all_gather(x, 2, 'dp')
    w0: f32[4, 4] = wait(ag0)
    r: f32[4, 4] = add(w0, w0)

Equal collectives merge only if their live ranges overlap already; then nothing stays in memory longer than before.
Merging the gathers of a weight in forward and backward would keep the weight in memory in between, and undo FSDP's
resharding. With `units`, a block may gather a weight once for its recomputed forward and its backward, as FSDP2 does.

Declines: results whose live ranges do not overlap; results that are written; two results that are both returned, which
must stay two tensors; collectives whose results cannot be paired.
Numerics: exact. Bytes on the wire: fewer.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch.fx import Graph, Node

from weft.bucketing.units import units_of
from weft.graph import ops
from weft.graph.collective import Collective, collectives
from weft.graph.dag import Dag
from weft.graph.operator_effects import is_alias
from weft.graph.ops import Kind
from weft.graph.roles import Role, Roles
from weft.graph.value_numbers import ValueNumbers
from weft.graph.versions import dag_of
from weft.passes.base import Numerics, Pass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Action, Erase, Move, Replace, Step
from weft.quantities import size_text


@dataclass(frozen=True)
class DedupeCollectives(Pass):
    """Merge repeated waits, and equal collectives whose live ranges overlap."""

    numerics = Numerics.EXACT

    units: bool = False
    """Also merge equal gathers of one unit of FSDP2, whose weights stay gathered from its first use of them to its
    last. `bucket-all-gathers` explains units."""

    def plan(self, graph: Graph, context: Context) -> Step:
        dag = dag_of(graph)
        actions: list[Action] = []
        decisions: list[Decision] = []
        replacements = self._merge_collectives(dag, context, actions, decisions)
        self._merge_waits(dag, replacements, actions, decisions)
        return self.step(actions, decisions)

    def _merge_waits(
        self, dag: Dag, replacements: dict[Node, Node], actions: list[Action], decisions: list[Decision]
    ) -> None:
        first: dict[Node, Node] = {}
        for i, profile in dag.effects.special:
            wait = dag.nodes[i]
            if not profile.wait or wait in replacements or not isinstance(wait.args[0], Node):
                continue
            waited = replacements.get(wait.args[0], wait.args[0])
            source = first.get(waited, waited if _is_behind_a_wait(waited) else None)
            if source is None or dag.effects.completes(i):
                first[waited] = wait
                continue
            replacements[wait] = source
            actions += [Replace(wait.name, source.name), Erase((wait.name,))]
            sentence = f"removed {wait.name}: {source.name} has waited for the same launch"
            decisions.append(self.decision(Reason.APPLIED, sentence, wait.name, source.name))

    def _merge_collectives(
        self, dag: Dag, context: Context, actions: list[Action], decisions: list[Decision]
    ) -> dict[Node, Node]:
        """Merge equal collectives; returns each removed wait with its replacement."""
        replacements: dict[Node, Node] = {}
        kept: dict[Hashable, _Kept] = {}
        numbering = ValueNumbers(dag)
        units = _gather_units(dag) if self.units else {}
        for again in collectives(dag.nodes[0].graph) if dag.nodes else ():
            if again.kind in ops.POINT_TO_POINT or not again.is_functional:
                continue
            key = numbering.of_launch(again)
            first = kept.get(key)
            withheld = context.withheld.get(context.groups.canonical(again.group))
            if first is not None and withheld is not None:
                names = (again.launch.name, first.collective.launch.name)
                sentence = f"{names[0]} repeats {names[1]} and stays: {withheld}"
                decisions.append(self.decision(Reason.OTHER_RANKS, sentence, *names))
                continue
            unit = units.get(again.launch)
            refusal = first.why_not(again, dag, unit) if first is not None else None
            if first is None or refusal is not None:
                if first is not None and refusal is not None:
                    decisions.append(self._declined(first, again, refusal))
                kept[key] = _Kept(again, _last_use(dag, again), _is_returned(dag, again), unit)
                continue
            names = (again.launch.name, first.collective.launch.name)
            decisions.append(self.decision(Reason.APPLIED, f"removed {names[0]}: it repeats {names[1]}", *names))
            replacements |= first.absorb(again, dag, actions)
        return replacements

    def _declined(self, first: _Kept, again: Collective, refusal: tuple[Reason, str, str | None]) -> Decision:
        reason, why, blocking = refusal
        names = (again.launch.name, first.collective.launch.name)
        return self.decision(reason, f"{names[0]} repeats {names[1]} and stays: {why}", *names, blocking=blocking)


@dataclass
class _Kept:
    """A collective that later ones may be merged into, and the end of its live range."""

    collective: Collective
    last_use: int
    is_returned: bool
    unit: str | None
    """The unit of FSDP2 that gathers it, if units matter."""

    def why_not(self, again: Collective, dag: Dag, unit: str | None) -> tuple[Reason, str, str | None] | None:
        """Why an equal collective cannot be merged into this one; None if it can."""
        pairs = _pairs(dag, self.collective, again)
        if pairs is None:
            return Reason.UNSUPPORTED_FORM, "its results cannot be paired with waits one by one", None
        is_held = unit is not None and unit == self.unit
        if self.last_use < dag.index[again.launch] and not is_held:
            last = dag.nodes[self.last_use].name
            size = self.collective.output_bytes
            held = size_text(size) if size is not None else "its result"
            return Reason.HOLDS_MEMORY, f"{held} would stay in memory from {last} to {again.launch.name}", last
        written = dag.effects.memory.written
        for collective in (self.collective, again):
            if written.intersection(dag.effects.held(dag.index[collective.launch])):
                return Reason.MUTATED, f"the result of {collective.launch.name} is written", collective.launch.name
        if self.is_returned and _is_returned(dag, again):
            return Reason.ESCAPES, "both results are returned and must stay two tensors", None
        return None

    def absorb(self, again: Collective, dag: Dag, actions: list[Action]) -> dict[Node, Node]:
        """Plan the merge; returns each removed wait with its replacement."""
        replacements: dict[Node, Node] = {}
        for mine, others in _pairs(dag, self.collective, again) or []:
            for other in others:
                if dag.index[other] < dag.index[mine]:
                    actions.append(Move((mine.name,), other.name, "before"))
                actions.append(Replace(other.name, mine.name))
                replacements[other] = mine
        gone = [*replacements, *(r for r in again.results if r is not again.launch), again.launch]
        actions.append(Erase(tuple(node.name for node in gone)))
        self.last_use = max(self.last_use, _last_use(dag, again))
        self.is_returned |= _is_returned(dag, again)
        return replacements


def _gather_units(dag: Dag) -> dict[Node, str]:
    """The unit of each gather of parameters; empty if the graph names no modules."""
    roles = Roles(dag)
    found = [c for c in collectives(dag.nodes[0].graph) if c.kind is Kind.ALL_GATHER] if dag.nodes else []
    return units_of([c.launch for c in found if roles.of(c) is Role.PARAMETERS], "split")


def _pairs(dag: Dag, first: Collective, again: Collective) -> list[tuple[Node, list[Node]]] | None:
    """For each result, the first wait of one collective and all waits of the other; None if they cannot be paired."""
    mine, others = _waits_by_item(dag, first), _waits_by_item(dag, again)
    if mine is None or others is None or mine.keys() != others.keys() or not all(mine.values()):
        return None
    return [(mine[item][0], others[item]) for item in mine]


def _waits_by_item(dag: Dag, collective: Collective) -> dict[Any, list[Node]] | None:
    """The waits for each result, in order; None if a result has other users or is taken twice."""
    found: dict[Any, list[Node]] = {}
    if collective.form.coalesced and any(user.target is not getitem for user in collective.launch.users):
        return None
    for result in collective.results:
        item = result.args[1] if result is not collective.launch else None
        if item in found or not all(ops.is_wait(user.target) for user in result.users):
            return None
        found[item] = sorted(result.users, key=dag.index.__getitem__)
    return found


def _last_use(dag: Dag, collective: Collective) -> int:
    """The position of the last user of the result or of a view of it."""
    seen = {collective.launch}
    stack = [collective.launch]
    last = dag.index[collective.launch]
    while stack:
        for user in stack.pop().users:
            last = max(last, dag.index[user])
            if user not in seen and is_alias(user):
                seen.add(user)
                stack.append(user)
    return last


def _is_returned(dag: Dag, collective: Collective) -> bool:
    return bool(dag.effects.held_by_outputs.intersection(dag.effects.held(dag.index[collective.launch])))


def _is_behind_a_wait(node: Node) -> bool:
    """Whether the node is a wait or a view of one."""
    while not ops.is_wait(node.target):
        if not is_alias(node) or not node.args or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    return True
