"""`weft optimize --bisect`: find the pass that is at fault."""

from __future__ import annotations

import json
from typing import NoReturn

import typer

from weft.cli import usage
from weft.cli.pipeline_run import read_all


def bisect_source(
    source: str,
    cluster: str | None,
    pipeline: str,
    verify: usage.Witness,
    memory_limit: str | None,
    effort: usage.Effort,
    as_json: bool,
) -> NoReturn:
    """Run the passes one by one and report the first faulty one; the exit status is 1 if there is one."""
    module, passes, described, limit = read_all(source, cluster, pipeline, memory_limit)
    from weft.api import bisect

    with usage.progress(f"checking each pass on {len(module.graph.nodes)} nodes"):
        fault = bisect(
            module,
            described,
            pipeline=passes,
            memory_limit_bytes=limit,
            effort=effort.value,
            verify="equivalence" if verify is usage.Witness.EQUIVALENCE else "values",
        )
    if as_json:
        told = {"fault": None if fault is None else fault.to_record()}
        usage.write(json.dumps(told, indent=1, sort_keys=True) + "\n", None)
    elif fault is None:
        usage.show("no pass changes values or breaks a check")
    else:
        usage.show(f"{fault}\nthe input of that pass:\n{fault.before}")
    raise typer.Exit(0 if fault is None else 1)
