"""Contraction: which registered nodes have been made one, and what then depends on what.

Contract: merging is incremental and never walks the graph. A block keeps the mask of its members and the mask of what
they need; a question follows the blocks that it touches, so that two blocks which need each other are noticed whatever
the path between them is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.graph.dag import Dag


@dataclass(slots=True, eq=False)
class Supernode:
    """Registered nodes that are one."""

    members: int
    """Mask of the members."""
    before: int
    """Mask of the registered nodes that a member needs by an edge of the graph or a path of edges."""


class Contraction:
    """Blocks of registered nodes of one Dag; a node that was never merged is a block of its own."""

    def __init__(self, dag: Dag) -> None:
        self.dag = dag
        self._nodes = list(dag.bits)
        self._supernodes: dict[int, Supernode] = {}
        self._merged = 0
        """Mask of all members of blocks."""

    def supernode(self, i: int) -> Supernode:
        """The block of a registered node."""
        return self._supernodes.get(i) or Supernode(1 << self.dag.bits[i], self.dag.before[i])

    def before(self, i: int) -> int:
        """The mask of the registered nodes that must come before the block of node i, through other blocks too."""
        block = self.supernode(i)
        return self._closure(block.members, block.before)

    def why_not_merge(self, ids: Iterable[int]) -> int | None:
        """A node among the blocks of `ids` that another of them needs, so that they cannot be one; None if they can."""
        members = before = 0
        for i in ids:
            block = self.supernode(i)
            members |= block.members
            before |= block.before
        needed = before & members or self._closure(members, before) & members
        return self._nodes[needed.bit_length() - 1] if needed else None

    def merge(self, ids: Iterable[int]) -> None:
        """Make one block of the blocks of these nodes."""
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
        """What is needed by way of other blocks: a block that is touched is needed with all that it needs."""
        mask = before
        touched = mask & self._merged & ~members
        while touched:  # the latest first: it needs most of the others
            block = self._supernodes[self._nodes[touched.bit_length() - 1]]
            reached = (block.members | block.before) & ~mask
            mask |= reached
            touched = (touched | reached & self._merged & ~members) & ~block.members
        return mask
