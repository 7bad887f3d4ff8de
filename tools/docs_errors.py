"""The page of error texts: every message that the code composes, with its advice.

Contract: the source is read, not run. Values that a message fills in are shown as an ellipsis.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "src" / "weft"
GAP = "..."
INTRODUCTION = """\
# Error texts

Made of the code: every error that Weft raises on purpose, as `who: what`, and what it tells you to do. Three dots stand
for what a message fills in. Search this page for words of your message. Symptoms without a message are in
[Debugging](debugging.md).

| error | do | raised in |
|---|---|---|
"""


@dataclass(frozen=True, order=True)
class Message:
    """One error text."""

    who: str
    what: str
    do: str
    module: str


def page() -> str:
    """The page."""
    found = sorted({message for path in sorted(PACKAGE.rglob("*.py")) for message in messages(path)})
    rows = [f"| {_cell(m.who)}: {_cell(m.what)} | {_cell(m.do)} | `{m.module}` |" for m in found]
    return INTRODUCTION + "\n".join([*rows, ""])


def messages(path: Path) -> Iterator[Message]:
    """The messages that a module composes."""
    module = path.relative_to(PACKAGE).as_posix()
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        for call in ast.walk(function):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "compose"):
                continue
            keywords = {keyword.arg: keyword.value for keyword in call.keywords}
            who, what = call.args[:2]
            told = "; or ".join(text.strip() for text in texts(keywords["do"], function)) if "do" in keywords else ""
            for text in texts(what, function):
                if text.replace(GAP, "").strip():
                    yield Message(next(iter(texts(who, function)), GAP) or GAP, text, told, module)


def texts(value: ast.expr, function: ast.FunctionDef) -> list[str]:
    """Possible texts of an expression; a name stands for the values assigned to it in its function."""
    match value:
        case ast.Constant():
            return [str(value.value)]
        case ast.JoinedStr():
            return ["".join(str(v.value) if isinstance(v, ast.Constant) else GAP for v in value.values)]
        case ast.IfExp():
            return [*texts(value.body, function), *texts(value.orelse, function)]
        case ast.BoolOp():
            return [text for part in value.values for text in texts(part, function) if text != GAP]
        case ast.BinOp(op=ast.Add()):
            return ["".join(next(iter(texts(side, function)), GAP) for side in (value.left, value.right))]
        case ast.Name():
            return list(dict.fromkeys(_assigned(value.id, function))) or [GAP]
        case _:
            return [GAP]


def _assigned(name: str, function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else []
        is_it = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if is_it and isinstance(node, ast.Assign) and not _names(node.value, name):
            yield from texts(node.value, function)


def _names(value: ast.expr, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(value))


def _cell(text: str) -> str:
    shown = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_").replace("`", "")
    return shown.replace("\n", " ")
