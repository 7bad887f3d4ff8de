"""The partitioner: under a memory limit, Weft decides what forward saves for backward.

Contract: AOTAutograd hands over the joint graph of forward and backward. `decide-memory` and `schedule-overlap` plan it
as one step within the limit. Then torch cuts it: forward saves the values that backward still reads, and values that
are made again belong to backward. Weft plans both graphs once more, each by itself, when the compiler gets to them.

The limit replaces the marks of activation checkpointing, which FSDP uses too to gather weights again. Torch's min-cut
takes over, with a warning, if nothing fits, if Weft fails, or if torch cannot cut the graph; it obeys the marks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.fx import GraphModule, Node

from weft.compat import compilers as compat
from weft.compat import input_nodes
from weft.cost.execution import is_backward
from weft.frontends.options import Options
from weft.frontends.parts import note_bytes_beside
from weft.frontends.provenance import BACKWARD, FORWARD
from weft.frontends.session import SESSION
from weft.graph.edit import Edit, recompile
from weft.passes.pipeline import Pipeline

PASSES = {
    False: "decide-memory{merge=none},schedule-overlap{merge=none}",
    True: "decide-memory{merge=none offload=true},schedule-overlap{merge=none}",
}
"""The passes for joint graphs, without and with offloading. Buckets would tie forward's collectives to backward's."""
TAG = "partitioner_tag"
"""Key of the tag of a node that belongs to forward or backward."""
MARK = "recompute"
"""Key of the marks of activation checkpointing in the metadata of nodes."""


class Partitioner:
    """Cuts joint graphs for AOTAutograd, so that the step stays within the memory limit of the options."""

    def __init__(self, options: Options, folder: Path | None, *, fuses: bool, inputs: tuple[str, ...] = ()) -> None:
        self.options, self.folder, self.fuses, self.inputs = options, folder, fuses, inputs

    def __call__(
        self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **arguments: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Forward and backward. Ranks take the same cut, since they vote after it: a fault of one rank stops all."""
        arguments["num_fwd_outputs"] = num_fwd_outputs
        parts: list[tuple[GraphModule, GraphModule]] = []

        def cut() -> None:
            for node in joint.graph.nodes:
                node.meta.pop(MARK, None)
            _put_forward_first(joint)
            parts.append(compat.cut_by_order(joint, inputs, **arguments))
            note_bytes_beside(*parts[0], num_fwd_outputs)

        passes = Pipeline.parse(PASSES[self.options.offload]).without(self.options.passes.left_out)
        is_woven = SESSION.weave(
            joint,
            replace(self.options, pipeline=passes),
            self.options.identity,
            self.folder,
            fuses=self.fuses,
            inputs=self.inputs,
            prepare=lambda: _tag(joint, num_fwd_outputs),
            finish=cut,
        )
        return parts[0] if is_woven else compat.cut_for_least_work(joint, inputs, **arguments)

    def uuid(self) -> str:
        """The identity for Inductor's caches."""
        return self.options.identity


def _tag(joint: GraphModule, num_outputs: int) -> None:
    """Tag all nodes as forward or backward; torch tags most of backward alone.

    Forward is traced first. Backward begins with the first call that torch tags or that needs a gradient of an output.
    """
    nodes: list[Node] = list(joint.graph.nodes)
    results: Any = nodes[-1].args[0]
    late: set[Node] = set()
    for node in nodes:
        if is_backward(node) or not late.isdisjoint(input_nodes(node)):
            late.add(node)
    first = next((i for i, node in enumerate(nodes) if node.op == "call_function" and node in late), len(nodes))
    early: set[Node] = {*nodes[:first], *(node for node in results[:num_outputs] if isinstance(node, Node))}
    for node in reversed(nodes):
        if node in early or (node.meta.get(TAG) == FORWARD and node not in late):
            early.add(node)
            early.update(input_nodes(node))
    for node in nodes:
        if node.op == "call_function":
            node.meta[TAG] = FORWARD if node in early else BACKWARD


def _put_forward_first(joint: GraphModule) -> None:
    """Sort the nodes of forward before all others, each part in its order."""
    nodes: list[Node] = list(joint.graph.nodes)
    rank = {"placeholder": 0, "get_attr": 1, "output": 3}
    order = sorted(nodes, key=lambda node: rank.get(node.op, 3 if is_backward(node) else 2))
    with Edit(joint.graph, keep_issue_order=False) as edit:
        edit.arrange(order)
    recompile(joint)


compat.register_partitioner(Partitioner)
