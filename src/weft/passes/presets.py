"""Presets: named pipelines, one for each kind of parallelism, and how `auto` chooses among them.

`auto` looks at the data that the collectives of a graph carry. Gathered parameters mean FSDP. Gradients all-reduced in
a group of their own mean DDP, or HSDP if there are gathered parameters too. Gathered, scattered or reduced activations
mean tensor parallelism. Activations in an all-to-all mean experts.

A preset consists of stages, in the order of `STAGES`; the symbolic proof knows every pass in them. Presets leave out
what a compiler does better because it knows its kernels: fusing and unfusing biases, padding, batching, and reusing
buffers, whose writes would also restrict later reordering. Assertions and profiler marks stay, since someone put them
there on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.graph.collective import Collective, collectives
from weft.graph.dag import Dag
from weft.graph.groups import GroupTable
from weft.graph.ops import Kind
from weft.graph.roles import Role, Roles

STAGES: dict[str, str] = {
    # Remove leftovers of tracing. First, so that later passes see a smaller graph, and matmuls next to collectives.
    "clean": "remove-noops,remove-redundant-casts,cancel-views,cancel-splits-and-cats,dedupe-sizes,remove-dead-code",
    # Remove arithmetic that returns its input. Exact.
    "algebra": "simplify-arithmetic",
    # Remove unnecessary launches. Exact.
    "communication": "remove-single-rank-collectives,dedupe-collectives",
    # Communication over several mesh axes: send parts instead of whole tensors over slow links.
    "axes": "sink-all-reduces,decompose-mesh-all-reduces,decompose-mesh-all-gathers,decompose-mesh-reduce-scatters",
    # Merge launches that are equivalent in real arithmetic.
    "sums": "dedupe-reduce-scatters,fuse-scattered-gathers",
    # Overlap matmuls with their own gather or scatter.
    "stream": "fuse-all-gather-matmuls{only=activations},fuse-matmul-reduce-scatters{only=activations}",
    # Run gathers and scatters as copies through symmetric memory. After `stream`, which takes those next to matmuls.
    "copy": "copy-collectives{only=enabled}",
    # Choose the order of all nodes, and the buckets. Last: it must see the final nodes.
    "plan": "schedule-overlap",
}
PRESETS: dict[str, str] = {
    "none": "",
    "ddp": "clean,algebra,communication,axes,copy,plan",
    "fsdp": "clean,algebra,communication,axes,sums,copy,plan",
    "hsdp": "clean,algebra,communication,axes,sums,copy,plan",
    # Without `sums`: a scatter and the gather after it can both be streamed; an all-reduce in their place could not.
    "tp": "clean,algebra,communication,stream,copy,plan",
    "fsdp-tp": "clean,algebra,communication,axes,dedupe-reduce-scatters,stream,copy,plan",
    # Sizes of exchanges that the data decides are read with one copy.
    "moe": "clean,algebra,communication,axes,sums,batch-host-reads,copy,plan",
    # Bitwise exact: no reduction in another order, no matmul of another shape.
    "exact": "clean,algebra,communication,schedule-overlap{merge=gathers}",
}
AUTO = "auto"
NAMED: dict[str, str] = {**STAGES, **PRESETS, AUTO: AUTO}
"""The names of stages and presets, which a pipeline's text may use in place of passes."""


def recognise(dag: Dag, groups: GroupTable) -> str:
    """The preset for a graph's kind of parallelism."""
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
