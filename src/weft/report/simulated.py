"""SimulatedReport: a report with both of its graphs simulated on a cluster, once somebody asks.

Contract: `weft.optimize` translates both graphs into programs, so that later edits of the modules change nothing here.
It neither simulates nor bounds them: that happens when the report is printed, written or asked for the plan.

The bound of the graph before holds for every order and every merging of its collectives. Passes may also remove work,
so the run after is compared with the smaller of that bound and its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from torch.fx import GraphModule

from weft.bounds.lower_bound import Bound, lower_bound
from weft.cost.cluster import Cluster
from weft.graph.assumed_sizes import notes_on_sizes
from weft.graph.dag import Dag
from weft.graph.groups import Group, GroupTable, read_groups
from weft.graph.versions import dag_of
from weft.plan.plan import Evidence, Plan
from weft.prediction.error_bars import ErrorBar, StepKind, error_bars
from weft.prediction.memory import does_not_fit
from weft.prediction.step_kind import step_kind
from weft.report.explain import CollectiveRecord, explain
from weft.report.html import ReportPage
from weft.report.report import Report
from weft.report.summary import SimulatedRun, Summary, summarize
from weft.report.trace import save_trace
from weft.report.work import Work, work_of
from weft.simulation.build import program_of
from weft.simulation.predicted_step import Launch, launches_of, predict
from weft.simulation.program import Program
from weft.simulation.simulator import simulate
from weft.simulation.timeline import Timeline


@dataclass(frozen=True)
class SimulationInput:
    """One graph, as much of it as the simulation and the report need."""

    program: Program
    records: tuple[CollectiveRecord, ...]
    """Its collectives, each with the decisions about it."""
    launches: tuple[Launch, ...] = ()
    groups: tuple[Group, ...] = ()

    @cached_property
    def bound(self) -> Bound:
        return lower_bound(self.program)

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.program)

    def run(self, bound_ns: int) -> SimulatedRun:
        """The simulated graph, with the bound that it is compared with."""
        timeline = replace(self.timeline, lower_bound_ns=bound_ns)
        return SimulatedRun(timeline, tuple(queue.group for queue in self.program.queues), self.records)


@dataclass(frozen=True, kw_only=True)
class SimulatedReport(Report):
    """A report of a run for a cluster."""

    graphs: tuple[SimulationInput, SimulationInput] = field(repr=False, compare=False)
    """Before and after."""
    work: Work = field(repr=False, compare=False)
    cluster_notes: tuple[str, ...] = field(default=(), repr=False, compare=False)
    kind: StepKind = field(repr=False, compare=False)
    device_bytes: int | None = field(default=None, repr=False, compare=False)
    """Memory of the device; None if the cluster does not state it."""

    @cached_property
    def errors(self) -> tuple[ErrorBar, ErrorBar]:
        """The error bars of the step and of the peak."""
        return error_bars(self.kind)

    @property
    def does_not_fit(self) -> str | None:
        """One sentence if the graph after needs more memory than the device has."""
        return does_not_fit(self.graphs[1].timeline.peak_bytes, self.device_bytes)

    @cached_property
    def runs(self) -> tuple[SimulatedRun, SimulatedRun]:
        """Both graphs simulated."""
        before, after = self.graphs
        before_ns = before.bound.bound_ns
        return before.run(before_ns), after.run(min(before_ns, after.bound.bound_ns))

    @cached_property
    def summary(self) -> Summary:
        """Both runs in numbers."""
        return summarize(*self.runs, self.work)

    @cached_property
    def evidence(self) -> Evidence:
        """How good the graph after is, and the certificate that proves it."""
        before, after = self.graphs
        timeline = after.timeline
        removed_work = timeline.step_ns < before.bound.bound_ns
        bound = after.bound if removed_work else before.bound
        return Evidence(
            str(self.cluster),
            timeline.step_ns,
            timeline.peak_bytes,
            bound.bound_ns,
            f"{bound.name}: {bound.rests_on}",
            bound.certificate,
            "after" if removed_work else "before",
            predict(timeline, after.launches, after.groups),
        )

    @cached_property
    def plan(self) -> Plan:
        """The plan with its evidence."""
        return replace(self.bare_plan, evidence=self.evidence)

    @property
    def notes(self) -> tuple[str, ...]:
        step, peak = self.errors
        bars = dict.fromkeys(
            f"error bar of {what}: {f'{bar.text}, ' if bar.text else ''}{bar.basis}"
            for what, bar in (("times", step), ("memory", peak))
        )
        return (*super().notes, *self.cluster_notes, *bars)

    def summary_lines(self) -> list[str]:
        return [*([self.does_not_fit] if self.does_not_fit else []), *self.summary.lines()]

    def show_summary(self, console: Console, indent: int = 0) -> None:
        if console.is_terminal:
            if self.does_not_fit:
                console.print(Padding(f"[red]{self.does_not_fit}[/]", (0, 0, 0, indent)))
            console.print(Padding(self.summary.to_rich(), (0, 0, 0, indent)))
        else:
            super().show_summary(console, indent)

    def save_html(self, path: str | Path, *, title: str = "Weft") -> None:
        page = ReportPage(
            title,
            str(self.cluster),
            *self.runs,
            self.summary,
            self.witnesses,
            self.passes,
            warning=self.does_not_fit or "",
            error_bar=" ".join(filter(None, (self.errors[0].text, f"({self.errors[0].basis})"))),
        )
        page.save_html(path)

    def save_trace(self, path: str | Path) -> None:
        save_trace(path, *self.runs, cluster=str(self.cluster))

    def _simulated(self) -> dict[str, Any]:
        step, peak = self.errors
        return asdict(self.summary) | {
            "step_error": step.share,
            "peak_error": peak.share,
            "error_basis": {"step": step.basis, "peak": peak.basis},
            "fits": self.does_not_fit is None,
        }


def with_simulations(
    report: Report,
    before: GraphModule,
    after: GraphModule,
    cluster: Cluster,
    *,
    groups: Mapping[str, int | Sequence[Sequence[int]]] | None = None,
    tokens_per_step: int | None = None,
) -> SimulatedReport:
    """The report of a run that was made for a cluster; `tokens_per_step` of all ranks, None: as the module says."""
    told: dict[str, Any] = {each.name: getattr(report, each.name) for each in fields(Report)}
    told["cluster"] = cluster.name
    dags = [dag_of(module.graph) for module in (before, after)]
    first, second = (
        _input(module, dag, read_groups(module, groups), cluster, report)
        for module, dag in zip((before, after), dags, strict=True)
    )
    work = work_of(before, cluster.device, tokens_per_step)
    return SimulatedReport(
        **told,
        graphs=(first, second),
        work=work,
        cluster_notes=(*notes_on_sizes(before), *notes_on(cluster)),
        kind=step_kind(dags[:1], cluster),
        device_bytes=cluster.device.memory_bytes,
    )


def _input(module: GraphModule, dag: Dag, groups: GroupTable, cluster: Cluster, report: Report) -> SimulationInput:
    return SimulationInput(
        program_of(dag, groups, cluster),
        explain(module, report).collectives,
        launches_of(module, groups),
        tuple(groups),
    )


def notes_on(cluster: Cluster) -> tuple[str, ...]:
    """One sentence if the cluster does not describe all of compute, none otherwise."""
    has_peak, has_memory = bool(cluster.device.peak_tflops), cluster.device.memory_gbps is not None
    if has_peak and has_memory:
        return ()
    if has_peak:
        return (f"cluster {cluster.name} has no memory_gbps in [device]: only matrix products take time",)
    if has_memory:
        return (f"cluster {cluster.name} has no peak_tflops in [device]: products are priced by their bytes alone",)
    return (f"cluster {cluster.name} has no peak_tflops and no memory_gbps in [device]: compute takes no time",)
