"""`weft explain`: the decisions about each collective of a source, about those of one layer, or about one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import usage
from weft.cli.pipeline_run import optimize_source, plan_file, save_plan
from weft.errors import compose, nearest

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from weft.report.collective_record import CollectiveRecord
    from weft.report.explain import Explanation
    from weft.report.report import Report
    from weft.report.summary import SimulatedRun

CollectiveArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="COLLECTIVE",
        help="Explain only the collective whose launch or wait has this name, or those of this layer or module.",
    ),
]


def explain(
    source: usage.Source,
    collective: CollectiveArgument = None,
    cluster: usage.ClusterOption = None,
    pipeline: usage.PipelineOption = "auto",
    memory_limit: usage.MemoryOption = None,
    effort: usage.EffortOption = usage.Effort.DEFAULT,
    verify: usage.VerifyOption = usage.Witness.STRUCTURE,
    strict: usage.StrictOption = False,
    output: usage.OutputOption = None,
    plan: usage.PlanOption = None,
    as_json: usage.JsonOption = False,
) -> None:
    """List the decisions about every collective of a graph: which rewrites were applied, which declined, and why.

    For an exposed collective, the decision names the obstacle and the time that removing it could save. With --cluster,
    a table lists the exposed time by layer. If the text does not fit a screen, similar layers share a line. For a
    single collective, --cluster also shows when it ran and which kernels hid it, before and after.
    """

    def check(module: GraphModule) -> None:
        if collective is not None and not _is_module(module, collective):
            launch_of(module, collective)

    module, result = optimize_source(
        source,
        cluster,
        pipeline,
        verify,
        strict,
        (output, plan_file(plan)),
        check,
        memory_limit=memory_limit,
        effort=effort,
    )

    from weft.report.explain import explain as tell
    from weft.report.simulated import SimulatedReport

    report = result.report
    explanation = report.explain() if isinstance(report, SimulatedReport) else tell(module, report)
    save_plan(module, result, plan)
    if collective is None:
        text = explanation.to_json() if as_json else str(explanation)
    elif _is_module(module, collective):
        found = explanation.of(collective)
        lines = (line for record in found for line in record.lines(explanation.modules))
        text = json.dumps([*map(asdict, found)], indent=1, sort_keys=True) if as_json else "\n".join(lines)
    else:
        text = _one(explanation, launch_of(module, collective), result.module, result.report, as_json)
    usage.write(text + "\n", output)


def _is_module(module: GraphModule, name: str) -> bool:
    """Whether collectives of a graph come from a layer or module of that name, and none is called so."""
    from weft.graph.collective import collectives
    from weft.graph.origins import originals_of

    if any(name in (node.name for node in (each.launch, *each.waits)) for each in collectives(module.graph)):
        return False
    return any(f"{origin.subject}.".startswith(f"{name}.") for origin in originals_of(module.graph).values())


def launch_of(module: GraphModule, name: str) -> str:
    """The launch of the collective that has a node of that name."""
    from weft.graph.collective import collectives

    launches = {
        node.name: found.launch.name for found in collectives(module.graph) for node in (found.launch, *found.waits)
    }
    if name not in launches:
        do = nearest(name, launches) or "`weft explain SOURCE` lists the collectives"
        raise usage.UsageError(compose("explain", f"no collective is called {name!r}", do=do))
    return launches[name]


@dataclass(frozen=True)
class Figures:
    """One collective of a simulated run."""

    name: str
    launched_us: float
    start_us: float
    end_us: float
    exposed_us: float
    hidden_us: float
    hidden_by: tuple[str, ...]
    is_critical: bool
    """Whether it is on the critical path."""


def _one(explanation: Explanation, launch: str, after: GraphModule, report: Report, as_json: bool) -> str:
    from weft.report.simulated import SimulatedReport

    record = next(record for record in explanation.collectives if record.name == launch)
    runs = report.runs if isinstance(report, SimulatedReport) else None
    was, now = (
        ([], []) if runs is None else (_figures(runs[0], [launch]), _figures(runs[1], _replacements(record, after)))
    )
    if as_json:
        simulated = None
        if runs is not None:
            simulated = {"cluster": report.cluster, "before": [*map(asdict, was)], "after": [*map(asdict, now)]}
        return json.dumps({"collective": asdict(record), "simulated": simulated}, indent=1, sort_keys=True)
    told = "\n".join(record.lines(explanation.modules))
    return told if runs is None else "\n".join([told, "", *_table(str(report.cluster), was, now)])


def _replacements(record: CollectiveRecord, after: GraphModule) -> list[str]:
    """The launches that do its work after the run: the launch itself, or those that replaced it."""
    from weft.graph.collective import collectives

    found = list(collectives(after.graph))
    if any(each.launch.name == record.name for each in found):
        return [record.name]
    named = {name for outcome in record.outcomes if outcome.applied for name in outcome.nodes}
    return [each.launch.name for each in found if named & {node.name for node in (each.launch, *each.waits)}]


def _figures(run: SimulatedRun, names: list[str]) -> list[Figures]:
    critical = set(run.timeline.critical_path)
    return [
        Figures(
            span.name,
            span.launched_ns / 1000,
            span.start_ns / 1000,
            span.end_ns / 1000,
            span.exposed_ns / 1000,
            span.hidden_ns / 1000,
            span.hidden_by,
            span.op in critical,
        )
        for span in run.timeline.collectives
        if span.name in names
    ]


def _table(cluster: str, before: list[Figures], after: list[Figures]) -> list[str]:
    """One column for each collective; `-` if it is gone."""
    from weft.report.plain_text import plain_line, table

    columns = [*_columns("before", before), *_columns("after", after)]
    heads = (f"on {cluster}", "launch", "launched", "start", "end", "exposed", "hidden", "hidden by", "critical path")
    return [plain_line(line) for line in table(list(zip(heads, *columns, strict=True)))]


def _columns(label: str, found: list[Figures]) -> Iterator[list[str]]:
    from weft.quantities import duration_text

    for each in found:
        times = (each.launched_us, each.start_us, each.end_us, each.exposed_us, each.hidden_us)
        hidden_by = ", ".join(each.hidden_by) or "nothing"
        yield [label, each.name, *map(duration_text, times), hidden_by, "yes" if each.is_critical else "no"]
    if not found:
        yield [label, "gone", *["-"] * 7]
