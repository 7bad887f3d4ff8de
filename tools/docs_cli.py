"""The page of the command line, generated from the functions that implement the commands."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from enum import Enum
from inspect import cleandoc
from types import NoneType
from typing import Any

from typer.models import ArgumentInfo, OptionInfo

from weft.cli.main import app

INTRODUCTION = """\
# Command line

Made of the commands themselves; `weft COMMAND --help` prints the same. Artifacts go to stdout or to `-o FILE`, messages
and reports to stderr, `--json` gives data instead of text. Exit status: 0 done, 1 refused or different, 2 usage.

A SOURCE is a listing, an archive, a `TORCH_TRACE` log (`FILE:LINE` for one of its graphs), an `fx_graph_runnable` text,
or a model of the zoo such as `zoo:llama-debug/fsdp-tp?layers=2&ranks=4`; quote it, since `?` and `&` mean something to
the shell. Sizes are written `24GiB`, `24GB` or as a number of bytes.
"""


def page() -> str:
    """The page."""
    found = [command.callback for command in app.registered_commands]
    return "\n".join([INTRODUCTION, *(section(callback) for callback in found if callback is not None)])


def section(callback: Callable[..., Any]) -> str:
    """One command: its description, arguments and options."""
    hints = typing.get_type_hints(callback, include_extras=True)
    arguments: list[tuple[str, str, str]] = []
    options: list[tuple[str, str, str]] = []
    for parameter in inspect.signature(callback).parameters.values():
        kind, info = typing.get_args(hints[parameter.name])
        if isinstance(info, ArgumentInfo):
            arguments.append((_argument(info, parameter, kind), info.help or "", _default(parameter.default)))
        elif isinstance(info, OptionInfo) and not info.hidden:
            options.append((_option(info, parameter.name, kind), info.help or "", _default(parameter.default)))
    name = callback.__name__
    usage = " ".join([f"weft {name}", "[OPTIONS]", *(shown for shown, _, _ in arguments)])
    rows = [f"| `{shown}` | {_cell(told)} | {default} |" for shown, told, default in (*arguments, *options)]
    table = ["| argument or option | what it says | default |", "|---|---|---|", *rows]
    parts = [f"## weft {name}", f"```text\n{usage}\n```", cleandoc(callback.__doc__ or ""), "\n".join(table), ""]
    return "\n\n".join(parts)


def _argument(info: ArgumentInfo, parameter: inspect.Parameter, kind: Any) -> str:
    shown = str(info.metavar or parameter.name.upper()).strip("[]")
    shown += "..." if typing.get_origin(kind) is list and not shown.endswith("...") else ""
    return shown if parameter.default is parameter.empty else f"[{shown}]"


def _option(info: OptionInfo, name: str, kind: Any) -> str:
    given = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
    spelled = ", ".join(sorted(given or [f"--{name.replace('_', '-')}"], key=len))
    kinds = [each for each in (typing.get_args(kind) or (kind,)) if each is not NoneType]
    if kinds == [bool]:
        return spelled
    if info.metavar:
        return f"{spelled} {info.metavar}".replace("|", " or ")
    if isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        return f"{spelled} {' or '.join(str(each.value) for each in kinds[0])}"
    return f"{spelled} {getattr(kinds[0], '__name__', str(kinds[0])).upper()}"


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty or value is None or value is False:
        return ""
    shown = getattr(value, "value", value)
    return f"`{shown}`" if str(shown) else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
