"""`weft compare`: a profiled step beside the step that a plan predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import usage
from weft.errors import PlanError, compose

if TYPE_CHECKING:
    from weft.cost.calibration.measured_step import MeasuredStep
    from weft.simulation.predicted_step import PredictedStep

Trace = Annotated[
    Path, typer.Argument(metavar="TRACE", help="A Chrome trace of torch.profiler of one rank; may be gzipped.")
]
Planned = Annotated[
    list[str],
    typer.Argument(
        metavar="PLAN|SOURCE...",
        help="A plan that was made for a cluster and saved with --plan; or the graph that ran, with --cluster. "
        "Several graphs run one after the other.",
    ),
]
StepOption = Annotated[
    int | None, typer.Option("--step", min=0, metavar="N", help="The step marked ProfilerStep#N; default: the last.")
]
RankOption = Annotated[
    list[Path] | None,
    typer.Option("--rank", metavar="TRACE", help="The trace of another rank of the same run. Repeatable."),
]


def compare(
    trace: Trace,
    planned: Planned,
    cluster: usage.ClusterOption = None,
    step: StepOption = None,
    ranks: RankOption = None,
    output: usage.OutputOption = None,
    as_json: usage.JsonOption = False,
) -> None:
    """Compare a measured step with its plan: order, times and exposed communication, largest disagreements first.

    Exit status 0: the planned collectives ran in the planned order; 1: they did not.
    """
    traces = [trace, *(ranks or [])]
    usage.check_files((output,), (*traces, *planned, cluster))
    if missing := [path for path in traces if not path.is_file()]:
        where = [f"{path}: {'it is a folder' if path.is_dir() else 'there is no such file'}" for path in missing]
        raise usage.UsageError(compose("compare", "there is nothing to compare", where=where))
    with usage.progress("importing torch"):
        from weft.report.trace_comparison import compare_step

    with usage.progress(f"reading {', '.join(planned)}"):
        prediction = _predict(planned, cluster)
    with usage.progress(f"reading {', '.join(path.name for path in traces)}"):
        steps = [_read(path, step, prediction) for path in traces]
    found = compare_step(prediction, steps[0], steps[1:])
    usage.write((found.to_json() if as_json else str(found)) + "\n", output)
    raise typer.Exit(0 if found.is_as_planned else 1)


def _predict(planned: list[str], cluster: str | None) -> PredictedStep:
    from weft.simulation.predicted_step import one_after_the_other

    plans = [name for name in planned if _is_json(name)]
    if len(plans) not in (0, len(planned)):
        raise usage.UsageError(compose("compare", "plans and graphs are mixed", do="give plans only, or graphs only"))
    if not plans:
        return _simulate(planned, cluster)
    if cluster is not None:
        what = "--cluster has no effect on a plan, which was made for its own cluster"
        raise usage.UsageError(compose("compare", what, do="leave it off, or give the graph that ran instead"))
    return one_after_the_other([_load(name) for name in plans])


def _is_json(name: str) -> bool:
    path = Path(name)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1 << 12).lstrip()[:1] == b"{"


def _load(name: str) -> PredictedStep:
    from weft.plan.plan import Plan

    do = "save a plan with `weft optimize --cluster ... --plan`, or give the graph that ran with --cluster"
    try:
        evidence = Plan.load(name).evidence
    except PlanError as error:
        raise PlanError(f"{name}: {error}") from None
    if evidence is None or evidence.prediction is None:
        raise PlanError(compose(name, "the plan was made without a cluster, so it predicts no times", do=do))
    return evidence.prediction


def _simulate(sources: list[str], cluster: str | None) -> PredictedStep:
    from weft.bounds.bounded_simulation import simulate_modules
    from weft.cli.source import load_source
    from weft.cost.cluster import Cluster
    from weft.graph.groups import read_groups
    from weft.graph.versions import dag_of
    from weft.simulation.predicted_step import launches_of, predict

    if cluster is None:
        do = "give the cluster that the trace is from: --cluster mine.toml (`weft calibrate` writes one)"
        raise usage.UsageError(compose("compare", "a graph needs a cluster to predict its times", do=do))
    described = Cluster.load(cluster)
    modules = [load_source(source) for source in sources]
    tables = [read_groups(module) for module in modules]
    launches = [
        launch for module, groups in zip(modules, tables, strict=True) for launch in launches_of(module, groups)
    ]
    groups = {group.name: group for each in tables for group in each}
    dags = [dag_of(module.graph) for module in modules]
    return predict(simulate_modules(modules, described), launches, groups.values(), dags)


def _read(path: Path, number: int | None, prediction: PredictedStep) -> MeasuredStep:
    from weft.cost.calibration.samples import MeasurementError
    from weft.cost.calibration.step_trace import read_step_trace

    found = read_step_trace(path)
    if number is not None and number not in found.numbers:
        known = ", ".join(map(str, found.numbers[:20])) or "none"
        what = f"{path} has no step {number}; its steps with collectives: {known}"
        raise usage.UsageError(compose("compare", what, do="leave --step off for the last one"))
    step = found.step(number)
    if step.number is None and len(step.collectives) >= 2 * max(len(prediction.collectives), 1):
        counts = f"it has {len(step.collectives)} collectives, {len(prediction.collectives)} are planned"
        do = "no mark ProfilerStep# separates them: pass schedule=... to torch.profiler.profile and call prof.step()"
        raise MeasurementError([f"{path}: {counts}", do], "compare", "the trace holds more than one step")
    return step
