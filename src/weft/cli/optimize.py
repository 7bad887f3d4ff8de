"""`weft optimize` and `weft explain`: run a pipeline on a source, for its result or for its reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli import usage

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from weft.api import Result


def optimize(
    source: usage.Source,
    cluster: usage.ClusterOption = None,
    pipeline: usage.PipelineOption = "auto",
    verify: usage.VerifyOption = usage.Witness.STRUCTURE,
    strict: usage.StrictOption = False,
    output: usage.OutputOption = None,
    plan: usage.PlanOption = None,
    as_json: usage.JsonOption = False,
) -> None:
    """Optimize a graph: its new listing goes to stdout, the report to stderr.

    With --json stdout gets one object with the report, and with the listing unless -o takes it.
    """
    from weft.graph.text import render

    _, result = _run(source, cluster, pipeline, verify, strict, (output, plan))
    listing = render(result.module)
    _save(result, plan)
    if output is not None or not as_json:
        usage.write(listing, output)
    if not as_json:
        usage.show(str(result.report), err=True)
        return
    told: dict[str, Any] = {"report": json.loads(result.report.to_json())}
    if output is None:
        told["listing"] = listing
    usage.write(json.dumps(told, indent=1, sort_keys=True) + "\n", None)


def explain(
    source: usage.Source,
    cluster: usage.ClusterOption = None,
    pipeline: usage.PipelineOption = "auto",
    verify: usage.VerifyOption = usage.Witness.STRUCTURE,
    strict: usage.StrictOption = False,
    output: usage.OutputOption = None,
    plan: usage.PlanOption = None,
    as_json: usage.JsonOption = False,
) -> None:
    """Say what became of every collective of a graph: what was done to it, what was declined, and why."""
    from weft.report.explain import explain as tell
    from weft.report.explain_text import text_of

    module, result = _run(source, cluster, pipeline, verify, strict, (output, plan))
    explanation = tell(module, result.report)
    _save(result, plan)
    usage.write((explanation.to_json() if as_json else text_of(explanation)) + "\n", output)


def _run(
    source: str, cluster: str | None, pipeline: str, verify: usage.Witness, strict: bool, files: tuple[Path | None, ...]
) -> tuple[GraphModule, Result]:
    """The graph as it was and what became of it. What is cheap to check is checked before the graph is made."""
    for path in files:
        usage.check_folder(path)
    with usage.progress("importing torch"):
        from weft.api import optimize as run
        from weft.cli.source import load_source
        from weft.cost.cluster import Cluster
        from weft.passes.pipeline import Pipeline

    passes = Pipeline.parse(pipeline)
    if cluster is not None:
        Cluster.load(cluster)
    with usage.progress(f"reading {source}"):
        module = load_source(source)
    with usage.progress(f"optimizing {len(module.graph.nodes)} nodes"):
        return module, run(module, cluster, pipeline=passes, strict=strict, verify=verify.value)


def _save(result: Result, plan: Path | None) -> None:
    if plan is not None:
        usage.write(result.plan.to_json() + "\n", plan)
