"""Policies: which members a bucket should take. The engine decides, for any policy, which ones it may take.

By size: a bucket closes at a limit, which may differ from bucket to bucket. By module: each module that matches a
pattern gets its own buckets. Explicit: the user pins launches to one bucket, or forbids merging some. By role: only
collectives that carry parameters, or only those that carry gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from torch.fx import Node

from weft.bucketing.eligibility import Key
from weft.cost.cluster import Cluster
from weft.graph.groups import GroupTable
from weft.graph.origins import module_paths
from weft.graph.roles import Role

SHARE = 0.9
"""Share of the asymptotic bandwidth that a full bucket should reach; it sets the default size limit."""


@dataclass(frozen=True)
class Policy:
    """The members that buckets should hold."""

    cap: Callable[[Key, int], int]
    """Size limit in bytes, by key and by the number of the bucket among those of its key."""
    may_overshoot: bool = False
    """Whether a bucket closes after the member that reaches the limit; otherwise before one that would exceed it."""
    role: Role | None = None
    """Take only collectives with this role."""
    replicas: bool = False
    """Leave the groups of tensor parallelism, which carry mostly activations."""
    modules: tuple[str, ...] = ()
    """Patterns of module names. Collectives of a matching module share buckets only with each other."""
    units: Literal["none", "one", "split"] = "none"
    """Merge by unit of FSDP2 (`weft.bucketing.units`), whatever the size, if the graph names modules."""
    pinned: tuple[tuple[str, ...], ...] = ()
    """Launches that form one bucket, regardless of its size."""
    forbidden: frozenset[str] = frozenset()
    """Launches that must not be merged."""
    withheld: Mapping[str, str] = field(default_factory=dict[str, str])
    """Groups, by canonical name, whose launches must not be merged, and why: other ranks would merge differently."""
    prefetch: int = 0
    """Number of buckets by which to launch each bucket earlier."""
    defer: int = 1
    """Number of later buckets that may be launched before the wait for a bucket that is launched at its last member."""

    def module_of(self, node: Node) -> str | None:
        """The outermost matching module that the node belongs to; None if no module matches."""
        for path in module_paths(node) if self.modules else ():
            if any(fnmatchcase(path, pattern) for pattern in self.modules):
                return path
        return None


def cap_from(
    caps: tuple[int, ...], cluster: Cluster, groups: GroupTable, first: int | None = None
) -> Callable[[Key, int], int]:
    """Size limits of the first, second, ... bucket; the last applies to all later ones. Empty: from the cluster."""
    if caps:
        return lambda _, number: caps[min(number, len(caps) - 1)]
    known: dict[Key, int] = {}

    def saturating(key: Key, number: int) -> int:
        if number == 0 and first is not None:
            return first
        if key not in known:
            group = groups.group(key.group)
            known[key] = cluster.saturating_bytes(key.kind, group, SHARE)
        return known[key]

    return saturating
