"""Planned calls, and arguments that may refer to planned calls and to nodes of the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from weft.graph import ops


@dataclass(eq=False, slots=True)
class New:
    """A planned call, with the same attributes as a node."""

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    position: int
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    op: str = "call_function"

    def __repr__(self) -> str:
        return self.name


AnyNode = Node | New


def op_word(op: Any) -> str:
    """The operator's name as part of an identifier."""
    return str(ops.name_of(op)).rpartition("::")[2].split(".")[0].strip("_")


def sources(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[AnyNode]:
    """The nodes among arguments, in order, each once.

    The launch in a `GroupOf` is not one of them: it only names the group, and may be removed.
    """
    found: dict[AnyNode, None] = {}
    stack: list[Any] = [kwargs, args]
    while stack:
        item = stack.pop()
        if isinstance(item, New | Node):
            found[item] = None
        elif isinstance(item, Mapping):
            stack += reversed(list(item.values()))
        elif isinstance(item, list | tuple):
            stack += reversed(item)
    return list(found)


def swapped(item: Any, replacements: Mapping[AnyNode, AnyNode]) -> Any:
    """Arguments with nodes replaced; a replacement that is itself replaced is followed to the last one."""
    if isinstance(item, New | Node):
        while item in replacements:
            item = replacements[item]
        return item
    if isinstance(item, Mapping):
        return {key: swapped(value, replacements) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(swapped(i, replacements) for i in item) if not hasattr(item, "_fields") else item
    return item
