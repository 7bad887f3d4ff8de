"""Dag: a snapshot of the dependencies and the reachability between the nodes of a graph.

Contract: one dependency model serves every pass. Edges are data edges and effect edges. The issue order of each group
is in `queue` instead, because a pass that decides for all ranks may change it; `keep_issue_order` adds it to the edges.
Nodes are numbered by position. The reachability masks have one bit for each launch and for each node that the caller
registers, never for all nodes: that keeps them nearly linear in size.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections.abc import Generator, Iterable, Sequence

from torch.fx import Graph, Node

from weft.compat import input_nodes
from weft.graph.effects import Effects


@contextlib.contextmanager
def collector_paused() -> Generator[None]:
    """Pause the cyclic garbage collector. Many small lists would trigger it, and it walks all of torch's objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Dag:
    """Integer ids, edges and reachability of a sequence of nodes. It does not follow later edits of the graph."""

    def __init__(
        self, nodes: Graph | Sequence[Node], register: Iterable[Node] = (), *, keep_issue_order: bool = False
    ) -> None:
        with collector_paused():
            self.nodes: list[Node] = list(nodes.nodes) if isinstance(nodes, Graph) else list(nodes)
            self.index: dict[Node, int] = {node: i for i, node in enumerate(self.nodes)}
            self.preds: list[list[int]] = []
            self.succs: list[list[int]] = [[] for _ in self.nodes]
            self._link()
            self.effects = Effects(self.nodes, self.index, self.succs)
            self._add_edges(self.effects.edges())
            if keep_issue_order:
                self._add_edges(self.queue)
        launches = [i for i, profile in self.effects.special if profile.launch]
        bits = sorted({*launches, *(self.index[node] for node in register)})
        self.bits: dict[int, int] = {i: bit for bit, i in enumerate(bits)}

    def _add_edges(self, found: Iterable[tuple[int, int]]) -> None:
        for later, edges in itertools.groupby(found, key=lambda edge: edge[1]):
            known = set(self.preds[later])
            for earlier, _ in edges:
                if earlier not in known:
                    known.add(earlier)
                    self.preds[later].append(earlier)
                    self.succs[earlier].append(later)

    def _link(self) -> None:
        index, preds, succs = self.index, self.preds, self.succs
        for i, node in enumerate(self.nodes):
            mine = [index[source] for source in input_nodes(node)]
            preds.append(mine)
            for j in mine:
                succs[j].append(i)

    @functools.cached_property
    def queue(self) -> list[tuple[int, int]]:
        """Pairs of consecutive launches of one group."""
        return self.effects.issue_order()

    @functools.cached_property
    def before(self) -> list[int]:
        """For each node, the mask of registered nodes that must come before it."""
        return self._masks(self.preds, range(len(self.nodes)))

    @functools.cached_property
    def after(self) -> list[int]:
        """For each node, the mask of registered nodes that must come after it."""
        return self._masks(self.succs, range(len(self.nodes) - 1, -1, -1))

    def _masks(self, neighbours: list[list[int]], order: range) -> list[int]:
        masks = [0] * len(self.nodes)
        bits = {i: 1 << bit for i, bit in self.bits.items()}
        for i in order:
            mask = 0
            for j in neighbours[i]:
                other = masks[j]
                if j in bits:
                    other |= bits[j]
                if other is not mask and other != mask:
                    both = mask | other
                    mask = other if both == other else both  # nodes that see the same registered nodes share one mask
            masks[i] = mask
        return masks

    def reaches(self, first: Node, second: Node) -> bool:
        """Whether `second` must come after `first`; one of the two must be a launch or registered."""
        i, j = self.index[first], self.index[second]
        if i in self.bits:
            return bool(self.before[j] >> self.bits[i] & 1)
        return bool(self.after[i] >> self.bits[j] & 1)
