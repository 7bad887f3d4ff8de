"""Lend the nodes of a graph the names of an equal graph, so that a plan for that one can be carried out.

Contract: only names change. Afterwards the nodes of the graph have their own names again; new nodes keep the names that
they got, unless one of the graph's own nodes has it.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping

from torch.fx import Graph, Node

from weft.compat import refresh_names
from weft.graph.edit import MEMBERS_KEY
from weft.graph.listings.types import plain_name
from weft.graph.output_names import RESULTS_KEY

_LINE = re.compile(r"^    (?!def |return )(\w+)", re.MULTILINE)
"""The name of a node in the outermost graph of a listing; nested graphs are indented further."""


class LentNames:
    """The names of a listing, lent to a graph with the same nodes."""

    def __init__(self, graph: Graph, lent: Mapping[Node, str]) -> None:
        self.graph, self.own = graph, {node: node.name for node in lent}
        self.back = {name: self.own[node] for node, name in lent.items()}
        """The graph's own names, by the lent ones."""
        for node, name in lent.items():
            node.name = name
        refresh_names(graph)

    def give_back(self) -> None:
        """Give the nodes their own names again, also where metadata of new nodes refers to them."""
        taken = {*self.own.values()}
        for node, name in self.own.items():  # erased ones too: a roll-back may revive them
            node.name = name
        for node in self.graph.nodes:
            if node not in self.own and node.name in taken:
                numbered = (f"{node.name}_{number}" for number in itertools.count(1))
                node.name = next(name for name in numbered if name not in taken)
                taken.add(node.name)
            for key in (MEMBERS_KEY, RESULTS_KEY):
                if key in node.meta:
                    node.meta[key] = tuple(self.back.get(name, name) for name in node.meta[key])
        refresh_names(self.graph)

    def own_name(self, name: str | None) -> str | None:
        """The graph's own name of a node, by its lent one."""
        return self.back.get(name, name) if name is not None else None

    def in_own_names(self, text: str, names: tuple[str, ...]) -> str:
        """A sentence about some nodes, with their own names in place of the lent ones."""
        known = {name: self.back[name] for name in names if name in self.back}
        return re.sub(r"\w+", lambda found: known.get(found[0], found[0]), text) if known else text


def lend_names(graph: Graph, listing: str) -> LentNames | None:
    """Lend a graph the names of a listing; None if it has them already, or not as many nodes."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    others = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    start = listing.find("def graph(")
    head, _, body = listing[start:].partition("\n")
    if start < 0:
        return None
    parsed = ast.walk(ast.parse(f"{head} pass"))
    names = [each.arg for each in parsed if isinstance(each, ast.arg)], _LINE.findall(body)
    if (len(inputs), len(others)) != (len(names[0]), len(names[1])):
        return None
    lent = {node: plain_name(name) for node, name in zip([*inputs, *others], itertools.chain(*names), strict=True)}
    if len({*lent.values()}) < len(lent) or all(node.name == name for node, name in lent.items()):
        return None
    return LentNames(graph, lent)
