"""`weft apply`: apply a saved plan to a source and write the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from weft.cli import usage

PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A plan file, or a folder that has a plan for this graph.")
]


def apply(
    source: usage.Source,
    plan: PlanArgument,
    verify: usage.VerifyOption = usage.Witness.STRUCTURE,
    output: usage.OutputOption = None,
    as_json: usage.JsonOption = False,
) -> None:
    """Apply a plan to the graph that it was made for. The new listing goes to stdout, the report to stderr."""
    usage.check_files((output,), (source, str(plan)))
    with usage.progress("importing torch"):
        from rich.console import Console

        from weft.api import carry_out
        from weft.cli.source import load_source
        from weft.graph.listings.text import render
        from weft.passes.pipeline import identity_of
        from weft.plan.folder import PlanFolder
        from weft.plan.plan import Plan

    with usage.progress(f"reading {source}"):
        module = load_source(source)
    chosen = PlanFolder(plan).find(*identity_of(module)) if plan.is_dir() else Plan.load(plan)
    with usage.progress(f"applying the plan to {len(module.graph.nodes)} nodes"):
        result = carry_out(module, chosen, verify=verify.value)
    listing = render(result.module)
    if output is not None or not as_json:
        usage.write(listing, output)
    if not as_json:
        result.report.show(Console(stderr=True))
        return
    told = {"report": json.loads(result.report.to_json())} | ({} if output is not None else {"listing": listing})
    usage.write(json.dumps(told, indent=1, sort_keys=True) + "\n", None)
