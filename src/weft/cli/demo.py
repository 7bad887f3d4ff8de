"""`weft demo`: one block, optimized and checked, with nothing to install or to prepare."""

from __future__ import annotations

import json
from importlib import resources
from typing import Annotated

import typer

from weft.cli.usage import JsonOption


def demo(
    as_json: JsonOption = False, ranks: Annotated[int, typer.Option(help="Ranks of the virtual cluster.")] = 4
) -> None:
    """Optimize one FSDP block and check it on every rank of a virtual cluster. Needs no GPU and no arguments."""
    from weft.api import listing, optimize, verify
    from weft.graph.text import parse

    before = parse(resources.files("weft.cli").joinpath("fsdp_block.txt").read_text())
    result = optimize(before)
    verdict = verify(before, result.module, ranks=ranks)
    if as_json:
        typer.echo(json.dumps({"report": json.loads(result.report.to_json()), "verdict": str(verdict)}, indent=1))
    else:
        _section("before: one block under FSDP, as captured", listing(before))
        _section("after", listing(result.module))
        _section("what was done (+) and declined (-)", str(result.report))
        _section(f"the same values on {ranks} ranks?", str(verdict))
    if not verdict.equal:
        raise typer.Exit(1)


def _section(title: str, text: str) -> None:
    typer.secho(f"\n{title}", bold=True)
    typer.echo("\n".join(f"  {line}".rstrip() for line in text.rstrip().splitlines()))
