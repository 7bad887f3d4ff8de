"""Offloading: which values can leave for host memory, and what their copies cost.

Contract: the first sites of a group are offloaded, as many as a choice says. A site qualifies if its value is one dense
tensor that a kernel makes and if it is held unused for longer than both of its copies take. Values of the last layers
are used too soon. Gathered weights do not qualify: their shards are in memory, and gathering them again costs less.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import takewhile

from torch import Tensor

from weft.cost.device import HostMemory
from weft.graph import ops
from weft.graph.metadata import dense_strides
from weft.retention.sites import SiteGroup, Sites
from weft.simulation.program import OpKind


class Offloading:
    """The sites of one graph that can be offloaded to the host memory of one cluster."""

    def __init__(self, sites: Sites, memory: HostMemory) -> None:
        self.sites, self.memory = sites, memory
        self.most = [len(list(takewhile(self.may_leave, group.sites))) if _may(group) else 0 for group in sites.groups]
        """For each group, how many of its first sites can be offloaded."""

    def copy_ns(self, site: int) -> int:
        """The time of one copy of a site, in either direction."""
        return self.memory.copy_ns(self.sites.num_bytes[site])

    def may_leave(self, site: int) -> bool:
        """Whether a site can be offloaded, and is away for long enough."""
        return is_dense_result(self.sites, site) and self._away_ns(site) > 2 * self.copy_ns(site)

    def _away_ns(self, site: int) -> int:
        last, first = self.sites.uses[site]
        return self.sites.elapsed[first] - self.sites.elapsed[last]

    def waits(self, offloaded: frozenset[int]) -> dict[int, int]:
        """For each of these sites the place to wait for its copy: after its last early use, once the copy is over.

        Copies run one after the other, in the order of the graph, next to compute in that order.
        """
        elapsed, free, found = self.sites.elapsed, 0, dict[int, int]()
        for site in sorted(offloaded):
            free = max(free, elapsed[site + 1]) + self.copy_ns(site)
            place = max(self.sites.uses[site][0], bisect_left(elapsed, free))
            found[site] = min(place, self.sites.cut)
        return found


def is_dense_result(sites: Sites, site: int) -> bool:
    """Whether the value of a site is one dense tensor that a kernel makes; a copy keeps its strides."""
    value = ops.value_of(sites.dag.nodes[site])
    is_kernel = sites.program.kinds[site] is OpKind.COMPUTE
    return is_kernel and isinstance(value, Tensor) and tuple(dense_strides(value)) == value.stride()


def _may(group: SiteGroup) -> bool:
    return not (group.is_gathered or group.is_source or group.repeated)
