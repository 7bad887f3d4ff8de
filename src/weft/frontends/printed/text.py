"""Printed code and its place in a file: lines, syntax tree, source comments, and the errors that point into it.

Contract: the text is parsed by `ast` and no part of it is run. Every fault is a ReadError with the file, the line in
that file, the line itself and what to do.
"""

from __future__ import annotations

import ast
import gzip
import re
import warnings
from pathlib import Path
from typing import IO, NoReturn, cast

from weft.errors import ReadError, compose, point_at
from weft.graph.dag import collector_paused

MAX_CHARACTERS = 1 << 25
"""Longest text that is parsed: about 300 000 nodes. The syntax tree takes 125 times the memory of its text."""
SHOWN = 160
"""Number of characters of a line that an error shows."""
NEWLINE = re.compile(r"\r\n|\r|\n")


class PrintedText:
    """Python-like text that starts at a line of a file."""

    def __init__(self, file: str, text: str, first_line: int = 1, *, advice: str = "") -> None:
        self.file, self.text, self.first_line = file, text, first_line
        self.lines = NEWLINE.split(text)
        self.advice = advice
        """Advice that is added to every error, from a caller that knows more about the file."""

    def fail(self, at: ast.AST | int, what: str, do: str = "", name: str = "") -> NoReturn:
        """Raise the error for a node of the tree or a line of the text."""
        number = at if isinstance(at, int) else getattr(at, "lineno", 1)
        line = self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""
        do = "\n".join(filter(None, [do, self.advice]))
        raise error(self.file, self.first_line + number - 1, what, line, name, do)

    def tree(self) -> ast.Module:
        """The syntax tree. `<lambda>`, a possible class name in printed graphs, is replaced by a name of its length."""
        if len(self.text) > MAX_CHARACTERS:
            self.fail(1, f"the text has {len(self.text)} characters, the limit is {MAX_CHARACTERS}")
        try:
            with warnings.catch_warnings(), collector_paused():
                warnings.simplefilter("ignore")
                return ast.parse(self.text.replace("<lambda>", "_lambda_"))
        except SyntaxError as fault:
            self.fail(fault.lineno or 1, f"not valid Python: {fault.msg}")
        except (ValueError, RecursionError, MemoryError) as fault:
            self.fail(1, f"not valid Python: {type(fault).__name__}: {fault}")

    def only_class(self) -> ast.ClassDef:
        """The class, which must be the only statement of the text."""
        body = self.tree().body
        found = [statement for statement in body if isinstance(statement, ast.ClassDef)]
        other = next((statement for statement in body if statement not in found[:1]), None)
        if not found or other is not None:
            self.fail(other or 1, "expected one class, as torch prints a graph")
        return found[0]

    def stack_traces(self) -> list[str]:
        """For each line: the stack trace in the comment above it, or the empty string."""
        traces: list[str] = []
        current = ""
        for line in self.lines:
            stripped = line.lstrip()
            if stripped.startswith("#"):
                current = stack_trace(stripped)
            traces.append(current)
        return traces


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading bytes; a gzip file is decompressed."""
    with path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path)) if is_packed else path.open("rb")


def stack_trace(comment: str) -> str:
    """The stack trace of `# File: model.py:12 in forward, code: x = f(x)`, or the empty string."""
    _, found, rest = comment.partition("File: ")
    place, has_code, code = rest.partition(", code: ")
    where, _, function = place.rpartition(" in ")
    file, _, number = where.rpartition(":")
    if not found or not has_code or not number.isdecimal():
        return ""
    return f'  File "{file}", line {number}, in {function}\n    {code}\n'


def error(file: str, number: int, what: str, line: str = "", name: str = "", do: str = "") -> ReadError:
    """The error for a line of a file; of a long line it shows the part around `name`."""
    if len(line) > SHOWN:
        start = max(line.find(name) - SHOWN // 2, 0) if name else 0
        line = line[start : start + SHOWN]
    where = point_at(line, name[:SHOWN] or line[:1]) if line else []
    return ReadError(compose(f"{file}:{number}", what[: 3 * SHOWN], where=where, do=do[: 3 * SHOWN]))
