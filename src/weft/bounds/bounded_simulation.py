"""`weft.simulate`: the timeline of graph modules on a cluster, with its lower bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch.fx import GraphModule

from weft.bounds.lower_bound import lower_bound
from weft.cost.cluster import ASSUMED_NODES, Cluster, assumed_cluster
from weft.errors import GraphError, compose
from weft.graph.groups import read_groups
from weft.simulation.build import sequence_of
from weft.simulation.program import Program
from weft.simulation.simulator import simulate
from weft.simulation.timeline import Timeline


def simulate_modules(
    modules: GraphModule | Sequence[GraphModule],
    cluster: str | Path | Cluster | None = None,
    groups: Mapping[str, int | Sequence[Sequence[int]]] | None = None,
    *,
    bound: bool = False,
    overrides: Mapping[str, float] | None = None,
) -> Timeline:
    """Simulate one graph, or several that run one after the other, on a cluster.

    An output that a later graph takes as an input of the same name stays in memory until then. With `bound`, the lower
    bound is computed now; otherwise on first use. `overrides` maps names of compute nodes and launches to times in
    microseconds, which replace every estimate.
    """
    given = [modules] if isinstance(modules, GraphModule) else list(modules)
    if not given:
        raise GraphError(compose("simulate", "there is no graph to simulate", do="give one graph module or more"))
    tables = [read_groups(module, groups) for module in given]
    if cluster is None:
        cluster = assumed_cluster((group for table in tables for group in table), ASSUMED_NODES)
    described = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)
    program = sequence_of(list(zip(given, tables, strict=True)), described, overrides)
    timeline = replace(simulate(program), find_bound_ns=bound_ns)
    return replace(timeline, lower_bound_ns=bound_ns(program)) if bound else timeline


def bound_ns(program: Program) -> int:
    """The lower bound on the step time of a program, in nanoseconds."""
    return lower_bound(program).bound_ns
