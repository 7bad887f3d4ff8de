"""The inputs of a printed `forward`, in the three forms that torch prints.

def forward(self, x: "f32[2]", y: "f32[2]"):         one parameter each

def forward(self, primals, tangents):                trees that are flattened first
    x: "f32[2]"
    y: "f32[2]"
    x, y, = fx_pytree.tree_flatten_spec([primals, tangents], self._in_spec)

def forward(self, args_list):                        a list that is emptied first
    args_iter = iter(args_list)
    x = next(args_iter)
    y = next(args_iter)
    args_list.clear()
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

from weft.frontends.printed.text import PrintedText
from weft.graph.listings.literals import dotted


class Input(NamedTuple):
    """An input of a graph: its name, its place in the text, and its printed type, if any."""

    name: str
    at: ast.AST
    annotation: ast.expr | None


def inputs_of(text: PrintedText, at: ast.FunctionDef) -> tuple[list[Input], Sequence[ast.stmt]]:
    """The inputs of a function, and the statements that follow those that unpack them."""
    arguments = at.args
    plain = not (arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg)
    if not plain or arguments.defaults or at.decorator_list or not arguments.args or arguments.args[0].arg != "self":
        text.fail(at, "expected `def forward(self, ...)` with plain parameters", name=at.name)
    return _flattened(text, at) or _emptied(at) or _parameters(at)


def _parameters(at: ast.FunctionDef) -> tuple[list[Input], Sequence[ast.stmt]]:
    found = {a.arg: Input(a.arg, a, a.annotation) for a in at.args.args[1:]}
    for count, statement in enumerate(at.body):
        renamed = _renamed(statement)
        if renamed is None or renamed[1] not in found:
            return list(found.values()), at.body[count:]
        found[renamed[1]] = found[renamed[1]]._replace(name=renamed[0])
    return list(found.values()), []


def _renamed(at: ast.stmt) -> tuple[str, str] | None:
    """The new and the old name in `l_x_ = L_x_`, by which a graph renames a parameter."""
    if not isinstance(at, ast.Assign) or len(at.targets) != 1:
        return None
    target, value = at.targets[0], at.value
    return (target.id, value.id) if isinstance(target, ast.Name) and isinstance(value, ast.Name) else None


def _flattened(text: PrintedText, at: ast.FunctionDef) -> tuple[list[Input], Sequence[ast.stmt]] | None:
    annotations: dict[str, ast.expr] = {}
    for count, statement in enumerate(at.body):
        if isinstance(statement, ast.AnnAssign) and statement.value is None and isinstance(statement.target, ast.Name):
            annotations[statement.target.id] = statement.annotation
            continue
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            return None
        target = statement.targets[0]
        if dotted(statement.value.func) != "fx_pytree.tree_flatten_spec" or not isinstance(target, ast.Tuple):
            return None
        found = [
            Input(name.id, statement, annotations.pop(name.id, None))
            for name in target.elts
            if isinstance(name, ast.Name)
        ]
        if annotations or len(found) < len(target.elts):
            text.fail(statement, "the flattened inputs are not the same as the inputs with types")
        return found, at.body[count + 1 :]
    return None


def _emptied(at: ast.FunctionDef) -> tuple[list[Input], Sequence[ast.stmt]] | None:
    if len(at.args.args) != 2 or not at.body or not _is_call(at.body[0], "args_iter", "iter"):
        return None
    found: list[Input] = []
    for count, statement in enumerate(at.body[1:], 2):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(target, ast.Name) and _is_call(statement, target.id, "next"):
            found.append(Input(target.id, statement, None))
            continue
        call = statement.value if isinstance(statement, ast.Expr) else None
        is_end = isinstance(call, ast.Call) and dotted(call.func) == "args_list.clear"
        return (found, at.body[count:]) if is_end else None
    return None


def _is_call(at: ast.stmt, target: str, function: str) -> bool:
    if not isinstance(at, ast.Assign) or not isinstance(at.value, ast.Call):
        return False
    return ast.unparse(at.targets[0]) == target and dotted(at.value.func) == function
