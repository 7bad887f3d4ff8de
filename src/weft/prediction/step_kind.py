"""The kind of parallelism of a step, by what its collectives carry."""

from __future__ import annotations

from collections.abc import Iterable

from weft.graph.collective import collectives
from weft.graph.dag import Dag
from weft.graph.ops import Kind
from weft.graph.roles import Role, Roles


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
    sharded, split = Role.PARAMETERS in roles, Role.ACTIVATIONS in roles
    names = [name for name, is_so in (("fsdp", sharded), ("tp", split)) if is_so]
    return "-".join(names) or ("ddp" if Role.GRADIENTS in roles else "single")
