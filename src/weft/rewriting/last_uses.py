"""Live ranges: the last use of the memory that a node holds.

Contract: every user of a node that holds the memory is a use, views included. A launch uses the buffers it sends and
receives until its wait, or until the end of the graph if nothing waits for it. Returned memory is used until the end.
Memory that was handed to another node belongs to both nodes from then on.
"""

from __future__ import annotations

from torch.fx import Node

from weft.graph import ops
from weft.graph.dag import Dag

COPY = ops.op_of("copy_")


class LastUses:
    """The uses of each storage of a graph."""

    def __init__(self, dag: Dag) -> None:
        self.dag = dag
        self._parents: dict[int, int] = {}
        self._uses: dict[int, dict[int, int]] = {}
        """By storage: each user and the position of the end of its use."""
        self.given: set[int] = set()
        """Storages of inputs and constants."""
        end = len(dag.nodes)
        for i, node in enumerate(dag.nodes):
            held = dag.effects.held(i)
            for storage in held:
                uses = self._uses.setdefault(storage, {})
                uses.update((dag.index[user], dag.index[user]) for user in node.users)
            if node.op in ("placeholder", "get_attr"):
                self.given.update(held)
        for flight in dag.effects.flights:
            until = end if flight.wait is None else flight.wait
            for storage in map(dag.effects.find, {*flight.reads, *flight.writes}):
                uses = self._uses.setdefault(storage, {})
                uses[flight.launch] = max(uses.get(flight.launch, 0), until)

    def held(self, node: Node) -> frozenset[int]:
        """The storages that a node holds, after hand-overs."""
        return frozenset(map(self._find, self.dag.effects.held(self.dag.index[node])))

    def _find(self, storage: int) -> int:
        while storage in self._parents:
            storage = self._parents[storage]
        return storage

    def first_use_after(self, node: Node, source: Node, but: Node | None = None) -> Node | None:
        """The first user of the memory of `source` after `node`, apart from `but`, or None."""
        place = self.dag.index[node]
        skipped = {place} if but is None else {place, self.dag.index[but]}
        uses = {user: end for storage in self.held(source) for user, end in self._uses.get(storage, {}).items()}
        late = [user for user, end in uses.items() if end >= place and user not in skipped]
        return self.dag.nodes[min(late)] if late else None

    def give(self, source: Node, node: Node) -> None:
        """Hand the memory of a source over to a node."""
        (old,), (new,) = self.held(source), self.held(node)
        self._parents[new] = old
        self._uses[old] = {**self._uses.get(old, {}), **self._uses.pop(new, {})}
        self.given |= {old} if new in self.given else set()


def copied_back(uses: LastUses, node: Node, source: Node) -> Node | None:
    """The node that copies a result back into the input it was made from."""
    if not uses.held(source) & uses.given:
        return None
    for user in node.users:
        given = ops.bind(user) if user.target is COPY else {}
        if given.get("src") is node and given["self"] is source and source.op == "placeholder":
            return user
    return None
