"""The names that results of a graph have for the graph behind it.

A backward graph takes what its forward graph saved under the names of nodes there. Where a rewrite lets another node
stand for such a result, that node is known by the old name too.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

RESULTS_KEY = "weft.results"
"""In `Node.meta`: the names of results that the node stands for."""


def note_results(before: Any, after: Any) -> None:
    """Note which node stands for which, by what a graph returned and what it returns now."""
    sides: tuple[list[Node], list[Node]] = [], []
    for found, returned in zip(sides, (before, after), strict=True):
        map_arg(returned, found.append)
    if len(sides[0]) != len(sides[1]):  # the graph returns something else now
        return
    for old, new in zip(*sides, strict=True):
        if old is not new:
            new.meta[RESULTS_KEY] = tuple(dict.fromkeys((*result_names(new), *result_names(old))))[1:]


def result_names(node: Node) -> tuple[str, ...]:
    """The name of a node, and those of the results that it stands for."""
    return (node.name, *node.meta.get(RESULTS_KEY, ()))
