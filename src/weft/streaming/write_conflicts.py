"""Writes that forbid chunks: streaming reads some tensors later, so nothing may write to them in between."""

from __future__ import annotations

from torch.fx import Node

from weft.graph import ops
from weft.graph.dag import Dag
from weft.plan.decision import Reason, Refusal
from weft.streaming.chunking import Chunking


class WriteConflicts:
    """Finds the writes of one graph that prevent streaming a site."""

    def __init__(self, dag: Dag) -> None:
        self.dag = dag
        self.memory = dag.effects.memory

    def why_not(self, cut: Chunking) -> Refusal | None:
        """The write that prevents streaming a site, or None."""
        index = self.dag.index
        launch = cut.launch
        last = index[cut.products[-1]] if cut.result is None else index[launch]
        waits = [user for user in launch.users if ops.is_wait(user.target)]
        made = [*cut.calls, *([launch, *waits] if cut.result is None else [])]
        for node in made:
            if self.memory.written.intersection(self.dag.effects.held(index[node])):
                return self._refusal(cut, node, self._writer(node, -1, len(index)))
        source = launch.all_input_nodes[0]
        reads = [(source, index[launch])] if cut.result is None else []
        for call, operands in cut.calls.items():
            reads += [(operand.node, index[call]) for operand in operands.values()]
            reads += [(tensor, index[call]) for tensor in call.all_input_nodes]
        for tensor, first in reads:
            writer = self._writer(tensor, first, last)
            if writer is not None:
                return self._refusal(cut, tensor, writer)
        return None

    def _writer(self, node: Node, first: int, last: int) -> int | None:
        """The position of the first write to a tensor after `first` and before `last`."""
        for storage in self.dag.effects.held(self.dag.index[node]):
            found = self.memory.first_direct_write(storage, first, last)
            if found is not None:
                return found
        return None

    def _refusal(self, cut: Chunking, tensor: Node, writer: int | None) -> Refusal:
        who = self.dag.nodes[writer].name if writer is not None else "something"
        sentence = f"{cut.launch.name} stays whole: {who} writes to {tensor.name}, which later chunks would read"
        return Refusal(Reason.MUTATED, sentence, who)
