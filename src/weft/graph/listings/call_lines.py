"""Single lines of listings: the form in which a plan stores the calls that it creates.

    write("h_addmm", op_of("addmm"), (bias, x, w), {})          gives   h_addmm = addmm(bias, x, w)

Contract: a line is data. It is parsed by `ast`; operators, dtypes and the like are looked up in the tables of the
listings; nothing is run. A group is written by a launch that is of it, `group(ag0)`, since its name differs by rank.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from weft.compat import HigherOrderOperator, OpOverload
from weft.errors import PlanError, compose, nearest
from weft.graph import ops
from weft.graph.groups import group_argument
from weft.graph.listings.literals import LiteralReader, dotted
from weft.graph.listings.types import listed_name, plain_name, torch_literal
from weft.graph.operator_effects import profile

LARGEST_NUMBER = 1 << 53


@dataclass(frozen=True)
class GroupOf:
    """The group of a launch, as an argument of another."""

    launch: Any


@dataclass(frozen=True)
class Line:
    """A planned call."""

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def write(name: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The line of a call. Anything with a name is a node. None if an argument has no text, such as a symbolic size."""
    try:
        parts = [_text(a) for a in args] + [f"{key}={_text(value)}" for key, value in kwargs.items()]
    except ValueError:
        return None
    return f"{listed_name(name)} = {ops.name_of(target)}({', '.join(parts)})"


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    if (literal := torch_literal(value)) is not None:
        return literal
    if isinstance(value, GroupOf):
        return f"group({_text(value.launch)})"
    if isinstance(value, complex):
        return f"complex({value.real!r}, {value.imag!r})"
    name = getattr(value, "name", None)
    if not isinstance(name, str):
        raise ValueError
    return listed_name(name)


class LineReader(LiteralReader):
    """Reads lines one by one; the nodes that they name are looked up in `nodes`, to which a caller adds new ones."""

    def __init__(self, lines: Sequence[str], nodes: Mapping[str, Node]) -> None:
        super().__init__("\n".join(lines))
        self.nodes = nodes

    def read(self, text: str) -> Line:
        """The call that a line describes. A fault in it is an error."""
        try:
            (statement,) = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise PlanError(compose("plan", f"{text!r} is not a line of a listing")) from None
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        call = statement.value if isinstance(statement, ast.Assign) else None
        if not isinstance(target, ast.Name) or not isinstance(call, ast.Call):
            raise PlanError(compose("plan", f"{text!r} is not a call", do="write name = operator(arguments)"))
        called = str(dotted(call.func))
        op = ops.op_of(called)
        if op is None:
            raise PlanError(compose("plan", f"no operator is called {called!r}", do=nearest(called, ops.op_names())))
        if isinstance(op, HigherOrderOperator) or profile(op).opaque or ops.has_unknown_result(op):
            raise PlanError(compose("plan", f"{called} cannot be created by a plan: its effects are unknown"))
        words = {at.id: plain_name(at.id) for at in ast.walk(call) if isinstance(at, ast.Name)}
        names = {
            word: self.nodes[name] for word, name in words.items() if name in self.nodes and listed_name(name) == word
        }
        args = tuple(self.literal(a, names) for a in call.args)
        if not isinstance(op, OpOverload) and not _is_harmless(called, args):
            raise PlanError(compose("plan", f"{text!r} is not arithmetic on numbers of the graph"))
        return Line(plain_name(target.id), op, args, self.keywords(call, (), names=names))

    def _literal_call(self, at: ast.Call, names: Mapping[str, Node] | None) -> Any:
        if dotted(at.func) == "group" and len(at.args) == 1:
            return group_argument(self.literal(at.args[0], names))
        return super()._literal_call(at, names)


def _is_harmless(called: str, args: Sequence[Any]) -> bool:
    """Whether a Python function takes nodes and small numbers only. It is then safe to call for its type."""
    if called == "torch.sym_sum" and len(args) == 1 and isinstance(args[0], list | tuple):
        args = args[0]
    numbers = all(isinstance(a, Node) or (isinstance(a, int | float) and abs(a) <= LARGEST_NUMBER) for a in args)
    return numbers and any(isinstance(a, Node) for a in args) and called != "operator.pow"
