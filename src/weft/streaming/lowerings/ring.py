"""The ring lowering: each rank sends its part to the next rank, and multiplies one part while the next is in flight.

Contract: plain nodes that any backend can run. There is one chunk per rank. The graph is specific to one rank: its
index in the group decides whom it sends to and in which order it multiplies. All ranks send the same sizes at the same
steps. One launch both sends and receives, so two ranks cannot wait for each other. Torch 2.13 registers each send
under two tensors, its result and the sent tensor. Waiting for both hangs on gloo; waiting for one leaks the other,
which keeps the sent tensor alive until the process ends. A ring is therefore built only if the user asks for it.

    gather    send this rank's part on and multiply it -> receive the previous rank's part -> ... -> join the products
    scatter   multiply the previous rank's part -> send it on; the next rank adds its own -> ... -> own part
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
from weft.streaming.lowerings.portable import ChunkBuilder, ChunkedGather, ChunkedScatter
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
"""The operator that combines two parts, by reduction of the scatter. An average is scaled at the end."""


class Ring:
    """Run the chunks as transfers from rank to rank."""

    @property
    def name(self) -> Name:
        return "ring"

    def fit(self, cut: Chunking) -> Chunking:
        """The whole site."""
        return cut

    def why_not(self, cut: Chunking, unshared: Refusal | None) -> Refusal | None:
        """Why a ring cannot run a site; None if it can."""
        name = cut.launch.name
        if TRANSFER not in ops.op_names():
            return Refusal(Reason.NO_KERNEL, f"{name} cannot run as a ring: transfers in graphs need torch 2.12", name)
        if cut.num_ranks < 2:
            return Refusal(Reason.ALONE, f"{name} cannot run as a ring: its group has one rank")
        if cut.ring_rank is None:
            sentence = f"{name} cannot run as a ring: the option `rank` is not set"
            return Refusal(Reason.OTHER_RANKS, sentence, name)
        reduce_op = Collective(cut.launch).reduce_op
        if cut.result is not None and reduce_op not in SUMS:
            return Refusal(
                Reason.NO_KERNEL, f"{name} cannot run as a ring: no operator combines two parts by {reduce_op}", name
            )
        return None

    def build(self, edit: Edit, cut: Chunking) -> dict[Node, Node]:
        """Replace a site by a ring."""
        return _RingGather(edit, cut).build() if cut.result is None else _RingScatter(edit, cut).build()


class _Transfers(ChunkBuilder):
    """Shared by both rings: one step around the ring."""

    @property
    def ring_rank(self) -> int:
        return self.chunking.ring_rank or 0

    def send(self, part: Node, step: int) -> list[Node]:
        """Launch one transfer: send a part to the next rank and receive one from the previous rank."""
        size, name = self.chunking.num_ranks, f"{self.launch.name}_{step}"
        buffer = self.call(aten.empty_like.default, (part,), f"{name}_buffer", self.launch)
        peers = [(self.ring_rank + 1) % size, (self.ring_rank - 1) % size]
        group = ops.bind(self.launch)[self.collective.form.group]
        args = (["isend", "irecv"], peers, [0, 0], [part, buffer], group)
        launch = self.call(ops.op_names()[TRANSFER], args, name, self.launch)
        ends = ((0, f"{name}_sent"), (1, f"{name}_received"))
        return [self.call(getitem, (launch, end), named, self.launch) for end, named in ends]

    def receive(self, ends: list[Node]) -> Node:
        """Wait for both ends of a transfer. Returns the received part."""
        return [self.wait(end) for end in ends][1]


class _RingGather(_Transfers, ChunkedGather):
    def multiply(self) -> None:
        size = self.chunking.num_ranks
        part = self.contiguous(self.collective.inputs[0])
        for step in range(size):
            ends = self.send(part, step) if step < size - 1 else []
            self.anchor = self.chunking.products[-1]
            rank = (self.ring_rank - step) % size
            self.made[self.launch, rank] = part
            for product in self.chunking.products:
                self.chunk(product, rank)
            part = self.receive(ends) if ends else part

    def first_use(self, gone: set[Node]) -> Node:
        return self.chunking.products[-1]  # transfers fill buffers in place, so every reader has to come after them


class _RingScatter(_Transfers, ChunkedScatter):
    def multiply(self, result: Operand) -> Callable[[], Node]:
        size = self.chunking.num_ranks
        total = self.contiguous(self.operand(result, (self.ring_rank - 1) % size))
        for step in range(size - 2):
            total = self._sum(total, result, step)()
        return self._scaled(self._sum(total, result, size - 2))

    def _sum(self, total: Node, result: Operand, step: int) -> Callable[[], Node]:
        """Send a part on and multiply the next one. Returns a function that adds it to the received part."""
        ends = self.send(total, step)
        mine = self.contiguous(self.operand(result, (self.ring_rank - 2 - step) % self.chunking.num_ranks))
        target = SUMS[str(self.collective.reduce_op)]
        name = f"{self.launch.name}_{step}_sum"
        return lambda: self.call(target, (self.receive(ends), mine), name, self.launch)

    def _scaled(self, last: Callable[[], Node]) -> Callable[[], Node]:
        if self.collective.reduce_op != "avg":
            return last
        scaled = f"{self.launch.name}_average"
        return lambda: self.call(aten.div.Scalar, (last(), self.chunking.num_ranks), scaled, self.launch)
