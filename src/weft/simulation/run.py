"""Modules to a timeline: what `weft.simulate` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch.fx import GraphModule

from weft.bounds.lower_bound import lower_bound
from weft.cost.cluster import Cluster, assumed_cluster
from weft.errors import GraphError, compose
from weft.graph.groups import read_groups
from weft.simulation.build import sequence_of
from weft.simulation.simulator import simulate
from weft.simulation.timeline import Timeline

NUM_NODES = 8
"""Nodes of eight H100 that are assumed where no cluster is given and the groups do not need more."""


def simulate_modules(
    modules: GraphModule | Sequence[GraphModule],
    cluster: str | Path | Cluster | None = None,
    groups: Mapping[str, int | Sequence[Sequence[int]]] | None = None,
    *,
    bound: bool = False,
    overrides: Mapping[str, float] | None = None,
) -> Timeline:
    """When everything of a graph runs on a cluster, or of graphs that run one behind the other.

    What a graph of a sequence takes under the name of an earlier output is held until then. With `bound` the lower
    bound is found now and stands in the timeline, else when it is first asked for. `overrides` are times in
    microseconds by the name of a node, of compute or of a launch's collective: they come before every estimate.
    """
    given = [modules] if isinstance(modules, GraphModule) else list(modules)
    if not given:
        raise GraphError(compose("simulate", "there is no graph to simulate", do="give one graph module or more"))
    tables = [read_groups(module, groups) for module in given]
    if cluster is None:
        cluster = assumed_cluster((group for table in tables for group in table), NUM_NODES)
    described = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)
    program = sequence_of(list(zip(given, tables, strict=True)), described, overrides)
    timeline = simulate(program)
    return replace(timeline, lower_bound_ns=lower_bound(program).bound_ns) if bound else timeline
