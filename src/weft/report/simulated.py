"""SimulatedReport: a report with both of its graphs simulated on a cluster, once somebody asks.

Contract: `weft.optimize` freezes both graphs, so that later edits of the modules change nothing here. They are priced,
simulated and bounded when the report is printed, written or asked for the plan. So is the graph before as a runtime
executes it.

The bound of the graph before holds for every order and every merging of its collectives. Passes may also remove work,
so the run after is compared with the smaller of that bound and its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.padding import Padding
from torch.fx import GraphModule

from weft.bounds.lower_bound import Bound, lower_bound
from weft.cost.cluster import Cluster
from weft.cost.prices import price_launches
from weft.graph.assumed_sizes import notes_on_sizes
from weft.graph.dag import collector_paused
from weft.graph.frozen import FrozenGraph
from weft.graph.groups import GroupTable, read_groups
from weft.graph.versions import analyses_kept, dag_of, keep_dag
from weft.plan.plan import Evidence, Plan
from weft.prediction.between_nodes import notes_on_bytes_between_nodes
from weft.prediction.error_bars import ErrorBar, StepKind, error_bars
from weft.prediction.memory import StepMemory, does_not_fit, memory_of_graph
from weft.prediction.memory_by_owner import OwnedMemory, memory_by_owner
from weft.prediction.step_kind import step_kind
from weft.quantities import size_text
from weft.report.baseline import Baseline, baseline_of
from weft.report.collective_record import CollectiveRecord
from weft.report.explain import Explanation, explain, records_of
from weft.report.html import ReportPage
from weft.report.layers import layer_lines
from weft.report.report import Report
from weft.report.summary import SimulatedRun, Summary, summarize
from weft.report.trace import save_trace
from weft.report.work import Work, work_of
from weft.retention.all_choices import all_choices
from weft.retention.sites import Sites
from weft.simulation.build import program_of
from weft.simulation.predicted_step import Launch, launches_of, predict
from weft.simulation.price_notes import notes_on_prices
from weft.simulation.program import Program
from weft.simulation.simulator import simulate
from weft.simulation.timeline import Timeline

Result = TypeVar("Result")


def on_demand(compute: Callable[[Any], Result]) -> cached_property[Result]:
    """A property that is computed at its first use, with the collector paused and with the analyses kept."""
    return cached_property(collector_paused()(analyses_kept()(compute)))


@dataclass(frozen=True)
class SimulationInput:
    """One graph as the run saw or left it, and what is computed from it on demand."""

    graph: FrozenGraph
    table: GroupTable
    stated: GroupTable
    """The groups as the graph alone states them."""
    cluster: Cluster
    report: Report
    given: Mapping[str, int | Sequence[Sequence[int]]] | None = None
    """The groups as the caller states them."""
    original: SimulationInput | None = None
    """The input with the graph that this one was made from."""
    known_program: Program | None = None
    """The program of this graph, if it is known already."""

    @on_demand
    def program(self) -> Program:
        return self.known_program or program_of(self.graph.dag, self.table, self.cluster)

    @on_demand
    def records(self) -> tuple[CollectiveRecord, ...]:
        """Its collectives, each with the decisions about it."""
        before = self.original.records if self.original is not None else ()
        originals = {record.name: record.origins[0] for record in before}
        return records_of(self.graph.module, self.report, self.stated, originals)

    @on_demand
    def launches(self) -> tuple[Launch, ...]:
        return launches_of(self.graph.module, self.table)

    @on_demand
    def bound(self) -> Bound:
        return lower_bound(self.program)

    def choices_bound(self, memory_limit_bytes: int, may_offload: bool) -> Bound | None:
        """The bound for every mixture of keeping, gathering again, recomputing and, if that is allowed, offloading."""
        device = self.cluster.device
        sites = Sites(self.graph.dag, self.program, self.table, {})
        choices = all_choices(sites, device, device.host_memory if may_offload else None)
        return None if choices is None else lower_bound(choices, memory_limit_bytes=memory_limit_bytes)

    @on_demand
    def timeline(self) -> Timeline:
        return simulate(self.program)

    @on_demand
    def memory(self) -> StepMemory:
        return memory_of_graph(self.graph.dag, self.program, self.cluster.device)

    @on_demand
    def owned_memory(self) -> OwnedMemory:
        return memory_by_owner(self.graph.dag, self.program)

    def run(self, bound_ns: int) -> SimulatedRun:
        """The simulated graph, with the bound that it is compared with."""
        timeline = replace(self.timeline, lower_bound_ns=bound_ns)
        return SimulatedRun(timeline, tuple(queue.group for queue in self.program.queues), self.records)


@dataclass(frozen=True, kw_only=True)
class SimulatedReport(Report):
    """A report of a run for a cluster."""

    graphs: tuple[SimulationInput, SimulationInput] = field(repr=False, compare=False)
    """Before and after."""
    simulated_cluster: Cluster = field(repr=False, compare=False)
    memory_limit_bytes: int | None = None
    """As it was given."""
    device_limit_bytes: int | None = None
    """The memory limit, if none was given and the device's memory was the limit."""
    num_tokens: int | None = field(default=None, repr=False, compare=False)
    """Tokens of one step, of all ranks; None: as the graph says."""
    size_notes: tuple[str, ...] = ()
    """Assumed sizes, as sentences."""

    @on_demand
    def work(self) -> Work:
        return work_of(self.graphs[0].graph.module, self.simulated_cluster.device, self.num_tokens)

    @on_demand
    def kind(self) -> StepKind:
        before = self.graphs[0]
        return step_kind([before.graph.dag], self.simulated_cluster, before.timeline)

    @on_demand
    def errors(self) -> tuple[ErrorBar, ErrorBar]:
        """The error bars of the step and of the peak."""
        return error_bars(self.kind)

    @property
    def does_not_fit(self) -> str | None:
        """One sentence if the graph after needs more memory than the device has."""
        memory = self.graphs[1].memory
        return does_not_fit(memory.least_bytes, memory.device_bytes)

    @property
    def limit_bytes(self) -> int | None:
        """The memory limit of the run, given or from the device."""
        return self.device_limit_bytes if self.memory_limit_bytes is None else self.memory_limit_bytes

    @property
    def device_limit(self) -> str:
        """One sentence if the device's memory was the limit; empty otherwise."""
        if self.device_limit_bytes is None:
            return ""
        limit = size_text(self.device_limit_bytes)
        return f"memory limit: {limit}, which the device leaves for tensors; the step would not fit without a limit"

    @on_demand
    def runs(self) -> tuple[SimulatedRun, SimulatedRun]:
        """Both graphs simulated."""
        before, after = self.graphs
        before_ns = before.bound.bound_ns
        return before.run(before_ns), after.run(min(before_ns, after.bound.bound_ns))

    @on_demand
    def summary(self) -> Summary:
        """Both runs in numbers."""
        found, bound = summarize(*self.runs, self.work), self.choices_bound
        after = replace(found.after, choices_bound_us=bound.bound_ns / 1000 if bound is not None else None)
        return replace(found, after=after)

    @on_demand
    def choices_bound(self) -> Bound | None:
        """A bound for every mixture of what the values may be that the run decided about, within its memory limit.

        It holds for the graph before, or for the graph after if a pass removed work. None if nothing was decided, or if
        the cluster has an execution, which makes times depend on the whole step.
        """
        specs = [each.spec for each in self.passes if each.spec.partition("{")[0] == "decide-memory"]
        if self.limit_bytes is None or not specs:
            return None
        may_offload = any("offload=true" in spec for spec in specs)
        after = self.graphs[1].timeline
        limit = max(self.limit_bytes, after.peak_bytes)  # passes that follow may need more
        found = (each.choices_bound(limit, may_offload) for each in self.graphs)
        return next((bound for bound in found if bound is None or bound.bound_ns <= after.step_ns), None)

    @on_demand
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
            predict(timeline, after.launches, after.table, [after.graph.dag]),
        )

    @on_demand
    def plan(self) -> Plan:
        """The plan with its evidence."""
        return replace(self.bare_plan, evidence=self.evidence)

    @on_demand
    def between_nodes(self) -> tuple[str, ...]:
        """Bytes that the graph after sends between nodes without need, as sentences."""
        after = self.graphs[1]
        return notes_on_bytes_between_nodes(after.graph.module, self.simulated_cluster, after.given)

    @on_demand
    def baseline(self) -> Baseline | None:
        """The graph before as the runtime of its parallelism executes it; None if none fits."""
        before = self.graphs[0]
        module, dag = before.graph.module, before.graph.dag
        keep_dag(module.graph, dag)
        return baseline_of(module, self.simulated_cluster, before.given)

    @property
    def compared_with_runtime(self) -> str | None:
        """The comparison of the graph after with the baseline, as a sentence."""
        return None if self.baseline is None else self.baseline.sentence(self.summary.after.step_us)

    @property
    def error_bars(self) -> tuple[str, ...]:
        """Both bars, each with what it rests on, as sentences."""
        return tuple(
            f"error bar of {what}: {f'{bar.text}, ' if bar.text else ''}{bar.basis}"
            for what, bar in zip(("times", "memory"), self.errors, strict=True)
        )

    @property
    def notes(self) -> tuple[str, ...]:
        given = self.graphs[0]
        of_limit = [self.device_limit] if self.device_limit else []
        of_graph = (*of_limit, *self.size_notes, *notes_on_prices(given.program, given.graph.dag.nodes))
        of_cluster = (*notes_on(self.simulated_cluster), *self.between_nodes)
        of_runtime = self.baseline.notes if self.baseline is not None else ()
        return (*super().notes, *of_graph, *of_cluster, *of_runtime, *self.error_bars)

    def summary_lines(self) -> list[str]:
        return [*filter(None, [self.does_not_fit]), *self.summary.lines(), *filter(None, [self.compared_with_runtime])]

    def show_summary(self, console: Console, indent: int = 0) -> None:
        if console.is_terminal:
            if self.does_not_fit:
                console.print(Padding(f"[red]{self.does_not_fit}[/]", (0, 0, 0, indent)))
            console.print(Padding(self.summary.to_rich(), (0, 0, 0, indent)))
            if self.compared_with_runtime:
                console.print(Padding(self.compared_with_runtime, (0, 0, 0, indent)), highlight=False)
        else:
            super().show_summary(console, indent)

    def _details(self) -> list[str]:
        run = self.runs[1]
        head = [run.why_slow, *(layer_lines(run.exposed_layers) if run.exposed_layers else ()), ""]
        return ["", *head, *super()._details()] if run.timeline.collectives else super()._details()

    def explain(self) -> Explanation:
        """Every collective of the original graph with the decisions about it, and the exposed time by layer."""
        before, run = self.graphs[0], self.runs[1]
        told = explain(before.graph.module, self, self.evidence, before.stated)
        why = [*filter(None, [run.why_slow]), *(f"{note[0].upper()}{note[1:]}." for note in self.between_nodes)]
        return replace(told, exposed=run.exposed_layers, why=" ".join(why))

    def save_html(self, path: str | Path, *, title: str = "Weft") -> None:
        page = ReportPage(
            title,
            str(self.cluster),
            *self.runs,
            self.summary,
            self.witnesses,
            self.passes,
            warning=self.does_not_fit or "",
            baseline=self.compared_with_runtime or "",
            notes=self.between_nodes,
            error_bars=self.error_bars,
            owned=(self.graphs[0].owned_memory, self.graphs[1].owned_memory),
            retained=self.memory,
            limit=self.device_limit,
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
            "memory_limit_bytes": self.limit_bytes,
            "device_limit_bytes": self.device_limit_bytes,
            "peak_by_owner": {
                name: each.owned_memory.at_peak for name, each in zip(("before", "after"), self.graphs, strict=True)
            },
        }

    def _baseline(self) -> dict[str, Any] | None:
        return None if self.baseline is None else asdict(self.baseline)


