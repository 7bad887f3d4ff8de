"""Base of the passes that choose how to gather, or to scatter, over two axes of a mesh.

Contract: a site is two launches in a row, one for each axis, or one launch over a group that two known groups divide.
It can take three forms: one launch over all ranks, or one launch for each axis in either order. In one of the two
orders, the parts must be sorted by a copy. Only groups that launches of the graph use are considered.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph

from weft.cost.cluster import Cluster
from weft.graph import ops
from weft.graph.collective import num_bytes
from weft.graph.groups import Group, are_axes_of_one_mesh
from weft.graph.ops import Kind
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.launches import group_of, known_groups, why_not_axes
from weft.rewriting.mesh_axes import MeshAxis, axes_of, wholes_of
from weft.rewriting.pattern import Match, Op, match_at
from weft.rewriting.rules import why_not_apply
from weft.simulation.timeline import NS_PER_US

ESTIMATES = (Cluster.collective_us, Cluster.least_us)
"""The time of a launch alone, and the time that its bytes add to a large bucket: the planner merges small launches."""

ALIKE = 1.001
"""Forms that send as many bytes may differ by rounding in the time of these bytes."""


@dataclass(frozen=True)
class MeshSite:
    """The launches that a pass may replace, the last one first."""

    waits: tuple[Match, ...]
    given: tuple[MeshAxis, ...]
    """The groups of the launches, in their order."""
    minor: MeshAxis
    major: MeshAxis

    @property
    def root(self) -> AnyNode:
        return self.waits[0].root

    @property
    def sent(self) -> AnyNode:
        return self.waits[-1]["sent"]

    @property
    def launches(self) -> tuple[str, ...]:
        return tuple(match["launch"].name for match in reversed(self.waits))

    @property
    def match(self) -> Match:
        """All nodes of the site as one match."""
        nodes = [node for match in self.waits for node in match.nodes]
        return Match(self.waits[0].bound, nodes, self.waits[0].roots)


@dataclass(frozen=True)
class MeshPass(GraphwisePass):
    """Base of the passes that choose how to gather or scatter over two axes."""

    reorders_launches = True
    why_not_nested = "whether and how often its collectives run is not known"

    kind: ClassVar[Kind]
    pattern: ClassVar[Op]
    """A wait for a launch, with `launch` and `sent`."""

    @abstractmethod
    def natural(self, site: MeshSite) -> tuple[MeshAxis, MeshAxis]:
        """The order of the axes in which the parts need no sorting."""

    @abstractmethod
    def build(self, draft: Draft, site: MeshSite, form: Sequence[MeshAxis], is_sorted: bool) -> AnyNode:
        """Plan the launches of a form; with `is_sorted`, and a copy that sorts the parts."""

    def why_not(self, draft: Draft, site: MeshSite) -> Refusal | None:
        """Why a site must stay as it is, for reasons of its kind."""
        return None

    def plan_one(self, graph: Graph, context: Context) -> Step:
        if ops.op_of(self.kind.value) not in {node.target for node in graph.nodes}:
            return self.step([], [])
        draft = Draft(graph)
        known = [MeshAxis(*found) for found in known_groups(draft, context)]
        decisions: list[Decision] = []
        for node in draft.dag.nodes:
            site = self._site(draft, node, known, context) if ops.is_wait(node.target) else None
            if site is None:
                continue
            chosen = self._why_not(draft, site, context) or self._choose(draft, site, known, context)
            refusal = chosen if isinstance(chosen, Refusal) else self._rewrite(draft, site, chosen)
            if refusal is not None:
                draft.forget()
                decision = self.decision(refusal.reason, refusal.sentence, *site.launches, blocking=refusal.blocking)
                decisions.append(decision)
            elif not isinstance(chosen, Refusal):
                groups = ", then ".join(repr(axis.group.name) for axis in chosen)
                sentence = f"{', '.join(site.launches)} now over {groups}"
                decisions.append(self.decision(Reason.APPLIED, sentence, *site.launches))
        return self.step(draft.actions, decisions)

    def _site(self, draft: Draft, node: AnyNode, known: Sequence[MeshAxis], context: Context) -> MeshSite | None:
        last = match_at(draft, self.pattern, node)
        if last is None:
            return None
        axis = _axis(draft, last, context)
        before = match_at(draft, self.pattern, last["sent"])
        if before is not None and draft.num_users(last["sent"]) == 1:
            first = _axis(draft, before, context)
            minor, major = (first, axis) if self.kind is Kind.ALL_GATHER else (axis, first)
            return MeshSite((last, before), (first, axis), minor, major)
        users = draft.users(node)
        if len(users) == 1 and any(match_at(draft, self.pattern, after) for after in draft.users(users[0])):
            return None  # the first of two
        axes = axes_of(axis.group, known)
        return MeshSite((last,), (axis,), *axes) if axes is not None else None

    def _why_not(self, draft: Draft, site: MeshSite, context: Context) -> Refusal | None:
        name = site.root.name
        if not draft.value(site.sent).is_contiguous():
            return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: its input is strided")
        several = next((m["launch"] for m in site.waits if draft.num_users(m["launch"]) > 1), None)
        if several is not None:
            return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: {several.name} has several users", several.name)
        groups = [axis.group for axis in (site.minor, site.major)]
        refusal = why_not_axes(name, groups, context) or self.why_not(draft, site)
        return refusal or why_not_apply(draft, site.match)

    def _choose(
        self, draft: Draft, site: MeshSite, known: Sequence[MeshAxis], context: Context
    ) -> tuple[MeshAxis, ...] | Refusal:
        """The form that is faster than the given one, alone and in a large bucket; or why there is none."""
        name = site.root.name
        whole = draft.value(site.root if self.kind is Kind.ALL_GATHER else site.sent)
        full = num_bytes(whole)
        if full is None or not all(type(size) is int for size in whole.shape):
            return Refusal(Reason.UNKNOWN_SIZE, f"{name} stays: its size is not known")
        cluster = context.cluster
        if cluster is None or cluster.device.traffic_ns(full) is None:
            return Refusal(Reason.NO_GAIN, f"{name} stays: without a cluster the gain of other launches is unknown")

        def times(form: Sequence[MeshAxis]) -> list[float]:
            copy_ns = (cluster.device.traffic_ns(2 * full) or 0) if self._is_sorted(site, form) else 0
            launches = list(self._sizes(form, full))
            return [
                copy_ns / NS_PER_US + sum(estimate(cluster, self.kind, *launch) for launch in launches)
                for estimate in ESTIMATES
            ]

        now = times(site.given)
        made = [(times(form), form) for form in _forms(site, known)]
        faster = [(us, form) for us, form in made if us[0] < now[0] and us[1] <= now[1] * ALIKE]
        if not faster:
            return Refusal(Reason.NO_GAIN, f"{name} stays: no other form over the same axes is faster")
        return min(faster, key=lambda found: found[0][0])[1]

    def _sizes(self, form: Sequence[MeshAxis], full: int) -> Iterator[tuple[Group, int]]:
        """The group of each launch, and the size of its tensor, gathered or not yet scattered."""
        axes = form if self.kind is not Kind.ALL_GATHER else form[::-1]
        for axis in axes:
            yield axis.group, full
            full //= axis.group.size

    def _is_sorted(self, site: MeshSite, form: Sequence[MeshAxis]) -> bool:
        return len(form) > 1 and tuple(form) != self.natural(site)

    def _rewrite(self, draft: Draft, site: MeshSite, form: Sequence[MeshAxis]) -> Refusal | None:
        made = self.build(draft, site, form, self._is_sorted(site, form))
        return draft.why_not_replace(site.root, made) or draft.replace({site.root: made}, site.match.nodes)


def _axis(draft: Draft, match: Match, context: Context) -> MeshAxis:
    return MeshAxis(group_of(draft, match["launch"], context), match["launch"])


def _forms(site: MeshSite, known: Sequence[MeshAxis]) -> Iterator[tuple[MeshAxis, ...]]:
    """The forms that the site does not have."""
    minor, major = site.minor, site.major
    wholes = list(wholes_of(minor.group, major.group, known))[:1]
    forms = [(axis,) for axis in wholes]
    if are_axes_of_one_mesh(minor.group, major.group):
        forms += [(minor, major), (major, minor)]
    given = [axis.group for axis in site.given]
    return (form for form in forms if [axis.group for axis in form] != given)
