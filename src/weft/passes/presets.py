"""Presets: named pipelines, one for each way to train in parallel, and which of them a graph asks for.

`auto` looks at what the collectives of a graph carry. Gathered parameters are those of FSDP; gradients that are reduced
in a group of their own are those of DDP, or of HSDP beside FSDP; activations that are gathered, scattered or reduced
are those of tensor parallelism; activations that every rank sends to every other are those of experts.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.graph.collective import Collective, collectives
from weft.graph.dag import Dag
from weft.graph.groups import GroupTable
from weft.graph.ops import Kind
from weft.planning.roles import Role, Roles

CLEAN = "remove-dead-code,dedupe-collectives"
STREAM = "fuse-all-gather-matmuls,fuse-matmul-reduce-scatters"
PRESETS: dict[str, str] = {
    "none": "",
    "ddp": f"{CLEAN},schedule-overlap",
    "fsdp": f"{CLEAN},dedupe-reduce-scatters,schedule-overlap",
    "hsdp": f"{CLEAN},dedupe-reduce-scatters,schedule-overlap",
    "tp": f"{CLEAN},{STREAM},schedule-overlap",
    "fsdp-tp": f"{CLEAN},dedupe-reduce-scatters,{STREAM},schedule-overlap",
    "moe": f"{CLEAN},dedupe-reduce-scatters,schedule-overlap",
    # Changes no bit: nothing is reduced in another way, and no product in another shape.
    "exact": f"{CLEAN},schedule-overlap{{merge=gathers}}",
}
AUTO = "auto"


def recognise(dag: Dag, groups: GroupTable) -> str:
    """The preset for the way in which a graph is parallel."""
    roles = Roles(dag)
    found = list(collectives(dag.nodes[0].graph)) if dag.nodes else []
    carried = [(each, roles.of(each)) for each in found]
    active = _groups((each for each, role in carried if role is Role.ACTIVATIONS), groups)
    shards = any(role is Role.PARAMETERS and each.kind is Kind.ALL_GATHER for each, role in carried)
    summed = _groups((e for e, role in carried if role is Role.GRADIENTS and e.kind is Kind.ALL_REDUCE), groups)
    if any(each.kind is Kind.ALL_TO_ALL and role is Role.ACTIVATIONS for each, role in carried):
        return "moe"
    if active:
        return "fsdp-tp" if shards or summed - active else "tp"
    if shards:
        return "hsdp" if summed else "fsdp"
    return "ddp" if found else "none"


def _groups(found: Iterable[Collective], groups: GroupTable) -> set[str]:
    return {groups.canonical(each.group) for each in found}
