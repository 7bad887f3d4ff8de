"""Cluster: nodes, ranks and the links between them, as data that anyone can write down.

Levels nest, innermost first: one level joins the ranks of a node, another joins the nodes. A collective runs at the
innermost level that holds each of its groups. Its time is

    latency + hops + bytes on the wire / bandwidth

A ring of n ranks makes n - 1 steps (twice as many for an all-reduce). Each step costs one hop of the level that it
crosses. Each rank sends (n - 1) / n of the full tensor, twice that for an all-reduce, and all of it for a broadcast. If
the cluster describes its GPUs for NCCL, all-gathers, reduce-scatters and all-reduces are priced by NCCL's own model
instead (`communication.py`). A measured table takes precedence over both (`measured_table.py`).

Contract: a cluster is read from a TOML file and nothing else; no device is queried, nothing is executed. All bandwidths
are bytes that one rank sends per second, in 1e9.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from weft.cost.cluster_file import larger, load, read
from weft.cost.communication import KINDS, NETWORK, Crossing, Nccl, nccl_us
from weft.cost.device import UNDESCRIBED, Device
from weft.cost.execution import check_execution
from weft.cost.levels import Level, Transport
from weft.cost.measured_table import Estimate, Table, find_table
from weft.errors import ClusterError, compose, nearest
from weft.graph.groups import Group
from weft.graph.ops import POINT_TO_POINT, Kind

LARGE_BYTES = 1 << 38
"""More bytes than any collective sends."""

_SHARED = frozenset({Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL})
"""Kinds in which a rank does not send its own part of the full tensor."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal size, and the levels of links within and between them."""

    name: str
    num_nodes: int
    ranks_per_node: int
    levels: tuple[Level, ...]
    """Innermost first; the last one holds all ranks."""
    device: Device = UNDESCRIBED
    """The device of every rank."""
    nccl: Nccl | None = None
    tables: tuple[Table, ...] = ()

    @classmethod
    def load(cls, name_or_path: str | Path) -> Cluster:
        """A preset by its name, such as `h100-8x8`, or the cluster that a TOML file describes."""
        return cls(*load(name_or_path))

    @classmethod
    def read(cls, who: str, content: bytes) -> Cluster:
        """The cluster that a file's content describes; errors name it `who`."""
        return cls(*read(who, content))

    def running(self, execution: str) -> Cluster:
        """This cluster with graphs run in another way: `compiled`, `blocks`, `eager` or `cuda-graphs`."""
        check_execution(execution)
        return replace(self, device=replace(self.device, execution=execution))

    def with_attention(self, kernel: str) -> Cluster:
        """This cluster with another attention kernel, such as `flash2` or `cudnn`."""
        known = [each.name for each in self.device.attention]
        if kernel not in known:
            do = nearest(kernel, known) or (f"use one of {', '.join(known)}" if known else "describe it in the cluster")
            what = f"its device has no attention kernel called {kernel!r}"
            raise ClusterError(compose(f"cluster {self.name}", what, do=do))
        return replace(self, device=replace(self.device, attention_kernel=kernel))

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def digest(self) -> str:
        """Equal exactly for equal clusters; part of cache keys."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, default=str).encode()).hexdigest()[:32]

    def check(self, num_ranks: int, who: str = "the mesh") -> None:
        """Raise if more ranks are needed than the cluster has."""
        if num_ranks > self.num_ranks:
            what = f"it has {self.num_ranks} ranks, {who} needs {num_ranks}"
            other = larger(self.name, self.ranks_per_node, num_ranks)
            do = f"use {other}, or a graph for at most {self.num_ranks} ranks"
            raise ClusterError(compose(f"cluster {self.name}", what, do=do))

    def level_of(self, group: Group) -> Level:
        """The innermost level that holds each of the groups; the outermost one if their size is unknown."""
        self.check(_num_spanned(group), f"group {group.name!r}")
        if group.size == 0:
            return self.levels[-1]
        return next(level for level in self.levels if self._num_blocks(group, level) == 1)

    def collective_us(self, kind: Kind, group: Group, num_bytes: int) -> float:
        """Time of one collective alone; `num_bytes` is the size of the full tensor, gathered or not yet scattered."""
        return self.estimate(kind, group, num_bytes).us

    def estimate(self, kind: Kind, group: Group, num_bytes: int) -> Estimate:
        """The same time, with its source: a measured table, NCCL's model, or the links alone."""
        size = self.num_ranks_of(group)
        if size == 1:
            return Estimate(0.0, "links")
        level = self.level_of(group)
        table = find_table(self.tables, kind, size, level.name)
        if table is not None:
            return table.at(num_bytes)
        if self.nccl is not None and kind in KINDS:
            return Estimate(nccl_us(self.nccl, kind, size, self._crossings(kind, group), num_bytes), "nccl")
        bandwidth = level.link_of(kind).gbps(size)
        if level.rails and kind in KINDS:
            bandwidth = min(each.bandwidth_gbps for each in self._crossings(kind, group))
        moving = num_bytes * self._wire_share(kind, group) / (bandwidth * 1e3)
        return Estimate(self._links_us(kind, group) + moving, "links")

    def least_us(self, kind: Kind, group: Group, num_bytes: int) -> float:
        """The least time that these bytes add to a collective of any size: their time at the highest bandwidth."""
        size = self.num_ranks_of(group)
        table = find_table(self.tables, kind, size, self.level_of(group).name) if size > 1 else None
        if table is not None:
            return table.least_us_per_byte * num_bytes
        # The time is the minimum of several lines in the number of bytes, so its slope is smallest for huge messages.
        return self.estimate(kind, group, LARGE_BYTES + num_bytes).us - self.estimate(kind, group, LARGE_BYTES).us

    def latency_us(self, kind: Kind, group: Group) -> float:
        """The time of a collective that sends no bytes."""
        return self.estimate(kind, group, 0).us

    def _links_us(self, kind: Kind, group: Group) -> float:
        """The time of an empty collective by the links alone."""
        size = self.num_ranks_of(group)
        if size == 1:
            return 0.0
        link = self.level_of(group).link_of(kind)
        if kind in POINT_TO_POINT:
            return link.latency_us + link.hop_us
        hops = 0.0
        for level in self.levels:
            outside = self._num_blocks(group, level)
            hops += level.link_of(kind).hop_us * (size - outside)
            size = outside
        return link.latency_us + hops * (2 if kind is Kind.ALL_REDUCE else 1)

    def _crossings(self, kind: Kind, group: Group) -> tuple[Crossing, ...]:
        """The levels that a group crosses, innermost first."""
        found: list[Crossing] = []
        num_ranks = inside = self.num_ranks_of(group)
        for level in self.levels:
            outside = self._num_blocks(group, level)
            if outside < inside:
                wire = level.wire or ("nvlink" if level.num_ranks <= self.ranks_per_node else NETWORK)
                num_rails = num_ranks // inside if level.rails else 1
                bandwidth = level.link_of(kind).gbps(num_ranks) * num_rails
                found.append(Crossing(wire, inside - outside, -(-inside // outside), bandwidth))
            inside = outside
        return tuple(found)

    def saturating_bytes(self, kind: Kind, group: Group, share: float = 0.9) -> int:
        """Size of the full tensor at which a collective reaches this share of its links' bandwidth; 0 for one rank.

        By the links alone: NCCL sends smaller messages faster by other protocols, but these still waste the links.
        """
        if not 0 < share < 1:
            what = f"a share of {share} of the bandwidth is out of range"
            raise ClusterError(compose(f"cluster {self.name}", what, do="use a share between 0 and 1"))
        wire_share = self._wire_share(kind, group)
        if wire_share == 0:
            return 0
        level = self.level_of(group)
        on_wire = self._links_us(kind, group) * level.link_of(kind).bandwidth_gbps * 1e3 * share / (1 - share)
        return max(round(on_wire / wire_share), level.min_saturating_bytes)

    def symmetric(self, group: Group) -> Transport:
        """How a group copies through symmetric memory: as its level says, otherwise at the speed of its links."""
        level = self.level_of(group)
        return level.symmetric or Transport(level.link)

    def copied(self, kind: Kind, group: Group, num_bytes: int) -> Estimate:
        """The time of an all-gather or reduce-scatter by copies through symmetric memory, as `estimate` gives NCCL's.

        Each rank copies a part from or to every peer. A reduce-scatter then sums the parts. The sum needs all
        multiprocessors, so compute beside it loses its whole time; compute beside the copies loses their share.
        """
        size, transport = self.num_ranks_of(group), self.symmetric(group)
        if size == 1:
            return Estimate(0.0, "symmetric")
        part = num_bytes // size
        copying = transport.link.latency_us + (size - 1) * transport.copy_us(part, size)
        summing = (self.device.traffic_ns((size + 1) * part) or 0) / 1000 if kind is Kind.REDUCE_SCATTER else 0.0
        us = copying + summing
        share = (transport.sm_share * copying + summing) / us if us else 0.0
        return Estimate(us, "symmetric", sm_share=share)

    def num_ranks_of(self, group: Group) -> int:
        """Size of the largest of the groups; all ranks if it is unknown."""
        if group.ranks is not None:
            return max(map(len, group.ranks), default=1)
        return group.size or self.num_ranks

    def num_nodes_of(self, group: Group) -> int:
        """The number of nodes that the widest of the groups touches."""
        return self._num_blocks(group, Level("", self.ranks_per_node, self.levels[0].link))

    def sent_bytes(self, kind: Kind, group: Group, num_bytes: int) -> float:
        """The bytes that a rank sends in a ring; `num_bytes` is the size of the full tensor."""
        return num_bytes * self._wire_share(kind, group)

    def _wire_share(self, kind: Kind, group: Group) -> float:
        """The share of the full tensor that a rank sends."""
        size = self.num_ranks_of(group)
        if size == 1 or kind is Kind.BARRIER:
            return 0.0
        if kind is Kind.ALL_REDUCE:
            return 2 * (size - 1) / size
        return (size - 1) / size if kind in _SHARED else 1.0

    def _num_blocks(self, group: Group, level: Level) -> int:
        """Number of blocks of a level that the widest of the groups touches."""
        if level.num_ranks >= self.num_ranks:
            return 1
        if group.ranks is not None:
            return max((len({rank // level.num_ranks for rank in part}) for part in group.ranks), default=1)
        size, stride = (group.size, group.stride) if group.size else (self.num_ranks, 1)
        if size == 1 or level.num_ranks % (size * stride) == 0:
            return 1
        # Tiles of size * stride ranks do not line up with the blocks, so at least one of the groups crosses a border.
        return max(2, size if stride >= level.num_ranks else (size - 1) * stride // level.num_ranks + 1)


ASSUMED_NODES = 8
"""Nodes of eight H100 that `weft.simulate` assumes if no cluster is given."""


def assumed_cluster(groups: Iterable[Group], num_nodes: int = 1) -> Cluster:
    """The cluster if none is given: nodes of eight H100, as many as the groups span and at least `num_nodes`."""
    num_ranks = max(map(_num_spanned, groups), default=1)
    return Cluster.load(f"h100-{max(-(-num_ranks // 8), num_nodes)}x8")


def _num_spanned(group: Group) -> int:
    """The smallest world that contains such groups."""
    if group.ranks is not None:
        return max((rank + 1 for part in group.ranks for rank in part), default=0)
    return group.size * group.stride
