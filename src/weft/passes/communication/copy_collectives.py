"""Run gathers and scatters as copies through symmetric memory, where that shortens the planned step.

Why: NCCL's kernels slow the compute next to them. Copy engines take no multiprocessor, so compute runs at full speed.

Before::

    ag: f32[8, 4] = all_gather(x, 2, 'dp')
    w: f32[8, 4] = wait(ag)

After::

    ag_copied: f32[8, 4] = weft.copy_all_gather(x, 'dp')
    ag_copied_done: f32[8, 4] = wait(ag_copied)

A copy has a price: a barrier and one copy for each peer. Copies cannot be merged. A group makes one after the other,
because all of them use its symmetric memory. So the price of a single collective does not tell whether copies pay. The
pass decides similar collectives together: same kind, group, role and size, and for weights that are gathered twice, the
first or the second time. It plans the whole step with and without copies, as `schedule-overlap` will plan it, and keeps
copies only if the planned step gets shorter.

Declines: groups without symmetric memory (`only=enabled` ignores them); scatters that neither sum nor average, or of
integers or fp8; groups whose other ranks hold other graphs; copies that need too much memory or shorten no step.
Numerics: reassociates; a copied scatter may sum in another order. Bytes on the wire: unchanged. Memory: the symmetric
memory of the group, as much as its largest copy needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import Graph, Node

from weft.cost.prices import full_bytes
from weft.graph.collective import Collective, collectives
from weft.graph.edit import Edit, copy_graph
from weft.graph.groups import group_argument
from weft.graph.operator_effects import is_cheap
from weft.graph.ops import Kind
from weft.graph.roles import Roles
from weft.graph.versions import dag_of
from weft.passes.base import Numerics, Pass
from weft.passes.communication.schedule_overlap import Planner, ScheduleOverlap
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step, Stream
from weft.quantities import duration_text, size_text
from weft.scheduling.search import Effort, allowed_bytes
from weft.streaming.gather_sites import why_not_followed
from weft.streaming.lowerings.low_contention import OPERATORS, LowContention, whole
from weft.streaming.lowerings.sharing import how_to_share, why_not_shared

COPIES = LowContention()
LEAST_GAIN = 2000
"""Least gain worth taking, as 1/2000 of the step: smaller differences are noise of the search for an order."""
LARGE = 2000
"""Number of nodes above which trials are planned with effort `fast`, and only the result with the default effort."""


@dataclass(frozen=True)
class CopyCollectives(Pass):
    """Copy gathers and scatters from peer to peer where the planned step gets shorter."""

    numerics = Numerics.REASSOCIATES

    only: Literal["all", "enabled"] = "all"
    """`enabled`: only groups that have enabled symmetric memory, as in the presets. Enable it on all ranks of a group
    or on none, so that they decide alike. `all`: also groups that could enable it, and groups that this process does
    not have, if their level of the given cluster lists symmetric memory."""

    def plan(self, graph: Graph, context: Context) -> Step:
        decisions: list[Decision] = []
        found: list[Collective] = []
        noted: set[str] = set()
        for collective in collectives(graph):
            if collective.kind not in OPERATORS:
                continue
            unshared = why_not_shared(collective.launch, context, asked_for=self.only == "all")
            if unshared is not None and self.only == "enabled":
                if collective.group not in noted and (note := how_to_share(collective.launch)) is not None:
                    noted.add(collective.group)
                    decisions.append(self._declined(collective, note))
                continue
            refusal = self._why_not(collective, context) or unshared
            if refusal is None:
                found.append(collective)
            else:
                decisions.append(self._declined(collective, refusal))
        chosen = _CopyTrials(graph, context).made(found) if found else {}
        copied = [name for name, refusal in chosen.items() if refusal is None]
        for collective in found:
            name, refusal = collective.launch.name, chosen[collective.launch.name]
            applied = self.decision(Reason.APPLIED, f"copied {name} from peer to peer", name)
            decisions.append(applied if refusal is None else self._declined(collective, refusal))
        return self.step([Stream(name, (), 1, COPIES.name) for name in sorted(copied)], decisions)

    def apply(self, edit: Edit, step: Step) -> None:
        _copy(edit, {action.launch for action in step.actions if isinstance(action, Stream)})

    def _why_not(self, collective: Collective, context: Context) -> Refusal | None:
        """Why a collective cannot be copied, although its ranks share memory; None if it can."""
        name = collective.launch.name
        other = context.withheld.get(context.groups.canonical(collective.group))
        if other is not None:
            return Refusal(Reason.OTHER_RANKS, f"{name} stays: {other}", name)
        return why_not_followed(collective) or COPIES.why_not(whole(collective.launch), None)

    def _declined(self, collective: Collective, refusal: Refusal) -> Decision:
        return self.decision(refusal.reason, refusal.sentence, collective.launch.name, blocking=refusal.blocking)


def _copy(edit: Edit, names: Container[str]) -> None:
    launches = [node for node in edit.graph.nodes if node.name in names]
    edit.replace_each({old: new for launch in launches for old, new in COPIES.build(edit, whole(launch)).items()})


def _names(found: Sequence[Collective]) -> list[str]:
    return [collective.launch.name for collective in found]


@dataclass(frozen=True)
class _PlannedCopies:
    """A planned step."""

    copied: frozenset[str]
    """The launches that are copied in it."""
    step_ns: int
    needed_bytes: int
    """Peak memory and symmetric memory."""
    limit_bytes: int
    """Without a limit of the user's, symmetric memory may take as much again as the planner adds to the given peak."""

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.limit_bytes

    def is_shorter_than(self, other: _PlannedCopies) -> bool:
        return (other.step_ns - self.step_ns) * LEAST_GAIN > other.step_ns


