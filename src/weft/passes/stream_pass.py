"""Base of the passes that stream collectives through matmuls: their common options, and the plan for each site."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from torch.fx import Graph, Node

from weft.cost.prices import full_bytes
from weft.errors import PipelineError, PlanError, compose
from weft.graph.collective import Collective, collectives
from weft.graph.dag import Dag
from weft.graph.edit import Edit
from weft.graph.groups import group_argument
from weft.graph.ops import Kind
from weft.graph.roles import Role, Roles
from weft.graph.versions import dag_of
from weft.passes.base import NamedNodes, Pass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step, Stream
from weft.quantities import duration_text
from weft.rewriting.launches import place_in
from weft.streaming.chunking import Chunking
from weft.streaming.gather_sites import GatherSite, why_not_followed
from weft.streaming.lowerings.low_contention import LowContention, whole
from weft.streaming.lowerings.portable import Portable
from weft.streaming.lowerings.protocol import Lowering, Name
from weft.streaming.lowerings.ring import Ring
from weft.streaming.lowerings.sharing import how_to_share, why_not_shared
from weft.streaming.lowerings.symmetric_memory import SymmetricMemory
from weft.streaming.profit import StreamSite, Ways, choose
from weft.streaming.scatter_sites import ScatterSite
from weft.streaming.trial_program import ChunkCosts
from weft.streaming.write_conflicts import WriteConflicts

Site = GatherSite | ScatterSite
SYMMETRIC = SymmetricMemory()
COPIES = LowContention()
LOWERINGS: tuple[Lowering, ...] = (SYMMETRIC, Portable(), COPIES, Ring())
AUTO: tuple[Name, ...] = ("symmetric-memory", "portable")
"""The lowerings that `auto` tries for a given number of chunks, in this order."""
APPLIED: dict[Name, str] = {
    "portable": "streamed {launch} with {products} in {chunks} chunks",
    "symmetric-memory": "fused {launch} and {products} into one symmetric-memory operator",
    "low-contention": "copied {launch} from peer to peer",
    "ring": "streamed {launch} with {products} around a ring of {chunks} ranks",
}
"""The sentence for an applied site, by lowering."""


@dataclass(frozen=True)
class StreamPass(Pass):
    """Base of the passes that split collectives and adjacent matmuls into chunks."""

    reorders_launches = True
    kinds: ClassVar[tuple[Kind, ...]]

    chunks: int | None = None
    """Number of chunks of every collective that can be split, whether or not that saves time. None: the number with the
    shortest simulated step on the cluster (nodes of eight H100 if none is given), or no split if none is shorter."""
    kernel: Literal["auto", "portable", "symmetric-memory", "low-contention", "ring"] = "auto"
    """`portable`: plain nodes that every backend runs. `symmetric-memory`: torch's fused CUDA operators. `auto`: for
    each site, the one with the shorter simulated step; with `chunks`, the fused operators where they can run.
    `low-contention`: every gather and scatter whose copies through symmetric memory take no longer, with or without
    products. `ring`: plain nodes that send from rank to rank, one chunk per rank; needs `rank`, and torch 2.12."""

    rank: int | None = None
    """The rank that runs this graph, for `ring`. Give each rank its own."""

    only: Literal["all", "activations"] = "all"
    """`activations`: stream only the collectives of tensor parallelism, not FSDP's parameters and gradients."""

    def __post_init__(self) -> None:
        if self.chunks is not None and self.chunks < 2:
            what = f"chunks is {self.chunks}, expected 2 or more"
            raise PipelineError(compose(self.name(), what, do="leave it out to let Weft choose the number"))

    @abstractmethod
    def read(self, collective: Collective, dag: Dag) -> Site | Refusal:
        """The streaming site of a collective, or why it cannot be streamed."""

    def plan(self, graph: Graph, context: Context) -> Step:
        dag = dag_of(graph)
        writes, roles = WriteConflicts(dag), Roles(dag)
        decisions: list[Decision] = []
        sites: list[Site] = []
        copies: list[Stream] = []
        taken: set[Node] = set()
        for collective in collectives(graph):
            if collective.kind not in self.kinds:
                continue
            if self._is_only_for_activations(collective) and roles.of(collective) is not Role.ACTIVATIONS:
                role = roles.of(collective).value
                what = f"{collective.launch.name} carries {role}, and only activations are streamed"
                decisions.append(self._declined(collective, Refusal(Reason.OTHER_ROLE, what)))
                continue
            other = context.withheld.get(context.groups.canonical(collective.group))
            if other is not None:
                what = f"{collective.launch.name} stays: {other}"
                decisions.append(self._declined(collective, Refusal(Reason.OTHER_RANKS, what)))
                continue
            if self.kernel == "low-contention":
                refusal = self._why_not_copied(collective, context)
                decisions.append(self._declined(collective, refusal) if refusal else self._copied(collective))
                copies += [] if refusal else [Stream(collective.launch.name, (), 1, COPIES.name)]
                continue
            site = self._site(collective, dag, taken, context)
            if isinstance(site, Refusal):
                decisions.append(self._declined(collective, site))
                continue
            decisions += [self._declined(collective, refusal) for refusal in site.dropped]
            taken.update(site.products)
            sites.append(site)
        actions: list[Stream] = []
        decisions += self._notes(sites)
        for site, cut in zip(sites, self._cuts(sites, dag, context), strict=True):
            name = site.collective.launch.name
            cut = writes.why_not(cut) or cut if isinstance(cut, Chunking) else cut
            if isinstance(cut, Refusal):
                decisions.append(self._declined(site.collective, cut))
                continue
            found = self._lowering(cut, context)
            if isinstance(found, Refusal):
                decisions.append(self._declined(site.collective, found))
                continue
            lowering, cut = found
            decisions += [self._declined(site.collective, refusal) for refusal in cut.dropped]
            products = tuple(node.name for node in cut.products)
            actions.append(Stream(name, products, cut.chunks, lowering.name, cut.ring_rank, cut.decomposed_over))
            sentence = APPLIED[lowering.name].format(launch=name, products=", ".join(products), chunks=cut.chunks)
            decisions.append(self.decision(Reason.APPLIED, sentence, name, *products))
        return self.step([*copies, *actions], decisions)

    def _why_not_copied(self, collective: Collective, context: Context) -> Refusal | None:
        """Why a collective is not copied through symmetric memory; None if it is."""
        launch = collective.launch
        refusal = (
            why_not_followed(collective)
            or why_not_shared(launch, context, asked_for=True)
            or COPIES.why_not(whole(launch), None)
        )
        if refusal is not None or context.cluster is None:
            return refusal
        cluster = context.cluster
        group, num_bytes = context.groups.group(group_argument(launch)), full_bytes(collective) or 0
        copied = cluster.copied(collective.kind, group, num_bytes)
        rings = cluster.collective_us(collective.kind, group, num_bytes)
        if copied.us * (1 + copied.sm_share) <= rings * (1 + cluster.device.overlap_slowdown):
            return None
        what = f"{launch.name} stays: copies take {duration_text(copied.us)}, and rings {duration_text(rings)}"
        return Refusal(Reason.NO_GAIN, what)

    def _copied(self, collective: Collective) -> Decision:
        name = collective.launch.name
        return self.decision(Reason.APPLIED, APPLIED["low-contention"].format(launch=name), name)

    def _notes(self, sites: Sequence[Site]) -> list[Decision]:
        """For each group that could share memory but does not, how to enable that."""
        if self.kernel != "auto":
            return []
        first = {site.collective.group: site.collective for site in reversed(sites)}
        found = [(collective, how_to_share(collective.launch)) for collective in first.values()]
        return [self._declined(collective, refusal) for collective, refusal in found if refusal is not None]

    def _is_only_for_activations(self, collective: Collective) -> bool:
        """Whether to skip collectives of other roles: bucketing serves all-reduces of gradients better."""
        return self.only == "activations" or (collective.kind is Kind.ALL_REDUCE and self.chunks is None)

    def _cuts(self, sites: list[Site], dag: Dag, context: Context) -> list[Chunking | Refusal]:
        """For each site its chunks, or why it is not split."""
        if self.chunks is not None:
            cuts = [site.cut(self.chunks) for site in sites]
            costs = ChunkCosts(context.cluster, context.groups) if context.cluster is not None else None
            return [costs.cheaper(cut) if costs and isinstance(cut, Chunking) else cut for cut in cuts]
        ways = Ways(
            in_chunks=self.kernel != "symmetric-memory",
            fused=partial(self._fused, context=context) if self.kernel in ("auto", "symmetric-memory") else None,
        )
        return choose(sites, dag, context.groups, context.target_cluster, context.effort, ways)

    def _fused(self, site: StreamSite, context: Context) -> Chunking | Refusal:
        """A site as one operator through symmetric memory, or why it cannot be one."""
        cut = site.cut(2)
        if isinstance(cut, Refusal):
            return cut
        part = SYMMETRIC.fit(cut)
        unshared = why_not_shared(cut.launch, context, asked_for=self.kernel != "auto")
        return SYMMETRIC.why_not(part, unshared) or SYMMETRIC.fused(part)

    def _lowering(self, cut: Chunking, context: Context) -> tuple[Lowering, Chunking] | Refusal:
        """The first of the requested lowerings that can run a site, with the part that it runs, or why none can."""
        if cut.fused is not None:
            return SYMMETRIC, cut
        asked_for = self.kernel != "auto"
        names: tuple[Name, ...] = (self.kernel,) if self.kernel != "auto" else AUTO if self.chunks else ("portable",)
        unshared = why_not_shared(cut.launch, context, asked_for=asked_for)
        refusals: list[Refusal] = []
        for lowering in (lowering for lowering in LOWERINGS if lowering.name in names):
            part = lowering.fit(cut)
            refusal = lowering.why_not(part, unshared)
            if refusal is None:
                return lowering, part
            refusals.append(refusal)
        return refusals[-1]

    def _site(self, collective: Collective, dag: Dag, taken: set[Node], context: Context) -> Site | Refusal:
        site = self.read(collective, dag)
        if isinstance(site, Refusal):
            return site
        free = tuple(node for node in site.products if node not in taken)
        if not free:
            what = f"{collective.launch.name} stays: {site.products[0].name} is streamed with another collective"
            return Refusal(Reason.ALREADY_DONE, what, site.products[0].name)
        site = site.with_products(free)
        if self.kernel != "ring" or self.rank is None:
            return site
        if collective.kind is Kind.ALL_REDUCE:
            what = f"{collective.launch.name} cannot be a ring: an all-reduce gives every rank the whole sum"
            return Refusal(Reason.NO_KERNEL, what, collective.launch.name)
        group = context.groups.group(group_argument(collective.launch))
        own = place_in(group, self.rank)
        if own is None:
            what = f"{collective.launch.name} cannot be a ring: rank {self.rank} is not in its group"
            return Refusal(Reason.OTHER_RANKS, what, collective.launch.name)
        return replace(site, ring_rank=own)

    def _declined(self, collective: Collective, refusal: Refusal) -> Decision:
        name = collective.launch.name
        return self.decision(refusal.reason, refusal.sentence, name, blocking=refusal.blocking)

    def apply(self, edit: Edit, step: Step) -> None:
        nodes = NamedNodes(edit.graph.nodes)
        dag = edit.dag
        actions = [action for action in step.actions if isinstance(action, Stream)]
        cuts = [self._cut(action, nodes, dag) for action in actions]
        replacements: dict[Node, Node] = {}
        for action, cut in zip(actions, cuts, strict=True):
            lowering = next(lowering for lowering in LOWERINGS if lowering.name == action.kernel)
            replacements |= lowering.build(edit, cut)
        edit.replace_each(replacements)

    def _cut(self, action: Stream, nodes: NamedNodes, dag: Dag) -> Chunking:
        """The chunks of a planned site, derived again from the graph."""
        if action.kernel == "low-contention":
            return whole(nodes[action.launch])
        site = self.read(Collective(nodes[action.launch]), dag)
        products = tuple(nodes[name] for name in action.products)
        if not isinstance(site, Refusal):
            site = replace(site.with_products(products), ring_rank=action.own)
        found = site if isinstance(site, Refusal) else site.cut(action.chunks)
        if isinstance(found, Refusal):
            raise PlanError(compose("plan", f"{action.launch} cannot be split as planned: {found.sentence}"))
        return replace(found, decomposed_over=action.apart)
