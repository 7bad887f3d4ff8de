"""Prices: how long every node of a graph takes on a cluster. The simulator, the planner and the bounds use them.

Contract: whole nanoseconds; one pass over the graph; sizes by hint. Node names matter only for `overrides`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from torch.fx import Node

from weft.cost.cluster import Cluster
from weft.cost.compute import compute
from weft.cost.fused import fused_shape
from weft.cost.measured_table import Estimate
from weft.errors import ClusterError, compose, nearest
from weft.graph import ops
from weft.graph.assumed_sizes import bytes_of
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.groups import Group, GroupTable, group_argument
from weft.graph.ops import Kind


@dataclass(frozen=True)
class Prices:
    """Times of the nodes of one Dag, by index."""

    compute_ns: tuple[int, ...]
    """Time of every node on the compute stream; 0 for launches, waits, views and inputs."""
    collective_ns: dict[int, int]
    """Time of every launch's collective if alone on its link."""
    level: dict[int, str]
    """The level of a launch's group; collectives of one level share its links."""
    flops: int
    """Total of all products, to report the share of the peak that a step reaches."""
    regions: tuple[int, ...] = ()
    """The first node of the kernel that a node belongs to; each kernel has one launch gap. -1: no kernel."""
    extrapolated: frozenset[int] = frozenset()
    """Launches priced by a measured table outside its range."""
    unknown: frozenset[int] = frozenset()
    """Nodes priced too low: only the latency of a launch, only the traffic of a product, or 0 is known."""
    sm_share: dict[int, float] = field(default_factory=dict[int, float])
    """The share of the multiprocessors that launches of copies take from compute, if they take any."""
    workspaces: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of the symmetric memory of each group that uses any: what its largest operator needs."""
    sources: dict[int, str] = field(default_factory=dict[int, str])
    """The source of a launch's price: `links`, `nccl`, `table`, `symmetric` or `override`."""
    host_ns: tuple[int, ...] = ()
    """Time that the host takes to issue each node; empty: none."""
    inner: frozenset[int] = frozenset()
    """Nodes whose result takes no memory: it exists only inside a fused kernel."""


def price(dag: Dag, groups: GroupTable, cluster: Cluster, overrides: Mapping[str, float] | None = None) -> Prices:
    """Price a graph; `overrides` maps node names to times in microseconds."""
    found = compute(dag, cluster.device)
    given = _given_ns(dag, overrides or {})
    compute_ns, unknown = list(found.ns), set(found.unknown)
    launches = price_launches(dag, groups, cluster)
    unknown |= launches.unknown
    for i, ns in given.items():
        if i in launches.ns:
            launches.ns[i], launches.sources[i] = ns, "override"
        else:
            compute_ns[i] = ns
    known = given.keys()
    return Prices(
        tuple(compute_ns),
        launches.ns,
        launches.levels,
        sum(found.flops),
        found.regions,
        frozenset(launches.extrapolated - known),
        frozenset(unknown - known),
        launches.sm_share,
        launches.workspaces,
        launches.sources,
        found.host_ns,
        found.inner,
    )


def price_launches(dag: Dag, groups: GroupTable, cluster: Cluster) -> LaunchPrices:
    """Price the launches of a graph. Raises if the cluster cannot run them."""
    found = LaunchPrices(groups, cluster)
    for i, profile in dag.effects.special:
        if profile.launch:
            found.add(dag, i)
        elif profile.host_copy:
            found.add_copy(dag.nodes[i], i)
    return found


