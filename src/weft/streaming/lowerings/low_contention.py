"""Low contention: the collective of a site through symmetric memory, on CUDA, so that products beside it keep the SMs.

Contract: nothing is cut. The launch becomes torch's operator that copies from peer to peer and leaves the processors of
the device alone; what it gives must be waited for, as before. Its products stay as they are.

    symm_mem._low_contention_all_gather(shard, group) -> what was gathered
    symm_mem._low_contention_reduce_scatter(sent, reduce_op, group) -> what the rank receives
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from weft.compat import find_op, has_symmetric_memory, register_operators
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.edit import Edit
from weft.plan.decision import Reason, Refusal
from weft.streaming.chunking import Chunking
from weft.streaming.lowerings.portable import Builder
from weft.streaming.lowerings.protocol import Name

OPERATORS = {
    ops.Kind.ALL_GATHER: "_low_contention_all_gather",
    ops.Kind.REDUCE_SCATTER: "_low_contention_reduce_scatter",
}
REDUCTIONS = ("sum", "avg")


class LowContention:
    """Copies from peer to peer."""

    @property
    def name(self) -> Name:
        return "low-contention"

    def why_not(self, cut: Chunking, *, asked_for: bool) -> Refusal | None:
        """What keeps torch's operators from running a collective."""
        launch, collective = cut.launch, Collective(cut.launch)
        value: Tensor = ops.value_of(launch)
        if value.device.type != "cuda":
            return _refusal(launch, f"{launch.name} is on {value.device.type}, symmetric memory is on cuda")
        if collective.kind not in OPERATORS:
            return _refusal(launch, f"no operator of low contention gives every rank the sum, as {launch.name} does")
        if collective.kind is ops.Kind.REDUCE_SCATTER and collective.reduce_op not in REDUCTIONS:
            what = f"the operator of low contention sums or averages, {launch.name} takes the {collective.reduce_op}"
            return _refusal(launch, what)
        register_operators("symm_mem")
        if find_op("symm_mem", OPERATORS[collective.kind], "default") is None:
            return _refusal(launch, f"this torch has no symm_mem::{OPERATORS[collective.kind]} for {launch.name}")
        if not has_symmetric_memory(collective.group, enabled=not asked_for):
            return _refusal(launch, f"the group of {launch.name} has no symmetric memory here")
        return None

    def build(self, edit: Edit, cut: Chunking) -> dict[Node, Node]:
        """Put torch's operator in the place of a launch."""
        return _Built(edit, cut).build()


def _refusal(launch: Node, sentence: str) -> Refusal:
    return Refusal(Reason.NO_KERNEL, sentence, launch.name)


class _Built(Builder):
    def build(self) -> dict[Node, Node]:
        launch, collective = self.launch, self.collective
        register_operators("symm_mem")
        target = find_op("symm_mem", OPERATORS[collective.kind], "default")
        if target is None:
            raise ValueError(f"{launch.name} was not asked about")
        reduction = [collective.reduce_op] if collective.kind is ops.Kind.REDUCE_SCATTER else []
        args = (collective.inputs[0], *reduction, collective.group)
        name, value = f"{launch.name}_copied", ops.value_of(launch)
        made = self.edit.call(target, args, before=launch, name=name, like=[launch], value=value)
        waits = collective.waits
        self.anchor = next((node for node in self.edit.graph.nodes if node in waits), launch)
        done = self.wait(made)
        for node in (launch, *waits):
            self.edit.erase(node)
        return dict.fromkeys([launch, *waits], done)
