"""The interface of a lowering: one way to run a collective and its products together.

Contract: a lowering first says whether it can run a site that has been split into chunks, and if not, why. Then it
builds the nodes. A plan names the lowering of each site under `kernel`, so the plan means the same on every rank.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch.fx import Node

from weft.graph.edit import Edit
from weft.plan.decision import Refusal
from weft.streaming.chunking import Chunking

Name = Literal["portable", "symmetric-memory", "low-contention", "ring"]


class Lowering(Protocol):
    """One way to run a streamed site."""

    @property
    def name(self) -> Name:
        """The value of the option `kernel` in passes and plans."""
        ...

    def fit(self, cut: Chunking) -> Chunking:
        """The part of a site that this lowering can run. The other products wait for the whole gathered tensor."""
        ...

    def why_not(self, cut: Chunking, unshared: Refusal | None) -> Refusal | None:
        """Why this lowering cannot run a site; None if it can. `unshared`: why its ranks do not share memory."""
        ...

    def build(self, edit: Edit, cut: Chunking) -> dict[Node, Node]:
        """Create the new nodes and erase the old ones. Returns the replacement of each old result."""
        ...
