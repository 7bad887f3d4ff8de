"""Contraction: merges registered nodes of a Dag into supernodes and tracks the dependencies between these.

Contract: merging is incremental and never walks the graph. A supernode keeps the mask of its members and the mask of
the nodes that they need. A query follows all supernodes on the way, so it finds two supernodes that need each other
even if the path between them leads through others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.graph.dag import Dag


@dataclass(slots=True, eq=False)
class Supernode:
    """Registered nodes that were merged."""

    members: int
    """Mask of the members."""
    before: int
    """Mask of the registered nodes that some member needs, directly or through other nodes of the graph."""


class Contraction:
    """The supernodes of one Dag. A node that was never merged is a supernode of its own."""

    def __init__(self, dag: Dag) -> None:
        self.dag = dag
        self._nodes = list(dag.bits)
        self._supernodes: dict[int, Supernode] = {}
        self._merged = 0
        """Mask of all merged nodes."""

    def supernode(self, i: int) -> Supernode:
        """The supernode of a registered node."""
        return self._supernodes.get(i) or Supernode(1 << self.dag.bits[i], self.dag.before[i])

    def before(self, i: int) -> int:
        """The mask of the registered nodes that the supernode of node i needs, also through other supernodes."""
        block = self.supernode(i)
        return self._closure(block.members, block.before)

    def why_not_merge(self, ids: Iterable[int]) -> int | None:
        """A member that another of these supernodes needs, which prevents the merge; None if they can be merged."""
        members = before = 0
        for i in ids:
            block = self.supernode(i)
            members |= block.members
            before |= block.before
        needed = before & members or self._closure(members, before) & members
        return self._nodes[needed.bit_length() - 1] if needed else None

    def merge(self, ids: Iterable[int]) -> None:
        """Merge the supernodes of these nodes."""
        ids = list(ids)
        known = list({id(block): block for i in ids if (block := self._supernodes.get(i))}.values())
        parts = [self.supernode(i) for i in ids]
        merged = known[0] if known else Supernode(0, 0)
        for block in parts:
            merged.members |= block.members
            merged.before |= block.before
        for i in ids:
            self._supernodes[i] = merged
        self._merged |= merged.members
        for block in known[1:]:
            self._supernodes |= {i: merged for i, other in self._supernodes.items() if other is block}

    def _closure(self, members: int, before: int) -> int:
        """All nodes needed, also through other supernodes: needing one member means needing the whole supernode."""
        mask = before
        touched = mask & self._merged & ~members
        while touched:  # the latest first: it usually needs most of the others, which ends the loop early
            block = self._supernodes[self._nodes[touched.bit_length() - 1]]
            reached = (block.members | block.before) & ~mask
            mask |= reached
            touched = (touched | reached & self._merged & ~members) & ~block.members
        return mask
