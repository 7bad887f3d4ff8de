"""Decider: which values to keep and which to make again, so that the planned step is shortest within a memory limit.

Contract: the planner's search judges every choice as a whole step, with its order and its buckets. A choice within the
limit is never worse than the given graph planned in the same way. The number of choices that are planned depends on
`effort` alone. If no choice fits, the error names the smallest peak found and the step that it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch.fx import Graph

from weft.bucketing.prices import BucketPrices
from weft.graph.dag import Dag
from weft.graph.edit import Edit, copy_graph
from weft.graph.ops import Kind
from weft.graph.versions import dag_of
from weft.plan.context import Context
from weft.plan.plan import Repeat, Retention
from weft.retention.chain import Choice, Estimator, Rates, chain, kept_sites, rate_of, with_group
from weft.retention.rebuild import OverwrittenError, rebuild
from weft.retention.repeats import repeat
from weft.retention.sites import SiteGroup, Sites
from weft.scheduling.jobs import Jobs
from weft.scheduling.search import search
from weft.simulation.build import program_of

TRIALS = {"fast": 14, "default": 14, "best": 60}
"""Maximum number of choices that are planned."""


@dataclass(frozen=True)
class Trial:
    """A choice, planned."""

    choice: Choice | None
    """None: the given graph."""
    action: Repeat | None
    step_ns: int
    peak_bytes: int


class Decider:
    """Plans choices for one graph and keeps the best."""

    def __init__(
        self, graph: Graph, context: Context, limit_bytes: int, kinds: frozenset[Kind], max_bucket_bytes: int | None
    ) -> None:
        self.graph, self.context, self.limit = graph, context, limit_bytes
        self.kinds, self.max_bucket_bytes = kinds, max_bucket_bytes
        self.dag = dag_of(graph)
        self.program = program_of(self.dag, context.groups, context.target_cluster)
        self.sites = Sites(self.dag, self.program, context.groups, context.withheld)
        self.estimator = Estimator(self.sites)
        self.trials: dict[Choice | None, Trial] = {}
        self.most_trials = TRIALS[context.effort]
        self.rates = Rates()

    @property
    def best(self) -> Trial:
        """The shortest step within the limit; without one, the smallest peak."""
        return min(self.trials.values(), key=self._rank)

    def _rank(self, trial: Trial) -> tuple[bool, int, int, int]:
        copies = len(trial.action.copies) if trial.action is not None else 0
        if trial.peak_bytes > self.limit:
            return True, trial.peak_bytes, trial.step_ns, copies
        return False, trial.step_ns, copies, trial.peak_bytes

    def decide(self) -> Trial:
        """Plan choices until none is left worth planning."""
        self.plan(None)
        if not self.sites.groups:
            return self.best
        self.rates = self._measured_rates()
        choices = list(chain(self.estimator, self.rates))
        first = self._first_that_fits(choices)
        if first is not None:
            self._use_room(choices, first)
            if self.best.choice == choices[first]:
                self._split(choices, first)
            self._refine()
        return self.best

    def _measured_rates(self) -> Rates:
        """Rates from three choices that are planned without the limit: all kept, gathers again, other values again."""
        groups = self.sites.groups
        choices = [
            tuple(len(group.sites) if is_again(group) else 0 for group in groups)
            for is_again in (lambda _: False, lambda group: group.is_gathered, lambda group: not group.is_gathered)
        ]
        kept, gathered, recomputed = (self._plan_freely(choice) for choice in choices)
        work = [self.estimator.work(choice) for choice in choices]
        return Rates(
            rate_of(recomputed - kept, work[2].compute_ns - work[0].compute_ns, Rates.compute),
            rate_of(gathered - kept, sum(work[1].link_ns) - sum(work[0].link_ns), Rates.links),
        )

    def _plan_freely(self, choice: Choice) -> int:
        """The step of a choice without the limit. If it fits all the same, it is a trial like any other."""
        action = self.action(choice)
        step_ns, peak_bytes = self._search(action, None)
        if peak_bytes <= self.limit:
            self.trials[choice] = Trial(choice, action, step_ns, peak_bytes)
        return step_ns

    def _first_that_fits(self, choices: list[Choice]) -> int | None:
        """The place in the chain from which choices fit, found by halving; None if none of those tried fits."""
        last = len(choices) - 1
        for place in (last, last * 3 // 4, last // 2, last // 4):
            if self.fits(choices[place]):
                last = place
                break
        else:
            return None
        low = -1
        while last - low > 1:
            middle = (low + last) // 2
            if self.fits(choices[middle]):
                last = middle
            else:
                low = middle
        return last

    def _use_room(self, choices: list[Choice], first: int) -> None:
        """Go on along the chain in growing strides: the planner needs room for its buffers in flight."""
        place, stride = first + 1, 1
        while place < len(choices) and self.plan(choices[place]) is not None:
            place, stride = place + stride, stride * 2

    def _split(self, choices: list[Choice], first: int) -> None:
        """Make only some layers of the last group again, as few as fit."""
        if first == 0:
            return
        before, after = choices[first - 1], choices[first]
        k = next(k for k, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        low, high = before[k], after[k]
        while high - low > max(1, after[k] // 8):
            middle = (low + high) // 2
            if self.fits(with_group(after, k, middle)):
                high = middle
            else:
                low = middle

    def _refine(self) -> None:
        """Change one group at a time, the largest estimated gain first, while trials are left."""
        while self.best.choice is not None:
            before = self.best
            for choice in self._neighbours(before.choice):
                if self.plan(choice) is None:
                    return
                if self.best is not before:
                    break
            else:
                return

    def _neighbours(self, choice: Choice | None) -> Iterator[Choice]:
        if choice is None:
            return
        estimator, found = self.estimator, list[tuple[float, int, Choice]]()
        now = estimator.work(choice)
        room = self.limit - self.best.peak_bytes
        for k, group in enumerate(self.sites.groups):
            for again in {0, len(group.sites)} - {choice[k]}:
                changed = with_group(choice, k, again)
                work = estimator.work(changed)
                if work.num_bytes - now.num_bytes <= room and work.num_bytes != now.num_bytes:
                    found.append((self.rates.cost_ns(work) - self.rates.cost_ns(now), k, changed))
        yield from (changed for _, _, changed in sorted(found))

    def fits(self, choice: Choice) -> bool:
        """Whether a choice fits into the limit; one that is not planned any more counts as too large."""
        trial = self.plan(choice)
        return trial is not None and trial.peak_bytes <= self.limit

    def plan(self, choice: Choice | None) -> Trial | None:
        """Plan a choice; None if no trial is left for it."""
        if choice not in self.trials:
            if len(self.trials) >= self.most_trials:
                return None
            action = self.action(choice)
            outcome = self._search(action, self.limit)
            self.trials[choice] = Trial(choice, action, *outcome)
        return self.trials[choice]

    def action(self, choice: Choice | None) -> Repeat | None:
        """The action that carries out a choice; sites that turn out to be fixed are kept."""
        while choice is not None:
            try:
                return rebuild(self.sites, kept_sites(self.sites, choice))
            except OverwrittenError as error:
                self.sites.why_fixed[error.site] = "its inputs are overwritten before its late use"
        return None

    def _search(self, action: Repeat | None, limit_bytes: int | None) -> tuple[int, int]:
        """Step and peak of the planned graph."""
        dag, program = self.dag, self.program
        if action is not None:
            graph = copy_graph(self.graph)
            with Edit(graph, keep_issue_order=False) as edit:
                repeat(edit, {node.name: node for node in graph.nodes}, action)
            dag = dag_of(graph)
            program = program_of(dag, self.context.groups, self.context.target_cluster)
        effort = "default" if self.context.effort == "best" else self.context.effort
        found = search(program, effort, limit_bytes, self._merging(dag))
        return found.step_ns, found.peak_bytes

    def _merging(self, dag: Dag) -> Callable[[Jobs], BucketPrices]:
        context = self.context

        def merging(jobs: Jobs) -> BucketPrices:
            cluster, most = context.target_cluster, self.max_bucket_bytes
            return BucketPrices(dag, jobs, context.groups, cluster, self.kinds, context.withheld, most)

        return merging

    def table(self, choice: Choice | None) -> tuple[Retention, ...]:
        """A row for the choice of each group; a group that is split has a row for each part."""
        rows: list[Retention] = []
        held = self.estimator.work(choice).held if choice is not None else frozenset[int]()
        for k, group in enumerate(self.sites.groups):
            again = frozenset(group.sites[: choice[k]]) if choice is not None else group.repeated
            work_us = self._work_us(choice, k) if choice is not None else 0.0
            for is_again in (True, False):
                here = [site for site in group.sites if (site in again) == is_again]
                if group.is_source:
                    here = [site for site in here if site in held]
                if here:
                    name = ("gathered again" if group.is_gathered else "recomputed") if is_again else "kept"
                    num_bytes = sum(self.sites.num_bytes[site] for site in here)
                    given = _given(group, here)
                    rows.append(Retention(group.name, name, len(here), num_bytes, work_us * is_again, given))
        return tuple(rows)

    def _work_us(self, choice: Choice, k: int) -> float:
        """Time that making a group again adds to compute and to links."""
        with_it, without = (self.estimator.work(c) for c in (choice, with_group(choice, k, 0)))
        links = sum(with_it.link_ns) - sum(without.link_ns)
        return (with_it.compute_ns - without.compute_ns + links) / 1000


def _given(group: SiteGroup, sites: list[int]) -> Literal["kept", "made again", "not needed", "both"]:
    """The treatment of some sites of a group by the given graph."""
    if group.is_source:
        return "not needed"
    num_again = sum(site in group.repeated for site in sites)
    return "kept" if not num_again else "made again" if num_again == len(sites) else "both"
