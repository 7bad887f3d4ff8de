"""Comparison: both graphs of a report on its cluster, simulated when somebody asks.

The bound of the graph before holds for every order and every merging of it. Passes may also remove work, so the run
after is compared with the smaller of that bound and its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch.fx import GraphModule

from weft.bounds.lower_bound import Bound, lower_bound
from weft.cost.cluster import Cluster
from weft.graph.groups import read_groups
from weft.plan.plan import Evidence
from weft.report.explain import explain
from weft.report.html import ReportPage
from weft.report.notes import notes_on
from weft.report.report import Report
from weft.report.summary import SimulatedRun, Summary, summarize
from weft.report.trace import save_trace
from weft.report.work import work_of
from weft.simulation.build import program_of
from weft.simulation.program import Program
from weft.simulation.simulator import simulate


@dataclass(eq=False)
class Comparison:
    """The graphs before and after, and the cluster that they run on."""

    before: GraphModule
    after: GraphModule
    cluster: Cluster
    groups: Mapping[str, int | Sequence[Sequence[int]]] | None = None
    tokens_per_step: int | None = None
    """Of all ranks together. None: as the module says, if it does."""
    _runs: tuple[SimulatedRun, SimulatedRun] | None = field(default=None, repr=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the cluster leaves out."""
        return tuple(notes_on(self.cluster))

    def runs(self, report: Report) -> tuple[SimulatedRun, SimulatedRun]:
        """Both graphs simulated."""
        if self._runs is None:
            self._runs = self._simulate(report)
        return self._runs

    @functools.cached_property
    def _programs(self) -> tuple[Program, Program]:
        before, after = (
            program_of(module, read_groups(module, self.groups), self.cluster) for module in (self.before, self.after)
        )
        return before, after

    @functools.cached_property
    def _bound_before(self) -> Bound:
        return lower_bound(self._programs[0])

    @functools.cached_property
    def _bound_after(self) -> Bound:
        return lower_bound(self._programs[1])

    def evidence(self) -> Evidence:
        """How good the graph after is, and what proves that."""
        timeline = simulate(self._programs[1])
        removed_work = timeline.step_ns < self._bound_before.bound_ns
        bound = self._bound_after if removed_work else self._bound_before
        return Evidence(
            self.cluster.name,
            timeline.step_ns,
            timeline.peak_bytes,
            bound.bound_ns,
            f"{bound.name}: {bound.rests_on}",
            bound.certificate,
            "after" if removed_work else "before",
        )

    def _simulate(self, report: Report) -> tuple[SimulatedRun, SimulatedRun]:
        found: list[SimulatedRun] = []
        before_ns = self._bound_before.bound_ns
        bounds = (before_ns, min(before_ns, self._bound_after.bound_ns))
        for module, program, bound_ns in zip((self.before, self.after), self._programs, bounds, strict=True):
            timeline = replace(simulate(program), lower_bound_ns=bound_ns)
            groups = tuple(queue.group for queue in program.queues)
            found.append(SimulatedRun(timeline, groups, explain(module, report).collectives))
        return found[0], found[1]

    def summary(self, report: Report) -> Summary:
        """Both runs in numbers."""
        return summarize(*self.runs(report), work_of(self.before, self.cluster.device, self.tokens_per_step))

    def save_html(self, path: str | Path, report: Report, title: str) -> None:
        """Write the page."""
        told = (self.summary(report), report.witnesses, report.passes)
        ReportPage(title, self.cluster.name, *self.runs(report), *told).save_html(path)

    def save_trace(self, path: str | Path, report: Report) -> None:
        """Write the Chrome trace."""
        save_trace(path, *self.runs(report), cluster=self.cluster.name)
