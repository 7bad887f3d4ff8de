"""Decider: which values to keep, make again or offload, so that the planned step is shortest within a memory limit.

Contract: every choice is judged as a whole step, with its order and its buckets. A full search plans the step in which
everything is kept, without the limit. The other choices are probed: their programs are put together from parts of the
given one, and only the best settings of that search are tried. The best choice is then confirmed on its exact program,
and so are the next ones until one fits. If the given graph fits, too, both are planned in full, so that the step is
never longer than without a choice. `effort="best"` runs a full search for each choice instead. The number of choices
depends on `effort` alone. If no choice fits, the error names the smallest peak found and the step that it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import Graph, Node

from weft.bucketing.prices import BucketPrices
from weft.cost.device import HostMemory
from weft.graph.dag import Dag
from weft.graph.edit import Edit, copy_graph
from weft.graph.ops import Kind
from weft.graph.versions import dag_of
from weft.plan.context import Context
from weft.plan.plan import Repeat, Retention
from weft.retention.chain import Choice, Estimator, Rates, chain, kept_sites, offloaded_sites, rate_of, with_group
from weft.retention.offloading import Offloading
from weft.retention.rebuild import OverwrittenError, rebuild
from weft.retention.repeated_program import repeated_program
from weft.retention.repeats import repeat
from weft.retention.sites import SiteGroup, Sites
from weft.scheduling.jobs import Jobs
from weft.scheduling.scheduler import Knobs
from weft.scheduling.search import probe, search
from weft.simulation.build import program_of
from weft.simulation.memory import Footprint
from weft.simulation.program import OpKind, Program

TRIALS = {"fast": 9, "default": 9, "best": 60}
"""Maximum number of choices that are judged."""
PATIENCE = 2
"""Number of choices along the chain that may be worse than those before until the search turns elsewhere."""
NEAR = 64
"""A choice misses the limit narrowly if its peak exceeds it by at most 1/64."""
SHAVED = 2
"""Maximum number of changes that are judged to make such a choice fit."""
LESS = 32
"""A rival of the best choice holds less by at least this part of the limit: 1/32."""


@dataclass(frozen=True)
class Trial:
    """A choice, judged."""

    choice: Choice | None
    """None: the given graph."""
    action: Repeat | None
    step_ns: int
    peak_bytes: int
    is_free: bool = False
    """Whether the step was planned without the limit."""


class Decider:
    """Plans choices for one graph and keeps the best."""

    def __init__(
        self,
        graph: Graph,
        context: Context,
        limit_bytes: int,
        kinds: frozenset[Kind],
        max_bucket_bytes: int | None,
        host_memory: HostMemory | None = None,
    ) -> None:
        """Values may be offloaded to `host_memory`, if there is any."""
        self.graph, self.context, self.limit = graph, context, limit_bytes
        self.kinds, self.max_bucket_bytes = kinds, max_bucket_bytes
        self.dag = dag_of(graph)
        self.program = program_of(self.dag, context.groups, context.target_cluster)
        self.sites = Sites(self.dag, self.program, context.groups, context.withheld)
        self.offloading = Offloading(self.sites, host_memory) if host_memory is not None else None
        self.estimator = Estimator(self.sites)
        self.trials: dict[Choice | None, Trial] = {}
        self.most_trials = TRIALS[context.effort]
        self.rates = Rates()
        self.settings: tuple[Knobs, ...] = ()
        self.leanest: tuple[Choice | None, ...] = (None,)
        """Choices, the same for every limit, to confirm if no other one fits."""

    @property
    def all_kept(self) -> Choice:
        """The choice that makes nothing again."""
        return (0,) * len(self.sites.groups)

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
        """Judge choices until none is left worth it, and confirm the best."""
        kept_ns = self._plan_all_kept()
        self.plan(None)
        if not self.sites.groups:
            return self._confirmed()
        self.rates = self._measured_rates(kept_ns)
        self._search()
        if self.offloading is not None:  # the same search again, with one more choice for each group
            self.estimator = Estimator(self.sites, self.offloading)
            self.most_trials += TRIALS[self.context.effort]
            self._search()
        return self._confirmed()

    def _search(self) -> None:
        """Judge choices along the chain, and near the best one."""
        choices = list(chain(self.estimator, self.rates))
        last = len(choices) - 1
        lean = (choices[i] for i in dict.fromkeys((last, last * 3 // 4, last // 2, last // 4)))
        self.leanest = tuple(dict.fromkeys((*self.leanest, *lean)))
        first = self._first_that_fits(choices)
        if first is not None:
            self._use_room(choices, first)
            if self.best.choice == choices[first]:
                self._split(choices, first)
            self._refine()
            self._shave()

    def _confirmed(self) -> Trial:
        """The shortest of a few choices, each planned in full; if none fits, the one with the smallest peak."""
        fit = sorted((t for t in self.trials.values() if t.peak_bytes <= self.limit), key=self._rank)
        planned: list[Trial] = []
        for choice in self._finalists([trial.choice for trial in fit]):
            self._plan_in_full(choice, planned)
        for choice in (*(trial.choice for trial in fit), *self.leanest):
            if any(trial.peak_bytes <= self.limit for trial in planned):
                break
            self._plan_in_full(choice, planned)
        return min(planned, key=self._rank)

    def _finalists(self, fit: list[Choice | None]) -> Iterator[Choice | None]:
        """Choices to plan in full, of those that fit: the best, one that holds clearly less, and the extremes.

        A probe knows only few orders. With more room, a choice that looks slightly worse may have the shorter plan.
        """
        if not fit:
            return
        yield fit[0]
        if fit[0] is not None:
            held = self._held_bytes(fit[0])
            yield from [c for c in fit if c is not None and held - self._held_bytes(c) >= self.limit // LESS][:1]
        if fit[0] is not None and min(fit[0], default=0) < 0:
            yield from [choice for choice in fit if choice is None or min(choice, default=0) >= 0][:1]
        yield from (choice for choice in (None, self.all_kept) if choice in fit)

    def _held_bytes(self, choice: Choice) -> int:
        return self.estimator.work(choice).num_bytes

    def _plan_in_full(self, choice: Choice | None, planned: list[Trial]) -> None:
        """Add a choice with the step and the peak of a full search, unless it cannot be the best."""
        if any(trial.choice == choice for trial in planned):
            return
        action = self.action(choice)
        dag, program = self._edited(action)
        best = min(planned, key=self._rank, default=None)
        if best is not None and best.peak_bytes <= self.limit and _least_ns(program) >= best.step_ns:
            return
        effort, merging = self.context.effort, self._merging(dag, dag.nodes)
        found = search(program, effort, self.limit, merging, self.settings)
        # A limit steers the search. The step that is planned without it may be shorter, and fit.
        trial = self.trials.get(choice)
        if choice is None or (trial is not None and trial.is_free):
            free = search(program, effort, None, merging)
            if free.peak_bytes <= self.limit and free.step_ns < found.step_ns:
                found = replace(free, limit_bytes=self.limit)
        self.context.known_orders.append((program, found))
        planned.append(Trial(choice, action, found.step_ns, found.peak_bytes))

    def _plan_all_kept(self) -> int:
        """The step without the limit if all is kept; the settings that it takes are for all other choices."""
        choice = self.all_kept
        action = self.action(choice)
        made = repeated_program(self.sites, action)
        effort = "default" if self.context.effort == "best" else self.context.effort
        found = search(made.program, effort, None, self._merging(self.dag, made.nodes))
        self.settings = found.settings
        if found.peak_bytes <= self.limit:
            self.trials[choice] = Trial(choice, action, found.step_ns, found.peak_bytes, is_free=True)
        return found.step_ns

    def _measured_rates(self, kept_ns: int) -> Rates:
        """Rates from three choices without the limit: all kept, gathers again, other values again."""
        groups = self.sites.groups
        kept, *others = [
            tuple(len(group.sites) if is_again(group) else 0 for group in groups)
            for is_again in (lambda _: False, lambda group: group.is_gathered, lambda group: not group.is_gathered)
        ]
        base = self.estimator.work(kept)
        (gathers, gathered_ns), (values, recomputed_ns) = (
            (self.estimator.work(choice), self._judge(self.action(choice), None)[0]) for choice in others
        )
        return Rates(
            rate_of(recomputed_ns - kept_ns, values.compute_ns - base.compute_ns, Rates.compute),
            rate_of(gathered_ns - kept_ns, sum(gathers.link_ns) - sum(base.link_ns), Rates.links),
            self.sites.elapsed[self.sites.cut],
        )

    def _first_that_fits(self, choices: list[Choice]) -> int | None:
        """A place in the chain with a choice that fits, close to the first; None if none of those tried fits.

        The bytes that a choice keeps predict its peak: the rest of the peak is about the same in all choices.
        """
        kept = [self.estimator.work(choice).num_bytes for choice in choices]
        first = repeated_program(self.sites, self.action(choices[0])).program
        rest = Footprint(first).peak(range(len(first.names))) - kept[0]
        low, place = -1, next((i for i, b in enumerate(kept) if b + rest <= self.limit), None)
        while place is not None and not self.fits(choices[place]):
            low = place
            trial = self.trials.get(choices[place])
            rest = trial.peak_bytes - kept[place] if trial is not None else rest
            after = range(place + 1, len(kept)) if trial is not None else ()
            place = next((i for i in after if kept[i] + rest <= self.limit), None)
        if place is None:
            self.most_trials += len(self.leanest)
            return next((i for i, choice in enumerate(choices) if choice in self.leanest and self.fits(choice)), None)
        while place - 1 > low and self.fits(choices[place - 1]):
            if self._rank(self.trials[choices[place - 1]]) > self._rank(self.trials[choices[place]]):
                break
            place -= 1
        return place

    def _use_room(self, choices: list[Choice], first: int) -> None:
        """Go on along the chain in growing strides, while the step gets shorter: the planner needs room, too.

        Close to the limit, choices may have longer steps than the given graph, and those after them shorter ones.
        """
        place, stride, since_best, best = first + 1, 1, 0, self._rank(self.trials[choices[first]])
        while place < len(choices) and since_best < PATIENCE and (trial := self.plan(choices[place])) is not None:
            since_best = 0 if self._rank(trial) < best else since_best + 1
            best = min(best, self._rank(trial))
            place, stride = place + stride, stride * 2

    def _split(self, choices: list[Choice], first: int) -> None:
        """Make only some layers of the last group again, or offload only some, as few as fit."""
        if first == 0:
            return
        before, after = choices[first - 1], choices[first]
        k = next(k for k, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        low, high, sign = abs(before[k]), abs(after[k]), -1 if after[k] < 0 else 1
        while high - low > max(1, abs(after[k]) // 8):
            middle = (low + high) // 2
            if self.fits(with_group(after, k, sign * middle)):
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

    def _shave(self) -> None:
        """Of the choices that miss the limit narrowly, take the cheapest, and make a few sites more again."""
        cost = {t.choice: self._cost_ns(t.choice) for t in self.trials.values() if t.choice and self._is_near(t)}
        start = min(cost, key=lambda choice: cost[choice], default=None)
        if start is None or self.best.choice is None or cost[start] >= self._cost_ns(self.best.choice):
            return
        held, over = self._held_bytes(start), self.trials[start].peak_bytes - self.limit
        found: list[tuple[float, Choice]] = []
        for k, group in enumerate(self.sites.groups):
            more = (with_group(start, k, number) for number in range(start[k] + 1, len(group.sites) + 1))
            changed = next((choice for choice in more if held - self._held_bytes(choice) >= over), None)
            found += [(self._cost_ns(changed), changed)] if changed is not None else []
        for _, choice in sorted(found)[:SHAVED]:
            self.most_trials += 1
            if self.fits(choice):
                return

    def _is_near(self, trial: Trial) -> bool:
        return 0 < trial.peak_bytes - self.limit <= self.limit // NEAR

    def _cost_ns(self, choice: Choice) -> float:
        return self.rates.cost_ns(self.estimator.work(choice))

    def _neighbours(self, choice: Choice | None) -> Iterator[Choice]:
        if choice is None:
            return
        estimator, found = self.estimator, list[tuple[float, int, Choice]]()
        offloading = estimator.offloading
        now = estimator.work(choice)
        room = self.limit - self.best.peak_bytes
        for k, group in enumerate(self.sites.groups):
            away = offloading.most[k] if offloading is not None else 0
            for number in sorted({0, len(group.sites), -away} - {choice[k]}):
                changed = with_group(choice, k, number)
                work = estimator.work(changed)
                if offloading is not None and work.host_bytes > offloading.memory.limit_bytes:
                    continue
                if work.num_bytes - now.num_bytes <= room and work.num_bytes != now.num_bytes:
                    found.append((self.rates.cost_ns(work) - self.rates.cost_ns(now), k, changed))
        yield from (changed for _, _, changed in sorted(found))

    def fits(self, choice: Choice) -> bool:
        """Whether a choice fits into the limit; one that is not planned any more counts as too large."""
        trial = self.plan(choice)
        return trial is not None and trial.peak_bytes <= self.limit

    def plan(self, choice: Choice | None) -> Trial | None:
        """Judge a choice; None if no trial is left for it."""
        if choice not in self.trials:
            if len(self.trials) >= self.most_trials:
                return None
            action = self.action(choice)
            self.trials[choice] = Trial(choice, action, *self._judge(action, self.limit))
        return self.trials[choice]

    def action(self, choice: Choice | None) -> Repeat | None:
        """The action that carries out a choice; sites that turn out to be fixed are kept."""
        while choice is not None:
            try:
                return rebuild(self.sites, kept_sites(self.sites, choice), self._waits(choice))
            except OverwrittenError as error:
                self.sites.why_fixed[error.site] = "its inputs are overwritten before its late use"
        return None

    def _waits(self, choice: Choice) -> dict[int, int]:
        """The sites that a choice offloads, each with the place to wait for its copy."""
        if self.offloading is None:
            return {}
        away = (site for site in offloaded_sites(self.sites, choice) if self.sites.is_free(site))
        return self.offloading.waits(frozenset(away))

    def _judge(self, action: Repeat | None, limit_bytes: int | None) -> tuple[int, int]:
        """Step and peak of a choice, probed or, with effort `best`, planned."""
        if self.context.effort == "best":
            dag, program = self._edited(action)
            found = search(program, "default", limit_bytes, self._merging(dag, dag.nodes))
            return found.step_ns, found.peak_bytes
        if action is not None and action.offloads:  # copies have no rows in the given program
            dag, program = self._edited(action)
            return probe(program, self.settings, limit_bytes, self._merging(dag, dag.nodes))
        made = repeated_program(self.sites, action)
        return probe(made.program, self.settings, limit_bytes, self._merging(self.dag, made.nodes))

    def _edited(self, action: Repeat | None) -> tuple[Dag, Program]:
        """The graph with an action carried out."""
        if action is None:
            return self.dag, self.program
        graph = copy_graph(self.graph)
        with Edit(graph, keep_issue_order=False) as edit:
            repeat(edit, {node.name: node for node in graph.nodes}, action)
        dag = dag_of(graph)
        return dag, program_of(dag, self.context.groups, self.context.target_cluster)

    def _merging(self, dag: Dag, nodes: Sequence[Node]) -> Callable[[Jobs], BucketPrices]:
        context = self.context

        def merging(jobs: Jobs) -> BucketPrices:
            cluster, most = context.target_cluster, self.max_bucket_bytes
            return BucketPrices(dag, jobs, context.groups, cluster, self.kinds, context.withheld, most, nodes)

        return merging

    def table(self, choice: Choice | None) -> tuple[Retention, ...]:
        """A row for the choice of each group; a group that is split has a row for each part."""
        rows: list[Retention] = []
        held = self.estimator.work(choice).held if choice is not None else frozenset[int]()
        for k, group in enumerate(self.sites.groups):
            again = frozenset(group.sites[: abs(choice[k])]) if choice is not None else group.repeated
            is_away = choice is not None and choice[k] < 0
            work_us = self._work_us(choice, k) if choice is not None else 0.0
            for is_again in (True, False):
                here = [site for site in group.sites if (site in again) == is_again]
                if group.is_source:
                    here = [site for site in here if site in held]
                if here:
                    rebuilt = "offloaded" if is_away else "gathered again" if group.is_gathered else "recomputed"
                    name = rebuilt if is_again else "kept"
                    num_bytes = sum(self.sites.num_bytes[site] for site in here)
                    given = _given(group, here)
                    rows.append(Retention(group.name, name, len(here), num_bytes, work_us * is_again, given))
        return tuple(rows)

    def _work_us(self, choice: Choice, k: int) -> float:
        """Time that making a group again adds to compute and to links, or offloading it to copies."""
        with_it, without = (self.estimator.work(c) for c in (choice, with_group(choice, k, 0)))
        links = sum(with_it.link_ns) - sum(without.link_ns)
        copies = 2 * (with_it.copy_ns - without.copy_ns)
        return (with_it.compute_ns - without.compute_ns + links + copies) / 1000


def _least_ns(program: Program) -> int:
    """A time that no order of a program undercuts: that of all compute."""
    kinds, durations = program.kinds, program.duration_ns
    return sum(ns for ns, kind in zip(durations, kinds, strict=True) if kind is OpKind.COMPUTE)


def _given(group: SiteGroup, sites: list[int]) -> Literal["kept", "made again", "not needed", "both"]:
    """The treatment of some sites of a group by the given graph."""
    if group.is_source:
        return "not needed"
    num_again = sum(site in group.repeated for site in sites)
    return "kept" if not num_again else "made again" if num_again == len(sites) else "both"
