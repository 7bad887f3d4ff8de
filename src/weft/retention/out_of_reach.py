"""The values between forward and backward that no choice reaches, because the graph holds only one of the two.

Contract: a compiler that cuts the step before Weft sees it has decided what forward saves. Forward still returns these
values, and backward holds them as inputs, whatever Weft decides about values that are made and used inside the part.
"""

from __future__ import annotations

import re

from torch.fx import Graph, Node

from weft.cost.execution import is_backward
from weft.graph.origins import PHASE_KEY
from weft.quantities import size_text
from weft.simulation.program import Program

_NOT_SAVED = re.compile(r"(primals|tangents)(_\d+)?")
"""AOTAutograd's names for inputs that exist anyway: the inputs of the step, and the gradients of its outputs."""


def is_saved(node: Node) -> bool:
    """Whether a node of backward is a value that forward saved."""
    return node.op == "placeholder" and _NOT_SAVED.fullmatch(node.name) is None


def out_of_reach(graph: Graph, program: Program) -> str | None:
    """One sentence about these values; None if the graph holds forward and backward, or if there are none."""
    nodes = list(graph.nodes)
    calls = [node for node in nodes if node.op == "call_function"]
    phase = graph.owning_module.meta.get(PHASE_KEY) if graph.owning_module is not None else None
    if phase is None and calls and all(map(is_backward, calls)):
        phase = "backward"
    if phase == "forward":
        wanted = set(program.kept) - set(program.given)
        told = "the graph is forward alone: that it returns {} values, {}, to backward or the caller is already decided"
    elif phase == "backward":
        inputs = (i for i, node in enumerate(nodes) if is_saved(node))
        wanted = {storage for i in inputs for storage, _ in program.allocates[i]}
        told = "the graph is backward alone: that it gets {} values, {}, from forward is already decided"
    else:
        return None
    num_bytes = sum(size for made in program.allocates for storage, size in made if storage in wanted)
    return told.format(len(wanted), size_text(num_bytes)) if wanted else None
