"""What the passes that stream collectives through products share: their options, and how sites become decisions."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch.fx import Graph, Node

from weft.errors import PipelineError, PlanError, compose
from weft.graph.collective import Collective, collectives
from weft.graph.dag import Dag
from weft.graph.edit import Edit
from weft.graph.groups import group_argument
from weft.graph.ops import Kind
from weft.graph.roles import Role, Roles
from weft.passes.base import NamedNodes, Pass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step, Stream
from weft.rewriting.launches import place_in
from weft.streaming.chunking import Chunking
from weft.streaming.gather_sites import GatherSite
from weft.streaming.lowerings.low_contention import LowContention
from weft.streaming.lowerings.portable import Portable
from weft.streaming.lowerings.protocol import Lowering, Name
from weft.streaming.lowerings.ring import Ring
from weft.streaming.lowerings.symmetric_memory import SymmetricMemory
from weft.streaming.profit import choose
from weft.streaming.scatter_sites import ScatterSite
from weft.streaming.trial_program import ChunkCosts
from weft.streaming.write_conflicts import WriteConflicts

Site = GatherSite | ScatterSite
KERNELS: tuple[Lowering, ...] = (SymmetricMemory(), Portable(), LowContention(), Ring())
AUTO = ("symmetric-memory", "portable")
"""The kernels that are tried where none is asked for, in this order."""
HOW: dict[Name, str] = {
    "portable": "{launch} and {products} run in {chunks} chunks",
    "symmetric-memory": "{launch} and {products} run as one operator of symmetric memory",
    "low-contention": "{launch} is copied from peer to peer beside {products}",
    "ring": "{launch} and {products} run in a ring of {chunks} ranks",
}
"""What was done, by kernel."""


@dataclass(frozen=True)
class StreamPass(Pass):
    """Base of the passes that cut collectives and the products beside them into chunks."""

    reorders_launches = True
    kinds: ClassVar[tuple[Kind, ...]]

    chunks: int | None = None
    """Cut every collective that can be into this many chunks, whether it pays or not. None: the number that makes the
    simulated step shortest on the cluster, or on nodes of eight H100 if none is given; else it stays whole."""
    kernel: Literal["auto", "portable", "symmetric-memory", "low-contention", "ring"] = "auto"
    """`portable`: plain nodes that any backend runs. `symmetric-memory`: torch's fused operators on CUDA. `auto`: the
    fused operators where they can run, else plain nodes. `low-contention`: whole, but copied through symmetric memory.
    `ring`: plain nodes that send from rank to rank, as many chunks as ranks; needs `rank`, and torch 2.12."""

    rank: int | None = None
    """For a ring: the rank that the graph is of. Every rank gives its own."""

    only: Literal["all", "activations"] = "all"
    """`activations`: what tensor parallelism moves; the parameters and gradients of FSDP stay."""

    def __post_init__(self) -> None:
        if self.chunks is not None and self.chunks < 2:
            what = f"chunks is {self.chunks}, expected 2 or more"
            raise PipelineError(compose(self.name(), what, do="leave it out to have the number chosen"))

    @abstractmethod
    def read(self, collective: Collective, dag: Dag) -> Site | Refusal:
        """The site of a collective, or why it is none."""

    def plan(self, graph: Graph, context: Context) -> Step:
        dag = Dag(graph)
        writes, roles = WriteConflicts(dag), Roles(dag)
        decisions: list[Decision] = []
        sites: list[Site] = []
        taken: set[Node] = set()
        for collective in collectives(graph):
            if collective.kind not in self.kinds:
                continue
            if self._is_only_for_activations(collective) and roles.of(collective) is not Role.ACTIVATIONS:
                role = roles.of(collective).value
                what = f"{collective.launch.name} carries {role}, only activations are streamed"
                decisions.append(self._declined(collective, Refusal(Reason.OTHER_ROLE, what)))
                continue
            site = self._site(collective, dag, taken, context)
            if isinstance(site, Refusal):
                decisions.append(self._declined(collective, site))
                continue
            decisions += [self._declined(collective, refusal) for refusal in site.dropped]
            taken.update(site.products)
            sites.append(site)
        actions: list[Stream] = []
        for site, cut in zip(sites, self._cuts(sites, dag, context), strict=True):
            name = site.collective.launch.name
            cut = writes.why_not(cut) or cut if isinstance(cut, Chunking) else cut
            if isinstance(cut, Refusal):
                decisions.append(self._declined(site.collective, cut))
                continue
            kernel = self._kernel(cut)
            if isinstance(kernel, Refusal):
                decisions.append(self._declined(site.collective, kernel))
                continue
            decisions += [self._declined(site.collective, refusal) for refusal in cut.dropped]
            products = tuple(node.name for node in cut.products)
            actions.append(Stream(name, products, cut.chunks, kernel.name, cut.ring_rank, cut.decomposed_over))
            sentence = HOW[kernel.name].format(launch=name, products=", ".join(products), chunks=cut.chunks)
            decisions.append(self.decision(Reason.APPLIED, sentence, name, *products))
        return self.step(actions, decisions)

    def _is_only_for_activations(self, collective: Collective) -> bool:
        """Sums of gradients are left to buckets, unless everything is asked for."""
        return self.only == "activations" or (collective.kind is Kind.ALL_REDUCE and self.chunks is None)

    def _cuts(self, sites: list[Site], dag: Dag, context: Context) -> list[Chunking | Refusal]:
        """For each site its chunks, or why it stays whole."""
        if self.kernel == "low-contention":
            return [_whole(site) for site in sites]
        if self.chunks is not None:
            cuts = [site.cut(self.chunks) for site in sites]
            costs = ChunkCosts(context.cluster, context.groups) if context.cluster is not None else None
            return [costs.cheaper(cut) if costs and isinstance(cut, Chunking) else cut for cut in cuts]
        return choose(sites, dag, context.groups, context.target_cluster, context.effort)

    def _kernel(self, cut: Chunking) -> Lowering | Refusal:
        """The first kernel that can run a site, of those that are wanted."""
        asked_for = self.kernel != "auto"
        wanted = [kernel for kernel in KERNELS if kernel.name in (AUTO if not asked_for else (self.kernel,))]
        reasons = [(kernel, kernel.why_not(cut, asked_for=asked_for)) for kernel in wanted]
        return next((kernel for kernel, reason in reasons if reason is None), reasons[-1][1] or wanted[-1])

    def _site(self, collective: Collective, dag: Dag, taken: set[Node], context: Context) -> Site | Refusal:
        site = self.read(collective, dag)
        if isinstance(site, Refusal):
            return site
        free = tuple(node for node in site.products if node not in taken)
        if not free:
            what = f"{site.products[0].name} is streamed with another collective than {collective.launch.name}"
            return Refusal(Reason.ALREADY_DONE, what, site.products[0].name)
        site = site.with_products(free)
        if self.kernel != "ring" or self.rank is None:
            return site
        if collective.kind is Kind.ALL_REDUCE:
            what = f"{collective.launch.name} is no ring: it gives every rank the sum"
            return Refusal(Reason.NO_KERNEL, what, collective.launch.name)
        group = context.groups.group(group_argument(collective.launch))
        own = place_in(group, self.rank)
        if own is None:
            what = f"{collective.launch.name} is no ring: rank {self.rank} is not in its group"
            return Refusal(Reason.OTHER_RANKS, what, collective.launch.name)
        return replace(site, ring_rank=own)

    def _declined(self, collective: Collective, refusal: Refusal) -> Decision:
        name = collective.launch.name
        return self.decision(refusal.reason, refusal.sentence, name, blocking=refusal.blocking)

    def apply(self, edit: Edit, step: Step) -> None:
        nodes = NamedNodes(edit.graph.nodes)
        dag = Dag(edit.graph)
        actions = [action for action in step.actions if isinstance(action, Stream)]
        cuts = [self._cut(action, nodes, dag) for action in actions]
        heirs: dict[Node, Node] = {}
        for action, cut in zip(actions, cuts, strict=True):
            kernel = next(kernel for kernel in KERNELS if kernel.name == action.kernel)
            heirs |= kernel.build(edit, cut)
        edit.replace_each(heirs)

    def _cut(self, action: Stream, nodes: NamedNodes, dag: Dag) -> Chunking:
        """The chunks of a planned site, found again in the graph."""
        site = self.read(Collective(nodes[action.launch]), dag)
        products = tuple(nodes[name] for name in action.products)
        if not isinstance(site, Refusal):
            site = replace(site.with_products(products), ring_rank=action.own)
        whole = action.kernel == "low-contention"
        found = site if isinstance(site, Refusal) else _whole(site) if whole else site.cut(action.chunks)
        if isinstance(found, Refusal):
            raise PlanError(compose("plan", f"{action.launch} cannot be cut as planned: {found.sentence}"))
        return replace(found, decomposed_over=action.apart)


def _whole(site: Site) -> Chunking:
    """A site that is not cut."""
    return Chunking(site.collective.launch, site.num_ranks, 1, 0, site.products, {})
