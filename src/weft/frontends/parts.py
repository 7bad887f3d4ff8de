"""Memory of forward and backward, once torch has cut their joint graph.

Contract: AOTAutograd frees a saved value after its last use in backward. The graph of backward alone does not show
that, as inputs count to its end. While backward runs, the step also holds the results of forward, and its inputs that
backward does not take.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from weft.cost.cluster import Cluster
from weft.graph import ops
from weft.graph.groups import GroupTable
from weft.retention.out_of_reach import is_saved
from weft.simulation.build import program_of
from weft.simulation.memory import Footprint

BESIDE_KEY = "weft.bytes_beside"
"""In `GraphModule.meta`: bytes that the step holds while this part runs, besides what the graph shows."""


def note_bytes_beside(forward: GraphModule, backward: GraphModule, num_outputs: int) -> None:
    """Record on both parts what the step holds besides them; symbolic sizes leave backward without a record."""
    forward.meta[BESIDE_KEY] = 0
    taken = {node.name for node in backward.graph.nodes if node.op == "placeholder"}
    nodes: list[Node] = list(forward.graph.nodes)
    results: Any = nodes[-1].args[0]
    beside = [*(n for n in nodes if n.op == "placeholder" and n.name not in taken), *results[:num_outputs]]
    values = [ops.value_of(node) for node in beside if isinstance(node, Node)]
    sizes: list[Any] = [value.nbytes for value in values if isinstance(value, Tensor)]
    if all(type(size) is int for size in sizes):
        backward.meta[BESIDE_KEY] = sum(sizes)


def peak_of_part(module: GraphModule, groups: GroupTable, cluster: Cluster) -> int:
    """Peak memory of a part that frees saved values after their last use."""
    program = program_of(module, groups, cluster)
    inputs = (i for i, node in enumerate(module.graph.nodes) if is_saved(node))
    saved = {storage for i in inputs for storage, _ in program.allocates[i]}
    kept = program.kept - (saved - set(program.uses[-1]))
    return Footprint(replace(program, given=program.given - saved, kept=kept)).peak(range(len(program.names)))
