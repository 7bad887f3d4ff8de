"""`weft passes`: which passes there are, and what each of them does."""

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
    name: Annotated[str | None, typer.Argument(help="Explain this pass.")] = None, as_json: JsonOption = False
) -> None:
    """List the passes, or explain one."""
    from weft.passes.base import all_passes, broken_passes, find_pass

    chosen = {name: find_pass(name, "passes")} if name is not None else all_passes()
    if as_json:
        typer.echo(json.dumps({key: _describe(cls) for key, cls in chosen.items()}, indent=1))
    elif name is not None:
        typer.echo(_explain(chosen[name]))
    else:
        width = max(map(len, chosen))
        for key, cls in chosen.items():
            typer.echo(f"{key.ljust(width)}  {_summary(cls)}")
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
