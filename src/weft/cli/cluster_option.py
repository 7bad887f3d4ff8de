"""`--cluster`: what it names, and whether the graphs fit on it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch.fx import GraphModule

from weft.cli.usage import UsageError
from weft.cost.cluster import Cluster
from weft.errors import ClusterError, compose
from weft.graph.groups import Group, read_groups

LARGE = "h100"
"""The device of the cluster that is proposed where no other is near."""


def load_cluster(name: str) -> Cluster:
    """The cluster of a preset or a file."""
    try:
        return Cluster.load(name)
    except ClusterError:
        if not Path(name).is_dir():
            raise
    raise UsageError(compose(f"cluster {name}", "it is a folder", do="give a TOML file, or a preset: h100-8x8"))


def check_ranks(cluster: Cluster, modules: Iterable[GraphModule]) -> None:
    """Refuse graphs that need more ranks than there are, and name a cluster that has them."""
    groups = [group for module in modules for group in read_groups(module)]
    largest = max(groups, key=_num_spanned, default=None)
    if largest is None or (needed := _num_spanned(largest)) <= cluster.num_ranks:
        return
    what = f"it has {cluster.num_ranks} ranks, group {largest.name!r} needs {needed}"
    do = f"use {_larger(cluster, needed)}, or a graph for at most {cluster.num_ranks} ranks"
    raise ClusterError(compose(f"cluster {cluster.name}", what, do=do))


def _num_spanned(group: Group) -> int:
    """How many ranks a world has at least that has such groups."""
    if group.ranks is not None:
        return max((rank + 1 for part in group.ranks for rank in part), default=0)
    return group.size * group.stride


def _larger(cluster: Cluster, needed: int) -> str:
    """A preset with so many ranks: of the same device, if it can have them."""
    device, size = cluster.name.rpartition("-")[0], cluster.ranks_per_node
    for name in (f"{device}-{-(-needed // size)}x{size}", f"{device}-1x{needed}"):
        try:
            return Cluster.load(name).name
        except ClusterError:
            continue
    return f"another cluster such as {LARGE}-{-(-needed // 8)}x8"
