"""Bytes between nodes: what the sums of a graph send over the slow links, and what they need.

A sum over two mesh axes needs to send one part of the tensor between nodes if the ranks of a node scatter it first.
All-reduces of the whole tensor send it once for each rank of the node. The passes that rewrite such sums find them.

Contract: the graph does not change. Launches whose size is unknown do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import GraphModule

from weft.cost.cluster import Cluster
from weft.cost.prices import full_bytes
from weft.graph.collective import collectives
from weft.graph.groups import GroupTable, read_groups
from weft.graph.ops import Kind
from weft.passes.pipeline import Pipeline
from weft.quantities import size_text

REWRITES = ("sink-all-reduces", "decompose-mesh-all-reduces{always=true}")
LEAST_BYTES = 1 << 20
"""Fewer bytes than this cost a step little: latency decides which form of a small sum is faster."""


def notes_on_bytes_between_nodes(
    module: GraphModule, cluster: Cluster, groups: Mapping[str, int | Sequence[Sequence[int]]] | None = None
) -> tuple[str, ...]:
    """One sentence for each pass that would reduce the bytes of all-reduces between nodes by a mebibyte or more."""
    if cluster.num_nodes == 1:
        return ()
    moved = _sent_bytes(module, cluster, read_groups(module, groups))
    notes: list[str] = []
    for spec in REWRITES:
        if moved[Kind.ALL_REDUCE] < LEAST_BYTES:
            break
        module = Pipeline.parse(spec).run(module, cluster=cluster, groups=groups).module
        needed = _sent_bytes(module, cluster, read_groups(module, groups))
        all_moved, all_needed = round(sum(moved.values())), round(sum(needed.values()))
        if all_moved - all_needed >= LEAST_BYTES:
            notes.append(
                f"each rank sends {size_text(all_moved)} between nodes, where {size_text(all_needed)} would do: "
                f"all-reduces send whole tensors that the ranks of a node could scatter first; {spec} does so"
            )
        moved = needed
    return tuple(notes)


def _sent_bytes(module: GraphModule, cluster: Cluster, groups: GroupTable) -> dict[Kind, float]:
    """The bytes that leave a node for each of its ranks, by kind: a ring leaves a node once, whatever its size."""
    sent: dict[Kind, float] = dict.fromkeys((Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER), 0.0)
    for each in collectives(module.graph):
        if each.kind not in sent:
            continue
        group, num_bytes = groups.group(each.group), full_bytes(each)
        num_nodes = cluster.num_nodes_of(group)
        if num_nodes > 1 and num_bytes is not None:
            sent[each.kind] += cluster.sent_bytes(each.kind, group, num_bytes) * num_nodes / cluster.num_ranks_of(group)
    return sent
