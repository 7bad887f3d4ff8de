"""Kernels: the ways in which a collective and its products can run together.

Contract: a kernel says of a site that has been cut whether it can run it, and if not why; then it builds it. A plan
names the kernel of each site, so that it means the same on every rank.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch.fx import Node

from weft.graph.edit import Edit
from weft.plan.decision import Refusal
from weft.streaming.chunking import Chunking

Name = Literal["portable", "symmetric-memory", "low-contention", "ring"]


class Kernel(Protocol):
    """One way to run a site."""

    @property
    def name(self) -> Name:
        """As in options and plans."""
        ...

    def why_not(self, cut: Chunking, *, asked_for: bool) -> Refusal | None:
        """What keeps it from running a site; None if it can. `asked_for`: by name, so that no more than that counts."""
        ...

    def build(self, edit: Edit, cut: Chunking) -> dict[Node, Node]:
        """Create its nodes and erase those that they stand for; which node takes the place of which."""
        ...
