"""Whether chunks pay: the step with them and without, each in the best order that is found.

Contract: sites that are alike (the same collective of the same sizes, beside the same products) are judged as one and
decided alike. A collective that other work hides in a good order gains nothing from chunks. The number of chunks is the
one that is shortest by itself; it is taken only if the whole step, ordered anew, gets shorter. The same graph and
cluster give the same answer on every rank.

A large program is ordered anew for each trial by one run of the scheduler, with the settings that are best for it as it
is; a small one is searched.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.fx import Node

from weft.cost.cluster import Cluster
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.dag import Dag, collector_paused
from weft.graph.groups import GroupTable
from weft.plan.decision import Reason, Refusal
from weft.scheduling.job_tables import JobTables
from weft.scheduling.jobs import Emitter, jobs_of
from weft.scheduling.scheduler import Knobs, schedule
from weft.scheduling.search import SPARE, SPARE_BYTES, Effort, search
from weft.simulation.build import program_of
from weft.simulation.memory import Footprint
from weft.simulation.program import Program
from weft.simulation.simulator import OperationTimes, run
from weft.streaming.chunking import Chunking, replaced
from weft.streaming.trial_program import Costs, Trial
from weft.streaming.view_layouts import sizes_of

CHUNKS = (2, 4, 8)
TRIALS: dict[Effort, int] = {"fast": 1, "default": 1, "best": 3}
"""How many numbers of chunks are tried for sites that are alike."""
SLACK = 1.1
"""A site that takes longer in chunks may still leave the stream to others; but not one that takes so much longer."""
LEAST_GAIN = 2000
"""A step must get shorter by more than one part in so many: less is the noise of the search for an order."""

SETTINGS = (
    Knobs(window=40, hold=30, lookahead=30),
    Knobs(window=200, hold=30, lookahead=100),
    Knobs(window=40, hold=0, lookahead=30),
)
"""Of the scheduler, for a large program."""
LARGE = 2000
"""Operations of a program from which on it is not searched for each trial."""


class Site(Protocol):
    """What gathers and scatters have in common."""

    @property
    def collective(self) -> Collective: ...

    @property
    def products(self) -> tuple[Node, ...]: ...

    def cut(self, chunks: int) -> Chunking | Refusal: ...


@dataclass(frozen=True)
class _Step:
    """A program in the best order that was found."""

    step_ns: int
    exposed_ns: dict[str, int]
    """By launch."""


@dataclass(frozen=True)
class Alike:
    """Sites that are decided as one."""

    sites: list[Site]
    cuts: dict[int, list[Chunking]]
    """By number of chunks."""
    alone_us: dict[int, float]
    """By number of chunks what one site takes with nothing beside it; 1: as one piece."""

    @property
    def shorter(self) -> list[int]:
        """The numbers of chunks that may make a step shorter, the one that is best by itself first."""
        found = [chunks for chunks, us in self.alone_us.items() if chunks > 1 and us < self.alone_us[1] * SLACK]
        return sorted(found, key=lambda chunks: (self.alone_us[chunks], chunks))


def choose(
    sites: Sequence[Site], dag: Dag, groups: GroupTable, cluster: Cluster, effort: Effort
) -> list[Chunking | Refusal]:
    """For each site its chunks, or why it stays whole."""
    return _Choice(sites, dag, groups, cluster, effort).made() if sites else []


class _Choice:
    def __init__(self, sites: Sequence[Site], dag: Dag, groups: GroupTable, cluster: Cluster, effort: Effort) -> None:
        self.sites, self.dag = sites, dag
        self.effort: Effort = effort
        self.costs = Costs(cluster, groups)
        self.found: dict[Node, Chunking | Refusal] = {}
        self.cuts: list[Chunking] = []
        """Those that were accepted."""
        self._after: _Step | None = None
        self._settings = SETTINGS
        self._limit = 0
        """Of memory; found with the first order."""

    @functools.cached_property
    def program(self) -> Program:
        return program_of(self.dag, self.costs.groups, self.costs.cluster)

    @property
    def now(self) -> _Step:
        """The step with what was accepted so far; found when it is first asked for."""
        if self._after is None:
            self._after = self._ordered(self.program)
        return self._after

    def made(self) -> list[Chunking | Refusal]:
        worth = [alike for alike in self._classes() if self._is_worth_a_trial(alike)]
        worth.sort(key=lambda alike: -self._exposed(alike))
        for alike in worth:
            self._decide(alike)
        return [self.found[site.collective.launch] for site in self.sites]

    def _classes(self) -> Iterator[Alike]:
        by_key: dict[Hashable, list[Site]] = {}
        for site in self.sites:
            by_key.setdefault(_key(site), []).append(site)
        for sites in by_key.values():
            cuts: dict[int, list[Chunking]] = {}
            for chunks in CHUNKS:
                made = [site.cut(chunks) for site in sites]
                good = [self.costs.cheaper(cut) for cut in made if isinstance(cut, Chunking)]
                if len(good) == len(sites):
                    cuts[chunks] = good
            if not cuts:
                for site in sites:
                    self.found[site.collective.launch] = site.cut(CHUNKS[0])
                continue
            alone = {chunks: self.costs.alone_ns(good[0])[1] / 1000 for chunks, good in cuts.items()}
            whole = self.costs.alone_ns(next(iter(cuts.values()))[0])[0] / 1000
            yield Alike(sites, cuts, {1: whole} | alone)

    def _stay(self, alike: Alike, why: str) -> None:
        for site in alike.sites:
            name = site.collective.launch.name
            self.found[site.collective.launch] = Refusal(Reason.NO_GAIN, f"{name} stays whole: {why}")

    def _exposed(self, alike: Alike) -> int:
        return sum(self.now.exposed_ns.get(site.collective.launch.name, 0) for site in alike.sites)

    def _is_worth_a_trial(self, alike: Alike) -> bool:
        first = alike.sites[0]
        if not alike.shorter:
            fewest = min(alike.cuts)
            chunks = alike.cuts[fewest][0].chunks
            times = f"{alike.alone_us[1]:.1f} us as one piece, {alike.alone_us[fewest]:.1f} us in {chunks} chunks"
            self._stay(alike, f"with {', '.join(node.name for node in first.products)} it takes {times}")
            return False
        if self._exposed(alike) * LEAST_GAIN <= self.now.step_ns:
            self._stay(alike, "other work can hide it")
            return False
        return True

    def _decide(self, alike: Alike) -> None:
        """Accept the chunks of a class if the step gets shorter by them."""
        if self._exposed(alike) * LEAST_GAIN <= self.now.step_ns:
            self._stay(alike, "other work can hide it, once others are streamed")
            return
        tried = [(self._with(alike.cuts[chunks]), chunks) for chunks in alike.shorter[: TRIALS[self.effort]]]
        after, chunks = min(tried, key=lambda pair: (pair[0].step_ns, pair[1]))
        if (self.now.step_ns - after.step_ns) * LEAST_GAIN <= self.now.step_ns:
            steps = f"the step takes {self.now.step_ns / 1000:.1f} us, {after.step_ns / 1000:.1f} us"
            many = f"it and {len(alike.sites) - 1} alike" if len(alike.sites) > 1 else "it"
            self._stay(alike, f"{steps} with {many} in {alike.cuts[chunks][0].chunks} chunks")
            return
        self._after = after
        self.cuts += alike.cuts[chunks]
        self.found |= {cut.launch: cut for cut in alike.cuts[chunks]}

    def _with(self, more: Sequence[Chunking]) -> _Step:
        trial = Trial(self.program, self.dag, self.costs)
        for cut in (*self.cuts, *more):
            trial.stream(cut)
        return self._ordered(trial.result())

    def _ordered(self, program: Program) -> _Step:
        with collector_paused():
            trace = self._scheduled(program) if self.effort != "best" and len(program.names) > LARGE else None
        if trace is None:
            trace = search(program, "fast" if self.effort != "best" else "default").trace
        exposed: dict[str, int] = {}
        for op, ns in trace.exposed_ns.items():
            exposed[program.names[op]] = exposed.get(program.names[op], 0) + ns
        return _Step(trace.step_ns, exposed)

    def _scheduled(self, program: Program) -> OperationTimes | None:
        """The best order by the settings that are left, which are all at first; None if it holds too much."""
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


def _key(site: Site) -> Hashable:
    """What sites that are alike have in common."""
    collective = site.collective
    cut = next((cut for cut in map(site.cut, CHUNKS) if isinstance(cut, Chunking)), None)
    calls = tuple(cut.calls) if cut is not None else site.products
    shapes = tuple((ops.name_of(node.target), *map(sizes_of, (*node.all_input_nodes, node))) for node in calls)
    joins = cut is not None and collective.launch not in replaced(cut)
    return collective.kind, collective.group, collective.dtype, sizes_of(collective.launch), shapes, joins
