"""The page of the Python interface: every public name with its signature and docstring."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import Any

import weft
from tools.docs_passes import markdown_of

WIDTH = 100
QUOTES = "'\""
INTRODUCTION = """\
# Python

Every name of `weft.__all__`, made of the code. Other modules may be imported and are documented in place; these names
and their meanings are kept stable.
"""


def page() -> str:
    """The page."""
    names = sorted((name for name in weft.__all__ if name != "__version__"), key=str.lower)
    return "\n\n".join([INTRODUCTION, *(part for name in names for part in section(name, getattr(weft, name))), ""])


def section(name: str, thing: Any) -> Iterator[str]:
    """One name."""
    yield f"## weft.{name}"
    if inspect.ismodule(thing):
        yield markdown_of(inspect.getdoc(thing) or "")
        for function in (getattr(thing, each) for each in thing.__all__):
            if inspect.isfunction(function):
                yield f"```text\n{signature(f'weft.{name}.{function.__name__}', function)}\n```"
                yield markdown_of(inspect.getdoc(function) or "")
        return
    if inspect.isfunction(thing):
        yield f"```text\n{signature(f'weft.{name}', thing)}\n```"
    yield markdown_of(inspect.getdoc(thing) or "")
    if inspect.isclass(thing):
        yield f"Defined in `{thing.__module__}`."
        rows = list(members(thing))
        if rows:
            yield "\n".join(["| member | what it is |", "|---|---|", *rows])


def signature(name: str, function: Any) -> str:
    """A signature on one line, or one argument on each."""
    found = list(inspect.signature(function).parameters.values())
    parameters = [_parameter(each) for each in found]
    first = next((i for i, each in enumerate(found) if each.kind is each.KEYWORD_ONLY), None)
    if first is not None:
        parameters.insert(first, "*")
    line = f"{name}({', '.join(parameters)})"
    return line if len(line) <= WIDTH else "\n".join([f"{name}(", *(f"    {each}," for each in parameters), ")"])


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}: {str(parameter.annotation).strip(QUOTES)}{default}"


def members(cls: type) -> Iterator[str]:
    """The fields, then the public members that have a docstring."""
    fields = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    told = sentences(cls)
    for name in fields:
        yield f"| `{name}` | {_cell(told.get(name, 'a field'))} |"
    for name, member in vars(cls).items():
        if name in fields or name.startswith("_"):
            continue
        if isinstance(member, Enum):
            yield f"| `{name}` | {_cell(told.get(name, str(member.value)))} |"
            continue
        getter = getattr(member, "fget", getattr(member, "func", None))
        doc = inspect.getdoc(getter or getattr(member, "__func__", member)) if getter or _is_method(member) else None
        if doc:
            yield f"| `{name}{'' if getter else '()'}` | {_cell(doc)} |"


def _is_method(member: Any) -> bool:
    return inspect.isfunction(getattr(member, "__func__", member))


def sentences(cls: type) -> dict[str, str]:
    """The docstrings under the fields of a class in its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    found: dict[str, str] = {}
    for statement, below in itertools.pairwise(body.body if isinstance(body, ast.ClassDef) else []):
        target = statement.target if isinstance(statement, ast.AnnAssign) else None
        target = statement.targets[0] if isinstance(statement, ast.Assign) else target
        if isinstance(target, ast.Name) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[target.id] = str(below.value.value)
    return found


def _cell(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")
