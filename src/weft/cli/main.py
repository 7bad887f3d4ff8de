"""`weft demo` and `weft passes`.

Artifacts go to stdout, messages to stderr. Exit status 0: done; 1: refused, or the graphs differ; 2: usage.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import resources
from inspect import cleandoc, getdoc
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from weft.passes.base import Pass

app = typer.Typer(
    help="Weave the communication of distributed PyTorch programs into their computation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command()
def demo(
    as_json: AsJson = False, ranks: Annotated[int, typer.Option(help="Ranks of the virtual cluster.")] = 4
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


@app.command()
def passes(
    name: Annotated[str | None, typer.Argument(help="Explain this pass.")] = None, as_json: AsJson = False
) -> None:
    """List the passes, or explain one."""
    from weft.errors import PipelineError, compose, nearest
    from weft.passes.base import all_passes

    known = all_passes()
    if name is not None and name not in known:
        do = nearest(name, known) or "`weft passes` lists them"
        raise PipelineError(compose("passes", f"no pass is called {name!r}", do=do))
    chosen = {name: known[name]} if name is not None else known
    if as_json:
        typer.echo(json.dumps({key: _describe(cls) for key, cls in chosen.items()}, indent=1))
    elif name is not None:
        typer.echo(_explain(known[name]))
    else:
        width = max(map(len, known))
        for key, cls in known.items():
            typer.echo(f"{key.ljust(width)}  {_summary(cls)}")


def _summary(cls: type[Pass]) -> str:
    return (getdoc(cls) or "").partition("\n")[0]


def _describe(cls: type[Pass]) -> dict[str, Any]:
    options = [asdict(option) for option in cls.options()]
    return {"summary": _summary(cls), "numerics": cls.numerics.value, "options": options, "doc": _module_doc(cls)}


def _explain(cls: type[Pass]) -> str:
    options = [f"    {o.name}: {o.type} = {o.default}\n        {o.doc}" for o in cls.options()]
    lines = [cls.name(), "=" * len(cls.name()), "", _module_doc(cls)]
    return "\n".join([*lines, "", "Options:", *options] if options else lines)


def _module_doc(cls: type[Pass]) -> str:
    return cleandoc(sys.modules[cls.__module__].__doc__ or "")


def main() -> None:
    """Run the command line; errors of Weft are messages, not tracebacks."""
    try:
        app()
    except Exception as error:
        from weft.errors import PipelineError, WeftError

        if not isinstance(error, WeftError):
            raise
        typer.echo(str(error), err=True)
        sys.exit(2 if isinstance(error, PipelineError) else 1)
