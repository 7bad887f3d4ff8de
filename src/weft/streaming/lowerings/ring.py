"""The ring: parts go from each rank to the next, and each is multiplied while the one behind it is on its way.

Contract: plain nodes that any backend runs. Chunks are the parts of the ranks. The nodes are those of one rank: whom it
sends to, and the order in which it multiplies, depend on its place in the group; what goes over the wire, and when, is
the same on every rank. Sending and receiving are one launch, so that no rank waits for another that waits for it.
Torch 2.13 notes each send under two tensors, its result and what is sent; waiting under both hangs on gloo, and under
one leaves the other, which holds what was sent until the process ends. So a ring is built only where it is asked for.

    gather    own part -> to the next rank, and multiplied -> the part of the rank before arrives -> ... -> joined
    scatter   the part of the rank before is multiplied -> to the next rank, which adds its own -> ... -> own part
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem

import torch
from torch.fx import Node

from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.edit import Edit
from weft.plan.decision import Reason, Refusal
from weft.streaming.chunking import Chunking, Operand
from weft.streaming.lowerings.portable import Builder, Gather, Scatter
from weft.streaming.lowerings.protocol import Name

aten = torch.ops.aten
TRANSFER = "batch_p2p"
SUMS = {
    "sum": aten.add.Tensor,
    "avg": aten.add.Tensor,
    "max": aten.maximum.default,
    "min": aten.minimum.default,
    "product": aten.mul.Tensor,
}
"""What adds two parts, by how the scatter reduces."""


class Ring:
    """Transfers from rank to rank."""

    @property
    def name(self) -> Name:
        return "ring"

    def why_not(self, cut: Chunking, *, asked_for: bool) -> Refusal | None:
        """What keeps transfers from running a site."""
        name = cut.launch.name
        if TRANSFER not in ops.op_names():
            return Refusal(
                Reason.NO_KERNEL, f"{name} is no ring: this torch has no transfers in graphs, 2.12 has", name
            )
        if cut.num_ranks < 2:
            return Refusal(Reason.ALONE, f"{name} is no ring: its group has one rank")
        if cut.own is None:
            sentence = f"{name} is no ring: the graph does not say of which rank it is"
            return Refusal(Reason.OTHER_RANKS, sentence, name)
        reduce_op = Collective(cut.launch).reduce_op
        if cut.result is not None and reduce_op not in SUMS:
            return Refusal(Reason.NO_KERNEL, f"{name} is no ring: nothing adds by {reduce_op} from rank to rank", name)
        return None

    def build(self, edit: Edit, cut: Chunking) -> dict[Node, Node]:
        """Put a ring in the place of a site."""
        return _RingGather(edit, cut).build() if cut.result is None else _RingScatter(edit, cut).build()


class _Transfers(Builder):
    """What both rings share: one step around."""

    @property
    def own(self) -> int:
        return self.chunking.own or 0

    def send(self, part: Node, step: int) -> list[Node]:
        """Launch sending a part to the next rank and receiving one from the rank before."""
        size, name = self.chunking.num_ranks, f"{self.launch.name}_{step}"
        buffer = self.call(aten.empty_like.default, (part,), f"{name}_buffer", self.launch)
        peers = [(self.own + 1) % size, (self.own - 1) % size]
        group = ops.bind(self.launch)[self.collective.form.group]
        args = (["isend", "irecv"], peers, [0, 0], [part, buffer], group)
        launch = self.call(ops.op_names()[TRANSFER], args, name, self.launch)
        ends = ((0, f"{name}_sent"), (1, f"{name}_received"))
        return [self.call(getitem, (launch, end), named, self.launch) for end, named in ends]

    def receive(self, ends: list[Node]) -> Node:
        """Wait for both ends of a step; what was received."""
        return [self.wait(end) for end in ends][1]


class _RingGather(_Transfers, Gather):
    def multiply(self) -> None:
        size = self.chunking.num_ranks
        part = self.contiguous(self.collective.inputs[0])
        for step in range(size):
            ends = self.send(part, step) if step < size - 1 else []
            self.anchor = self.chunking.products[-1]
            rank = (self.own - step) % size
            self.made[self.launch, rank] = part
            for product in self.chunking.products:
                self.chunk(product, rank)
            part = self.receive(ends) if ends else part

    def first_use(self, gone: set[Node]) -> Node:
        return self.chunking.products[-1]  # transfers fill memory: who reads it stands behind them


class _RingScatter(_Transfers, Scatter):
    def multiply(self, result: Operand) -> Callable[[], Node]:
        size = self.chunking.num_ranks
        total = self.contiguous(self.operand(result, (self.own - 1) % size))
        for step in range(size - 2):
            total = self._sum(total, result, step)()
        return self._scaled(self._sum(total, result, size - 2))

    def _sum(self, total: Node, result: Operand, step: int) -> Callable[[], Node]:
        """Send a part on and multiply the next one; returns what adds that to what was received."""
        ends = self.send(total, step)
        mine = self.contiguous(self.operand(result, (self.own - 2 - step) % self.chunking.num_ranks))
        target = SUMS[str(self.collective.reduce_op)]
        name = f"{self.launch.name}_{step}_sum"
        return lambda: self.call(target, (self.receive(ends), mine), name, self.launch)

    def _scaled(self, last: Callable[[], Node]) -> Callable[[], Node]:
        if self.collective.reduce_op != "avg":
            return last
        scaled = f"{self.launch.name}_average"
        return lambda: self.call(aten.div.Scalar, (last(), self.chunking.num_ranks), scaled, self.launch)
