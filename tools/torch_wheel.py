"""Names and schemas in a torch wheel, read as text: nothing is installed, imported or run.

Contract: a name is `yes`, `missing`, or `unreadable` if it is created at run time or in C++ without a stub. A schema is
found by its text in the binary that registers it.
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

LIBRARY = "torch/lib/libtorch_cpu.so"
SCHEMA = re.compile(rb"(?<=\x00)(\w+)(\([^\x00]{0,400}\) ?-> [^\x00]{1,80})(?=\x00)")


class Wheel:
    """A wheel of torch, as a file."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._files = set(self._zip.namelist())
        self.version = path.name.split("-")[1]
        self._bindings = cache(self._read)

    def look_up(self, name: str) -> str:
        """Whether the wheel has a dotted name."""
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            file = self._module(parts[:end])
            if file is not None:
                return self._member(file, parts[end:])
        return "missing"

    def schemas(self, names: Iterable[str]) -> dict[str, str]:
        """The schemas of operators of functional collectives."""
        wanted = set(names)
        found: dict[str, str] = {}
        for match in SCHEMA.finditer(self._zip.read(LIBRARY)):
            name, rest = match[1].decode(), match[2].decode(errors="replace")
            if name in wanted and ("group_name" in rest or name.startswith("wait_tensor")):
                found[name] = name + rest
        return found

    def _module(self, parts: list[str]) -> str | None:
        base = "/".join(parts)
        names = (f"{base}{end}" for end in (".py", "/__init__.py", ".pyi", "/__init__.pyi"))
        return next((name for name in names if name in self._files), None)

    def _member(self, file: str, parts: list[str]) -> str:
        if not parts:
            return "yes"
        found = self._bindings(file)
        if parts[0] not in found:
            return "unreadable" if file.endswith(".pyi") else "missing"
        made = found[parts[0]]
        if len(parts) == 1:
            return "yes"
        return "yes" if isinstance(made, ast.ClassDef) and parts[1] in names_of(made.body) else "unreadable"

    def _read(self, file: str) -> Mapping[str, ast.stmt]:
        return names_of(ast.parse(self._zip.read(file)).body)


def names_of(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Names that statements bind, in any branch of their conditions."""
    return {name: statement for statement in body for name, statement in _bound(statement)}


def _bound(statement: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name, statement
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name.split(".")[0], statement
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            for inner in ast.walk(target):
                if isinstance(inner, ast.Name):
                    yield inner.id, statement
    elif isinstance(statement, ast.If | ast.Try | ast.With):
        for inner in ast.walk(statement):
            if isinstance(inner, ast.stmt) and inner is not statement:
                yield from _bound(inner) if not isinstance(inner, ast.If | ast.Try | ast.With) else ()
