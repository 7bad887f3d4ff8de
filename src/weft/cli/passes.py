"""`weft passes`: list the passes, or explain one."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from inspect import cleandoc, getdoc
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.usage import JsonOption, show

if TYPE_CHECKING:
    from weft.passes.base import Pass


def passes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A pass to explain, or a stage or preset whose passes to list.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the passes, stages and presets, or explain one."""
    from weft.passes.base import all_passes, broken_passes, find_pass
    from weft.passes.pipeline import Pipeline
    from weft.passes.presets import PRESETS, STAGES

    if name is None:
        chosen = all_passes()
    elif name in STAGES or name in PRESETS:
        chosen = {each.name(): type(each) for each in Pipeline.parse(name).passes}
    else:
        chosen = {name: find_pass(name, "passes")}
    if as_json:
        typer.echo(json.dumps({key: _describe(cls) for key, cls in chosen.items()}, indent=1))
        return
    if name in chosen:
        typer.echo(_explain(chosen[name]))
        return
    rows = {key: _summary(cls) for key, cls in chosen.items()}
    if name is None:
        rows |= {key: f"Stage: {spec}" for key, spec in STAGES.items()}
        rows |= {key: f"Preset: {spec or 'no passes'}" for key, spec in PRESETS.items()}
        rows["auto"] = "Preset: chosen by the collectives of the graph"
    width = max(map(len, rows), default=0)
    for key, text in rows.items():
        typer.echo(f"{key.ljust(width)}  {text}")
    if name is None:
        for error in broken_passes().values():
            show(str(error), err=True)


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
