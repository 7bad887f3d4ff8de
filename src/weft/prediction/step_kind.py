"""The kind of a step: its device, what its collectives carry, what is compiled, and whether the host bounds it."""

from __future__ import annotations

from collections.abc import Iterable

from weft.cost.cluster import Cluster
from weft.graph.collective import collectives
from weft.graph.dag import Dag
from weft.graph.ops import Kind
from weft.graph.roles import Role, Roles
from weft.prediction.error_bars import PLAIN, StepKind, is_host_bound
from weft.simulation.timeline import Timeline


def step_kind(dags: Iterable[Dag], cluster: Cluster, timeline: Timeline) -> StepKind:
    """The kind of captured graphs on a cluster, by their simulation."""
    device = cluster.device
    host_bound = is_host_bound(timeline.host_us, timeline.step_us)
    return StepKind(device.name, parallelism(dags), device.execution or PLAIN, host_bound)


def parallelism(dags: Iterable[Dag]) -> str:
    """`fsdp`, `tp`, `fsdp-tp`, `ep`, `ddp`, or `single` for a step without collectives."""
    roles: set[Role] = set()
    has_exchange = False
    for dag in dags:
        found = Roles(dag)
        for collective in collectives(dag.nodes[0].graph):
            has_exchange |= collective.kind is Kind.ALL_TO_ALL
            roles.add(found.of(collective))
    if has_exchange:
        return "ep"
    names = [name for name, role in (("fsdp", Role.PARAMETERS), ("tp", Role.ACTIVATIONS)) if role in roles]
    return "-".join(names) or ("ddp" if Role.GRADIENTS in roles else "single")
