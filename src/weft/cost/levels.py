"""Levels of links: the ranks that each kind of link joins, and the cost of a collective on it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.graph.ops import Kind


@dataclass(frozen=True)
class Link:
    """The cost of one collective at a level."""

    latency_us: float
    hop_us: float
    """Cost of each step around the ring."""
    bandwidth_gbps: float
    by_ranks: tuple[tuple[int, float], ...] = ()
    """Pairs (number of ranks, bandwidth of groups up to that size), ascending; larger groups have `bandwidth_gbps`."""

    def gbps(self, num_ranks: int) -> float:
        """The bandwidth that a group of this size reaches."""
        return next((gbps for limit, gbps in self.by_ranks if num_ranks <= limit), self.bandwidth_gbps)


@dataclass(frozen=True)
class Transport:
    """Copies between the memories of peers, which a kernel or a copy engine makes without NCCL."""

    link: Link
    """Its latency is the time of a barrier between all ranks, and each hop is one copy."""
    sm_share: float = 0.0
    """Share of the multiprocessors that the copies occupy; 0 for copy engines."""
    slowdown: float = 0.0
    """The share by which products of a fused operator slow while its copies run: both need memory and power."""

    def copy_us(self, num_bytes: int, num_ranks: int) -> float:
        """The time of one copy to or from a peer."""
        return self.link.hop_us + num_bytes / (self.link.gbps(num_ranks) * 1e3)


@dataclass(frozen=True)
class Level:
    """Blocks of consecutive ranks joined by one kind of link."""

    name: str
    num_ranks: int
    """Number of ranks in one block."""
    link: Link
    overrides: tuple[tuple[Kind, Link], ...] = ()
    """Links for kinds of collectives that differ from the rest."""
    wire: str = ""
    """`nvlink`, `pci` or `network`, for NCCL's model; empty: nvlink within a node, network between nodes."""
    rails: bool = False
    """Whether a ring that joins blocks of several ranks uses the links of all those ranks at once."""
    min_saturating_bytes: int = 0
    """Messages below this size never saturate the level, however small the group."""
    symmetric: Transport | None = None
    """Copies through symmetric memory; None: the ranks of the level cannot share memory."""

    def link_of(self, kind: Kind) -> Link:
        """The link that collectives of this kind use."""
        return next((link for known, link in self.overrides if known is kind), self.link)
