"""Presets: named pipelines, one for each way to train in parallel, and which of them a graph asks for.

`auto` looks at what the collectives of a graph carry. Gathered parameters are those of FSDP; gradients that are reduced
in a group of their own are those of DDP, or of HSDP beside FSDP; activations that are gathered, scattered or reduced
are those of tensor parallelism; activations that every rank sends to every other are those of experts.

A preset is made of stages, in the order in which they stand here; every pass of them is known to the symbolic proof.
Left out, since the compiler below does it itself and knows its kernels: fusing and unfusing biases, padding, batching,
and writing into memory that nobody needs (`reuse-buffers`), which would also tie down the order for what runs behind
Weft. Assertions and marks of a profiler are somebody's wish, and stay.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.graph.collective import Collective, collectives
from weft.graph.dag import Dag
from weft.graph.groups import GroupTable
from weft.graph.ops import Kind
from weft.graph.roles import Role, Roles

STAGES: dict[str, str] = {
    # What tracing left behind. First, so that all further passes see a smaller graph, and products beside collectives.
    "clean": "remove-noops,remove-redundant-casts,cancel-views,cancel-splits-and-cats,dedupe-sizes,remove-dead-code",
    # Arithmetic that gives back what it is given. Exact.
    "algebra": "simplify-arithmetic",
    # Launches that need not be. Exact.
    "communication": "remove-single-rank-collectives,dedupe-collectives",
    # Launches that are one in real arithmetic.
    "sums": "sink-all-reduces,dedupe-reduce-scatters,fuse-scattered-gathers",
    # Products that run while their gather or scatter does.
    "stream": "fuse-all-gather-matmuls{only=activations},fuse-matmul-reduce-scatters{only=activations}",
    # The order of everything, and what is launched as one. Last: it must see what will run.
    "plan": "schedule-overlap",
}
PRESETS: dict[str, str] = {
    "none": "",
    "ddp": "clean,algebra,communication,plan",
    "fsdp": "clean,algebra,communication,sums,plan",
    "hsdp": "clean,algebra,communication,sums,plan",
    # A scatter and the gather behind it may both be streamed; an all-reduce of the two could not.
    "tp": "clean,algebra,communication,stream,plan",
    "fsdp-tp": "clean,algebra,communication,sink-all-reduces,dedupe-reduce-scatters,stream,plan",
    "moe": "clean,algebra,communication,sums,plan",
    # Changes no bit: nothing is reduced in another way, and no product in another shape.
    "exact": "clean,algebra,communication,schedule-overlap{merge=gathers}",
}
AUTO = "auto"
NAMED: dict[str, str] = {**STAGES, **PRESETS, AUTO: AUTO}
"""What may stand for passes in the text of a pipeline."""


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
