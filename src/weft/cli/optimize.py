"""`weft optimize`: run a pipeline on a source, for its result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import usage
from weft.cli.optimized import optimize_source, save_plan
from weft.errors import compose

if TYPE_CHECKING:
    from weft.report.report import Report

HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Draw both timelines on one page. Needs --cluster."),
]
TraceOption = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Save both timelines as a Chrome trace. Needs --cluster."),
]


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
    as_json: usage.JsonOption = False,
) -> None:
    """Optimize a graph: its new listing goes to stdout, the report to stderr.

    With --json stdout gets one object with the report, and with the listing unless -o takes it.
    """
    for option, path in (("--html", html), ("--trace", trace)):
        if path is not None and cluster is None:
            what = f"{option} draws a simulation, and no cluster is given"
            raise usage.UsageError(compose("optimize", what, do="give one: --cluster h100-8x8"))
    _, result = optimize_source(
        source,
        cluster,
        pipeline,
        verify,
        strict,
        (output, plan, html, trace),
        tokens=tokens,
        memory_limit=memory_limit,
        effort=effort,
    )

    from rich.console import Console

    from weft.graph.text import render

    listing = render(result.module)
    save_plan(result, plan)
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


def _draw(report: Report, source: str, html: Path | None, trace: Path | None) -> None:
    if html is not None:
        with usage.progress("drawing both timelines"), usage.writing(html):
            report.save_html(html, title=source)
    if trace is not None:
        with usage.progress("tracing both timelines"), usage.writing(trace):
            report.save_trace(trace)
