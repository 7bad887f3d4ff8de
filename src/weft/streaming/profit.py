"""Profit: whether streaming a site makes the step shorter, and with how many chunks.

Contract: similar sites (same collective, sizes and products) are decided together. A collective that other work can
hide gains nothing from chunks, so it stays whole. Otherwise the number of chunks that is fastest for the site alone is
tried, and one fused operator if the ranks share memory. The better of them is accepted only if the whole step,
rescheduled, gets shorter. The same graph and cluster give the same answer
on every rank.

Each trial of a small program runs the full search for an order. A large program gets one run of the scheduler, with
the settings that were best for the program without chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.fx import Node

from weft.cost.cluster import Cluster
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.dag import Dag, collector_paused
from weft.graph.groups import GroupTable
from weft.plan.decision import Reason, Refusal
from weft.quantities import duration_text
from weft.scheduling.job_tables import JobTables
from weft.scheduling.jobs import Emitter, jobs_of
from weft.scheduling.scheduler import Knobs, schedule
from weft.scheduling.search import SPARE, SPARE_BYTES, Effort, search
from weft.simulation.build import program_of
from weft.simulation.memory import Footprint
from weft.simulation.program import Program
from weft.simulation.simulator import OperationTimes, run
from weft.streaming.chunking import Chunking, replaced
from weft.streaming.trial_program import ChunkCosts, TrialProgram
from weft.streaming.view_layouts import sizes_of

CHUNKS = (2, 4, 8)
"""Numbers of chunks to consider."""
TRIALS: dict[Effort, int] = {"fast": 1, "default": 1, "best": 3}
"""Numbers of chunks that are tried in the whole step for each class of similar sites, by effort."""
SLACK = 1.1
"""A site is tried even if it takes up to this many times as long in chunks: other work can fill its gaps."""
LEAST_GAIN = 2000
"""Least gain worth taking, as 1/2000 of the step: smaller differences are noise of the search for an order."""

FUSED = 0
"""Stands for one fused operator where other keys are numbers of chunks."""

SETTINGS = (
    Knobs(window=40, hold=30, lookahead=30),
    Knobs(window=200, hold=30, lookahead=100),
    Knobs(window=40, hold=0, lookahead=30),
)
"""Settings of the scheduler to choose from for a large program."""
LARGE = 2000
"""Number of operations above which a program counts as large."""


class StreamSite(Protocol):
    """The common interface of gather and scatter sites."""

    @property
    def collective(self) -> Collective: ...

    @property
    def products(self) -> tuple[Node, ...]: ...

    def cut(self, chunks: int) -> Chunking | Refusal: ...


@dataclass(frozen=True)
class _OrderedStep:
    """The step of a program in the best order found."""

    step_ns: int
    exposed_ns: dict[str, int]
    """Exposed time by launch."""


@dataclass(frozen=True)
class SimilarSites:
    """Sites that are decided together."""

    sites: list[StreamSite]
    cuts: dict[int, list[Chunking]]
    """The chunking of each site, by number of chunks."""
    alone_us: dict[int, float]
    """Time of one site with nothing else running, by number of chunks; 1 is the whole site."""

    def tried(self, trials: int) -> list[int]:
        """The numbers of chunks to try in the whole step, the fastest for one site first, and one fused operator."""
        found = [chunks for chunks, us in self.alone_us.items() if chunks != 1 and us < self.alone_us[1] * SLACK]
        shorter = sorted(found, key=lambda chunks: (self.alone_us[chunks], chunks))
        return [*[chunks for chunks in shorter if chunks != FUSED][:trials], *([FUSED] if FUSED in shorter else [])]


def choose(
    sites: Sequence[StreamSite],
    dag: Dag,
    groups: GroupTable,
    cluster: Cluster,
    effort: Effort,
    ways: Ways | None = None,
) -> list[Chunking | Refusal]:
    """The chunking of each site, or why it stays whole."""
    return _Choice(sites, dag, groups, cluster, effort, ways or Ways()).made() if sites else []


@dataclass(frozen=True)
class Ways:
    """The ways to run a site that are open to choice."""

    in_chunks: bool = True
    fused: Callable[[StreamSite], Chunking | Refusal] | None = None
    """The site as one fused operator, or why it cannot be one; None: never."""

    def cuts(self, sites: Sequence[StreamSite]) -> dict[int, list[Chunking | Refusal]]:
        """The chunking of each of some similar sites, or why it cannot be split, by number of chunks."""
        found: dict[int, list[Chunking | Refusal]] = {}
        if self.in_chunks:
            found |= {chunks: [site.cut(chunks) for site in sites] for chunks in CHUNKS}
        if self.fused is not None:
            found[FUSED] = [self.fused(site) for site in sites]
        return found


class _Choice:
    def __init__(
        self, sites: Sequence[StreamSite], dag: Dag, groups: GroupTable, cluster: Cluster, effort: Effort, ways: Ways
    ) -> None:
        self.sites, self.dag, self.ways = sites, dag, ways
        self.effort: Effort = effort
        self.costs = ChunkCosts(cluster, groups)
        self.found: dict[Node, Chunking | Refusal] = {}
        self._after: _OrderedStep | None = None
        self._streamed: TrialProgram | None = None
        self._settings = SETTINGS
        self._limit = 0
        """Memory limit for new orders in bytes; set from the first order."""

    @functools.cached_property
    def program(self) -> Program:
        return program_of(self.dag, self.costs.groups, self.costs.cluster)

    @property
    def streamed(self) -> TrialProgram:
        """The program with the chunkings accepted so far, built on first use."""
        if self._streamed is None:
            self._streamed = TrialProgram(self.program, self.dag, self.costs)
        return self._streamed

    @property
    def now(self) -> _OrderedStep:
        """The step with the chunkings accepted so far, computed on first use."""
        if self._after is None:
            self._after = self._ordered(self.program)
        return self._after

    def made(self) -> list[Chunking | Refusal]:
        worth = [similar for similar in self._classes() if self._is_worth_a_trial(similar)]
        worth.sort(key=lambda similar: -self._exposed(similar))
        for similar in worth:
            self._decide(similar)
        return [self.found[site.collective.launch] for site in self.sites]

    def _classes(self) -> Iterator[SimilarSites]:
        by_key: dict[Hashable, list[StreamSite]] = {}
        for site in self.sites:
            by_key.setdefault(_key(site), []).append(site)
        for sites in by_key.values():
            cuts: dict[int, list[Chunking]] = {}
            found = self.ways.cuts(sites)
            for chunks, made in found.items():
                good = [self.costs.cheaper(cut) for cut in made if isinstance(cut, Chunking)]
                if len(good) == len(sites):
                    cuts[chunks] = good
            if not cuts:
                for site, cut in zip(sites, next(iter(found.values())), strict=True):
                    self.found[site.collective.launch] = cut
                continue
            alone = {chunks: self.costs.alone_ns(good[0])[1] / 1000 for chunks, good in cuts.items()}
            whole = self.costs.alone_ns(next(iter(cuts.values()))[0])[0] / 1000
            yield SimilarSites(sites, cuts, {1: whole} | alone)

    def _stay(self, similar: SimilarSites, why: str) -> None:
        for site in similar.sites:
            name = site.collective.launch.name
            self.found[site.collective.launch] = Refusal(Reason.NO_GAIN, f"{name} stays whole: {why}")

    def _exposed(self, similar: SimilarSites) -> int:
        return sum(self.now.exposed_ns.get(site.collective.launch.name, 0) for site in similar.sites)

    def _is_worth_a_trial(self, similar: SimilarSites) -> bool:
        first = similar.sites[0]
        if not similar.tried(1):
            fewest = min(similar.cuts)
            whole, cut = (duration_text(similar.alone_us[count]) for count in (1, fewest))
            products = ", ".join(node.name for node in first.products)
            how = _manner(similar.cuts[fewest][0])
            self._stay(similar, f"with {products} it takes {whole} whole and {cut} {how}")
            return False
        if self._exposed(similar) * LEAST_GAIN <= self.now.step_ns:
            self._stay(similar, "other work can hide it")
            return False
        return True

    def _decide(self, similar: SimilarSites) -> None:
        """Accept the chunks of similar sites if they make the step shorter."""
        if self._exposed(similar) * LEAST_GAIN <= self.now.step_ns:
            self._stay(similar, "other work can hide it, now that other collectives are streamed")
            return
        tried = [(self._with(similar.cuts[chunks]), chunks) for chunks in similar.tried(TRIALS[self.effort])]
        (after, streamed), chunks = min(tried, key=lambda pair: (pair[0][0].step_ns, pair[1]))
        if (self.now.step_ns - after.step_ns) * LEAST_GAIN <= self.now.step_ns:
            now, then = (duration_text(step.step_ns / 1000) for step in (self.now, after))
            many = f"it and {len(similar.sites) - 1} similar ones" if len(similar.sites) > 1 else "it"
            how = _manner(similar.cuts[chunks][0])
            self._stay(similar, f"the step takes {now} now, and {then} with {many} {how}")
            return
        self._after, self._streamed = after, streamed
        self.found |= {cut.launch: cut for cut in similar.cuts[chunks]}

    def _with(self, more: Sequence[Chunking]) -> tuple[_OrderedStep, TrialProgram]:
        trial = self.streamed.copy()
        for cut in more:
            trial.stream(cut)
        return self._ordered(trial.result()), trial

    def _ordered(self, program: Program) -> _OrderedStep:
        with collector_paused():
            trace = self._scheduled(program) if self.effort != "best" and len(program.names) > LARGE else None
        if trace is None:
            trace = search(program, "fast" if self.effort != "best" else "default").trace
        exposed: dict[str, int] = {}
        for op, ns in trace.exposed_ns.items():
            exposed[program.names[op]] = exposed.get(program.names[op], 0) + ns
        return _OrderedStep(trace.step_ns, exposed)

    def _scheduled(self, program: Program) -> OperationTimes | None:
        """The best order by the settings left; only the winner is kept. None if it needs too much memory."""
        jobs = jobs_of(program)
        shape, emitter = JobTables(jobs), Emitter(jobs)
        if not self._limit:
            peak = Footprint(program).peak(range(len(program.names)))
            self._limit = peak + max(int(peak * SPARE), SPARE_BYTES)
        orders = [emitter.order(schedule(shape, knobs).events) for knobs in self._settings]
        found = [run(program, order, is_legal=True) for order in orders]
        best = min(range(len(found)), key=lambda k: (found[k].step_ns, k))
        self._settings = (self._settings[best],)
        return found[best] if Footprint(program).peak(orders[best]) <= self._limit else None


def _manner(cut: Chunking) -> str:
    """How a site runs, as the end of a sentence."""
    return "as one fused operator" if cut.fused is not None else f"in {cut.chunks} chunks"


def _key(site: StreamSite) -> Hashable:
    """Equal for similar sites."""
    collective = site.collective
    cut = next((cut for cut in map(site.cut, CHUNKS) if isinstance(cut, Chunking)), None)
    calls = tuple(cut.calls) if cut is not None else site.products
    shapes = tuple((ops.name_of(node.target), *map(sizes_of, (*node.all_input_nodes, node))) for node in calls)
    joins = cut is not None and collective.launch not in replaced(cut)
    return collective.kind, collective.group, collective.dtype, sizes_of(collective.launch), shapes, joins
