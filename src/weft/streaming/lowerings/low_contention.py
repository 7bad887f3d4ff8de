"""Low contention: CUDA copies through symmetric memory run the collective, which leaves the SMs to the products.

Contract: nothing is split into chunks. Torch's operator, which copies from peer to peer without using SMs, replaces the
launch. Its result is waited for as before, and the products stay as they are.

    symm_mem._low_contention_all_gather(shard, group) -> the gathered tensor
    symm_mem._low_contention_reduce_scatter(sent, reduce_op, group) -> this rank's result
"""

from __future__ import annotations

from torch.fx import Node

from weft.compat import find_op, register_operators
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.edit import Edit
from weft.plan.decision import Reason, Refusal
from weft.streaming.chunking import Chunking
from weft.streaming.lowerings.portable import ChunkBuilder
from weft.streaming.lowerings.protocol import Name

OPERATORS = {
    ops.Kind.ALL_GATHER: "_low_contention_all_gather",
    ops.Kind.REDUCE_SCATTER: "_low_contention_reduce_scatter",
}
REDUCTIONS = ("sum", "avg")


class LowContention:
    """Run the collective as copies from peer to peer."""

    @property
    def name(self) -> Name:
        return "low-contention"

    def fit(self, cut: Chunking) -> Chunking:
        """The whole site."""
        return cut

    def why_not(self, cut: Chunking, unshared: Refusal | None) -> Refusal | None:
        """Why torch's operators cannot run a collective; None if they can."""
        launch, collective = cut.launch, Collective(cut.launch)
        if collective.kind not in OPERATORS:
            return _refusal(launch, f"{launch.name} is an all-reduce, and torch has no low-contention all-reduce")
        if collective.kind is ops.Kind.REDUCE_SCATTER and collective.reduce_op not in REDUCTIONS:
            what = f"{launch.name} reduces by {collective.reduce_op}, but the low-contention operator sums or averages"
            return _refusal(launch, what)
        register_operators("symm_mem")
        if find_op("symm_mem", OPERATORS[collective.kind], "default") is None:
            return _refusal(launch, f"this torch has no symm_mem::{OPERATORS[collective.kind]} for {launch.name}")
        return unshared

    def build(self, edit: Edit, cut: Chunking) -> dict[Node, Node]:
        """Replace the launch by torch's operator."""
        return _PeerCopyBuilder(edit, cut).build()


def _refusal(launch: Node, sentence: str) -> Refusal:
    return Refusal(Reason.NO_KERNEL, sentence, launch.name)


class _PeerCopyBuilder(ChunkBuilder):
    def build(self) -> dict[Node, Node]:
        launch, collective = self.launch, self.collective
        register_operators("symm_mem")
        target = find_op("symm_mem", OPERATORS[collective.kind], "default")
        if target is None:
            raise ValueError(f"{launch.name} was built without asking why_not first")
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