class LaunchPrices:
    """Prices launches; equal ones are estimated once."""

    def __init__(self, groups: GroupTable, cluster: Cluster) -> None:
        self.groups, self.cluster = groups, cluster
        self.ns: dict[int, int] = {}
        self.levels: dict[int, str] = {}
        self.sources: dict[int, str] = {}
        self.sm_share: dict[int, float] = {}
        self.workspaces: dict[str, int] = {}
        self.extrapolated: set[int] = set()
        self.unknown: set[int] = set()
        self.known: dict[tuple[Kind, str, int, bool], tuple[Estimate, str]] = {}

    def add(self, dag: Dag, i: int) -> None:
        node = dag.nodes[i]
        argument = group_argument(node)
        group = self.groups.group(argument) if argument is not None else Group("", 0)
        if ops.is_fused(node.target) and self._add_fused(node, i, group):
            return
        kind, num_bytes, form = ops.kind_of(node.target) or Kind.BARRIER, None, ops.launch_form(node.target)
        if form is not None:
            num_bytes = full_bytes(Collective(node))
        if num_bytes is None:
            self.unknown.add(i)
        copied = form is not None and form.copied
        key = (kind, group.name, num_bytes or 0, copied)
        if key not in self.known:
            estimate = self.cluster.copied if copied else self.cluster.estimate
            self.known[key] = estimate(kind, group, num_bytes or 0), self.cluster.level_of(group).name
        estimate, self.levels[i] = self.known[key]
        self.ns[i], self.sources[i] = ceil(estimate.us * 1000), estimate.source
        if estimate.extrapolated:
            self.extrapolated.add(i)
        if copied and num_bytes:
            num_parts = self.cluster.num_ranks_of(group) if kind is Kind.ALL_GATHER else 1
            self._use_workspace(group, num_bytes // num_parts)
        if estimate.sm_share:
            self.sm_share[i] = estimate.sm_share

    def add_copy(self, node: Node, i: int) -> None:
        """Price a copy to or from host memory."""
        memory, copy, num_bytes = (
            self.cluster.device.host_memory,
            ops.host_copy(node.target),
            bytes_of(ops.value_of(node)),
        )
        if memory is None or copy is None:
            what = f"{node.name} copies between device and host memory, and the device states no host memory"
            raise ClusterError(compose(f"cluster {self.cluster.name}", what, do="add a section [device.host_memory]"))
        if num_bytes is None:
            self.unknown.add(i)
        self.ns[i], self.levels[i], self.sources[i] = memory.copy_ns(num_bytes or 0), copy.value, "links"

    def _use_workspace(self, group: Group, num_bytes: int) -> None:
        name = self.groups.canonical(group.name)
        self.workspaces[name] = max(num_bytes, self.workspaces.get(name, 0))

    def _add_fused(self, node: Node, i: int, group: Group) -> bool:
        """Price an operator that multiplies while it communicates. Returns whether its sizes are known."""
        num_ranks = self.cluster.num_ranks_of(group)
        shape = fused_shape(node, num_ranks)
        if shape is None:
            return False
        self._use_workspace(group, shape.workspace_bytes)
        self.levels[i], self.sources[i] = self.cluster.level_of(group).name, "symmetric"
        self.ns[i] = shape.ns(num_ranks, self.cluster.symmetric(group), self.cluster.device)
        return True


def full_bytes(collective: Collective) -> int | None:
    """Bytes of the full tensor of a collective, gathered or not yet scattered, as `Cluster.collective_us` takes them.

    For a batch of point-to-point transfers and an all-to-all, the larger of the two directions: wires carry both at
    once.
    """
    if collective.kind is Kind.BATCH_P2P:
        both, received = _total_bytes(map(ops.value_of, collective.inputs)), _received_bytes(collective)
        return None if both is None or received is None else max(received, both - received)
    if collective.kind is Kind.ALL_TO_ALL:
        both = _total_bytes(map(ops.value_of, collective.inputs)), _received_bytes(collective)
        return max((known for known in both if known is not None), default=None)
    is_gather = collective.kind is Kind.ALL_GATHER
    return _received_bytes(collective) if is_gather else _total_bytes(map(ops.value_of, collective.inputs))


def _received_bytes(collective: Collective) -> int | None:
    value = ops.value_of(collective.launch)
    return _total_bytes(value if isinstance(value, list | tuple) else [value])


def _total_bytes(values: Iterable[Any]) -> int | None:
    sizes = [bytes_of(value) for value in values]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _given_ns(dag: Dag, overrides: Mapping[str, float]) -> dict[int, int]:
    names = {node.name: i for i, node in enumerate(dag.nodes)} if overrides else {}
    faults = [f"{name}: no node has this name; {nearest(name, names)}" for name in overrides if name not in names]
    faults += [f"{name}: expected a time of 0 us or more, found {us}" for name, us in overrides.items() if not us >= 0]
    if faults:
        raise ClusterError(compose("prices", "overrides do not fit the graph", where=[f.rstrip("; ") for f in faults]))
    return {names[name]: round(us * 1000) for name, us in overrides.items()}