def with_simulations(
    report: Report,
    before: GraphModule,
    after: GraphModule,
    cluster: Cluster,
    *,
    groups: Mapping[str, int | Sequence[Sequence[int]]] | None = None,
    tokens_per_step: int | None = None,
    memory_limit_bytes: int | None = None,
    device_limit_bytes: int | None = None,
    program: Program | None = None,
) -> SimulatedReport:
    """The report of a run that was made for a cluster.

    `tokens_per_step` is of all ranks; None: as the module says. `program` is the program of `after`, if known.
    """
    told: dict[str, Any] = {each.name: getattr(report, each.name) for each in fields(Report)}
    told["cluster"] = cluster.name
    first = _input(before, groups, cluster, report)
    second = replace(_input(after, groups, cluster, report), original=first, known_program=program)
    told |= {"graphs": (first, second), "simulated_cluster": cluster, "num_tokens": tokens_per_step}
    told |= {"memory_limit_bytes": memory_limit_bytes, "device_limit_bytes": device_limit_bytes}
    made = SimulatedReport(**told, size_notes=notes_on_sizes(before))
    for each in made.graphs:
        if each.graph.has_nested_graphs or made.size_notes:  # other sizes may be assumed later
            _ = each.program, each.records, each.launches, made.work, made.kind, made.baseline
    return made


def _input(
    module: GraphModule,
    groups: Mapping[str, int | Sequence[Sequence[int]]] | None,
    cluster: Cluster,
    report: Report,
) -> SimulationInput:
    stated = read_groups(module)
    table = stated if not groups else read_groups(module, groups)
    dag = dag_of(module.graph)
    price_launches(dag, table, cluster)  # a cluster that cannot run the graph is an error now, not at the first look
    return SimulationInput(FrozenGraph(module, dag), table, stated, cluster, report, groups)


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
