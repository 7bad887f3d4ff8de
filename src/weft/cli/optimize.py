"""`weft optimize`: run a pipeline on a source and write the result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import usage
from weft.cli.bisect import bisect_source
from weft.cli.pipeline_run import optimize_source, plan_file, save_plan
from weft.errors import compose, nearest

if TYPE_CHECKING:
    from weft.passes.pipeline import LogEntry
    from weft.report.report import Report

HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Draw both timelines on one page. Needs --cluster."),
]
TraceOption = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Save both timelines as a Chrome trace. Needs --cluster."),
]
PrintAfterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--print-after",
        metavar="PASS",
        help="Print the listing after this pass to stderr; `all`: after each pass that changes it. Repeatable.",
    ),
]
BisectOption = Annotated[
    bool,
    typer.Option("--bisect", help="Find the first pass that changes values or breaks a check; writes no result."),
]
ALL = "all"


def optimize(
    source: usage.Source,
    cluster: usage.ClusterOption = None,
    pipeline: usage.PipelineOption = "auto",
    memory_limit: usage.MemoryOption = None,
    effort: usage.EffortOption = usage.Effort.DEFAULT,
    verify: usage.VerifyOption = usage.Witness.STRUCTURE,
    strict: usage.StrictOption = False,
    output: usage.OutputOption = None,
    plan: usage.PlanOption = None,
    html: HtmlOption = None,
    trace: TraceOption = None,
    tokens: usage.TokensOption = None,
    assume: usage.AssumeOption = None,
    print_after: PrintAfterOption = None,
    bisect: BisectOption = False,
    as_json: usage.JsonOption = False,
) -> None:
    """Optimize a graph. Its new listing goes to stdout, the report to stderr.

    With --json, stdout gets one object: the report, and the listing unless -o is given.

    With --bisect, each pass is checked by values on virtual ranks, or by a proof with --verify equivalence.
    """
    if bisect:
        _refuse_files({"-o": output, "--plan": plan, "--html": html, "--trace": trace, "--print-after": print_after})
        bisect_source(source, cluster, pipeline, verify, memory_limit, effort, as_json)
    for option, path in (("--html", html), ("--trace", trace)):
        if path is not None and cluster is None:
            what = f"{option} needs a cluster to simulate"
            raise usage.UsageError(compose("optimize", what, do="give one: --cluster h100-8x8"))
    module, result = optimize_source(
        source,
        cluster,
        pipeline,
        verify,
        strict,
        (output, plan_file(plan), html, trace),
        tokens=tokens,
        assume=assume,
        memory_limit=memory_limit,
        effort=effort,
    )

    from rich.console import Console

    from weft.graph.listings.text import render

    _print_after(result.log, print_after or [])
    listing = render(result.module)
    save_plan(module, result, plan)
    _draw(result.report, source, html, trace)
    if output is not None or not as_json:
        usage.write(listing, output)
    if not as_json:
        result.report.show(Console(stderr=True))
        return
    told: dict[str, Any] = {"report": json.loads(result.report.to_json())}
    if output is None:
        told["listing"] = listing
    usage.write(json.dumps(told, indent=1, sort_keys=True) + "\n", None)


def _refuse_files(options: Mapping[str, object]) -> None:
    """Refuse options that write a result: a search for a fault has none."""
    given = next((option for option, value in options.items() if value), None)
    if given is not None:
        what = f"--bisect writes no result, so {given} has no effect"
        raise usage.UsageError(compose("optimize", what, do=f"leave {given} off"))


def _print_after(log: Sequence[LogEntry], wanted: Sequence[str]) -> None:
    """Print the listings after the passes that were asked for by name or spec."""
    for position, entry in enumerate(log, 1):
        name = entry.step.spec.partition("{")[0]
        if (ALL in wanted and entry.changed) or name in wanted or entry.step.spec in wanted:
            did = "changed" if entry.changed else "unchanged"
            head = f"# after pass {position} of {len(log)}: {entry.step.spec} ({did}, {entry.seconds * 1000:.1f} ms)"
            usage.show(f"{head}\n{entry.after}", err=True)
    known = {name for entry in log for name in (entry.step.spec, entry.step.spec.partition("{")[0])}
    for name in wanted:
        if name != ALL and name not in known:
            what = f"no pass of the pipeline is called {name!r}"
            raise usage.UsageError(compose("--print-after", what, do=nearest(name, known) or f"or write {ALL}"))


def _draw(report: Report, source: str, html: Path | None, trace: Path | None) -> None:
    if html is not None:
        with usage.progress("drawing both timelines"), usage.writing(html):
            report.save_html(html, title=source)
    if trace is not None:
        with usage.progress("tracing both timelines"), usage.writing(trace):
            report.save_trace(trace)
