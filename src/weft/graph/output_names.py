"""The names by which a backward graph knows the results of its forward graph.

A backward graph names its inputs after the nodes that the forward graph saved. If a rewrite replaces such a node, the
replacement keeps the old name as an alias.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

RESULTS_KEY = "weft.results"
"""In `Node.meta`: the names of the results that the node replaces."""


def note_results(before: Any, after: Any) -> None:
    """Record which node replaces which, by comparing the results of a graph before and after."""
    sides: tuple[list[Node], list[Node]] = [], []
    for found, returned in zip(sides, (before, after), strict=True):
        map_arg(returned, found.append)
    if len(sides[0]) != len(sides[1]):  # the graph now returns a different structure
        return
    for old, new in zip(*sides, strict=True):
        if old is not new:
            new.meta[RESULTS_KEY] = tuple(dict.fromkeys((*result_names(new), *result_names(old))))[1:]


def result_names(node: Node) -> tuple[str, ...]:
    """The name of a node, and the names of the results that it replaces."""
    return (node.name, *node.meta.get(RESULTS_KEY, ()))