class _CopyTrials:
    """Decides which collectives are copied, one class of similar ones after the other."""

    def __init__(self, graph: Graph, context: Context) -> None:
        self.graph, self.context = graph, context
        is_large = len(graph.nodes) > LARGE and context.effort == "default"
        self.effort: Effort = "fast" if is_large else context.effort
        self.tried: dict[tuple[frozenset[str], Effort], _PlannedCopies] = {}
        self.given = self.now = self._planned(frozenset(), self.effort)

    def made(self, found: Sequence[Collective]) -> dict[str, Refusal | None]:
        """For each launch why it is not copied; None if it is."""
        roles = Roles(dag_of(self.graph))
        classes: dict[tuple[Hashable, ...], list[Collective]] = {}
        earlier: Counter[tuple[Kind, str, Node]] = Counter()
        for each in found:
            sent = each.kind, self.context.groups.canonical(each.group), _source(each)
            direction = *sent[:2], earlier[sent]  # weights are gathered in forward, and again in backward
            earlier[sent] += 1
            key = *direction, each.dtype, roles.of(each), full_bytes(each), each.reduce_op
            classes.setdefault(key, []).append(each)
        refusals: dict[str, Refusal | None] = {}
        worth: dict[tuple[Hashable, ...], list[Collective]] = {}
        for key, similar in sorted(classes.items(), key=lambda item: -self._most_saved_us(item[1])):
            refusal = self._why_not_tried(similar)
            refusals |= dict.fromkeys(_names(similar), refusal)
            worth |= {key: similar} if refusal is None else {}
        together: dict[tuple[Hashable, ...], list[Collective]] = {}
        for key, similar in worth.items():  # copies and NCCL's kernels slow each other, so first try all at once
            together.setdefault(key[:3], []).extend(similar)
        for every in together.values():
            self._decide(every)
        for similar in worth.values():
            refusals |= dict.fromkeys(_names(similar), self._decide(similar))
        return refusals | dict.fromkeys(self.now.copied, self._why_not_in_full())

    def _why_not_in_full(self) -> Refusal | None:
        """Why none of the chosen copies pays, if the trials were planned with less effort than the step will be."""
        if self.effort == self.context.effort or not self.now.copied:
            return None
        without, with_copies = (self._planned(c, self.context.effort) for c in (frozenset[str](), self.now.copied))
        if with_copies.fits and with_copies.is_shorter_than(without):
            return None
        stays, copied = (duration_text(planned.step_ns / 1000) for planned in (without, with_copies))
        what = f"they stay: the step takes {stays}, and {copied} with {len(self.now.copied)} copies"
        return Refusal(Reason.NO_GAIN, what)

    def _why_not_tried(self, similar: Sequence[Collective]) -> Refusal | None:
        saved = self._most_saved_us(similar)
        if saved * 1000 * LEAST_GAIN > self.given.step_ns:
            return None
        what = f"{similar[0].launch.name} stays: copies of {_count(similar)} would save at most {duration_text(saved)}"
        return Refusal(Reason.NO_GAIN, what)

    def _decide(self, similar: Sequence[Collective]) -> Refusal | None:
        """Copy collectives, or no longer copy them, if the planned step gets shorter; why they are not copied."""
        names = frozenset(_names(similar))
        is_copied = names <= self.now.copied
        copied = self.now.copied - names if is_copied else self.now.copied | names
        other = self._planned(copied, self.effort)
        with_copies, without = (self.now, other) if is_copied else (other, self.now)
        if other.fits and other.is_shorter_than(self.now):
            self.now, is_copied = other, not is_copied
        if is_copied:
            return None
        first, count = similar[0].launch.name, _count(similar)
        if not other.fits:
            needed, limit = size_text(other.needed_bytes), size_text(other.limit_bytes)
            what = f"{first} stays: copies of {count} need {needed} of memory, and the limit is {limit}"
            return Refusal(Reason.HOLDS_MEMORY, what)
        stays, copied = (duration_text(planned.step_ns / 1000) for planned in (without, with_copies))
        what = f"{first} stays: the planned step takes {stays}, and {copied} with copies of {count}"
        return Refusal(Reason.NO_GAIN, what)

    def _most_saved_us(self, similar: Sequence[Collective]) -> float:
        """The most that copies can save: the time that they take less, and that compute beside them takes less."""
        first, cluster = similar[0], self.context.target_cluster
        group, num_bytes = self.context.groups.group(group_argument(first.launch)), full_bytes(first) or 0
        rings, slowdown = cluster.collective_us(first.kind, group, num_bytes), cluster.device.overlap_slowdown
        shorter = max(rings - cluster.copied(first.kind, group, num_bytes).us, 0.0)
        return len(similar) * (rings * slowdown / (1 + slowdown) + shorter)

    def _planned(self, copied: frozenset[str], effort: Effort) -> _PlannedCopies:
        """The step as the planner plans it with copies of these launches."""
        if (known := self.tried.get((copied, effort))) is not None:
            return known
        graph = copy_graph(self.graph)
        with Edit(graph) as edit:
            _copy(edit, copied)
        outcome = Planner(ScheduleOverlap(), graph, replace(self.context, effort=effort)).best().outcome
        needed, limit = outcome.peak_bytes + outcome.program.symmetric_bytes, self.context.memory_limit_bytes
        limit = allowed_bytes(outcome.limit_bytes) if limit is None else limit
        planned = self.tried[copied, effort] = _PlannedCopies(copied, outcome.step_ns, needed, limit)
        return planned


def _source(collective: Collective) -> Node:
    """The input or the call that a collective's data comes from, through casts and views."""
    node = collective.inputs[0]
    while node.op == "call_function" and len(node.all_input_nodes) == 1 and is_cheap(node.target):
        node = node.all_input_nodes[0]
    return node


def _count(similar: Sequence[Collective]) -> str:
    others = len(similar) - 1
    return "it" if others == 0 else f"it and {others} similar {'one' if others == 1 else 'ones'}"
