"""Low contention: CUDA copies through symmetric memory run the collective, which leaves the SMs to the products.

Contract: nothing is split into chunks. An operator of `peer_copies.py` replaces the launch. Its result is waited for as
before, and the products stay as they are.

    weft.copy_all_gather(shard, group) -> the gathered tensor
    weft.copy_reduce_scatter(sent, reduce_op, group) -> this rank's result
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.edit import Edit
from weft.plan.decision import Reason, Refusal
from weft.streaming.chunking import Chunking
from weft.streaming.lowerings.portable import ChunkBuilder
from weft.streaming.lowerings.protocol import Name
from weft.streaming.peer_copies import GATHER, SCATTER

OPERATORS: dict[ops.Kind, Any] = {ops.Kind.ALL_GATHER: GATHER, ops.Kind.REDUCE_SCATTER: SCATTER}
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
        """Why copies cannot run a collective; None if they can."""
        launch, collective = cut.launch, Collective(cut.launch)
        if collective.kind not in OPERATORS:
            return _refusal(launch, f"{launch.name} is an all-reduce, and only gathers and scatters can be copies")
        if collective.kind is ops.Kind.REDUCE_SCATTER and collective.reduce_op not in REDUCTIONS:
            what = f"{launch.name} reduces by {collective.reduce_op}, but copies are summed or averaged"
            return _refusal(launch, what)
        dtype = collective.dtype
        if collective.kind is ops.Kind.REDUCE_SCATTER and not (
            dtype and dtype.is_floating_point and dtype.itemsize > 1
        ):
            return _refusal(
                launch, f"{launch.name} reduces {dtype}, and copies are summed as floats of two bytes or more"
            )
        return unshared

    def build(self, edit: Edit, cut: Chunking) -> dict[Node, Node]:
        """Replace the launch by copies."""
        return _PeerCopyBuilder(edit, cut).build()


def whole(launch: Node) -> Chunking:
    """A collective that is not split, without products."""
    return Chunking(launch, 0, 1, 0, (), {})


def _refusal(launch: Node, sentence: str) -> Refusal:
    return Refusal(Reason.NO_KERNEL, sentence, launch.name)


class _PeerCopyBuilder(ChunkBuilder):
    def build(self) -> dict[Node, Node]:
        launch, collective = self.launch, self.collective
        target = OPERATORS[collective.kind]
        reduction = [collective.reduce_op] if collective.kind is ops.Kind.REDUCE_SCATTER else []
        args = (collective.inputs[0], *reduction, collective.group)
        name, value = f"{launch.name}_copied", ops.value_of(launch)
        made = self.edit.call(target, args, before=launch, name=name, like=[launch], value=value)
        waits = collective.waits
        self.anchor = launch  # at once: the group's memory is in use until the wait, and the planner moves both
        done = self.wait(made)
        for node in (launch, *waits):
            self.edit.erase(node)
        return dict.fromkeys([launch, *waits], done)
