"""Writes that forbid chunks: a tensor that is read later than before must not be written to in between."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from weft.graph import ops
from weft.graph.dag import Dag
from weft.plan.decision import Reason, Refusal
from weft.streaming.chunking import Chunking


class Writes:
    """The writes of one Dag, as far as they keep sites from being cut."""

    def __init__(self, dag: Dag) -> None:
        self.dag = dag
        self.memory = dag.effects.memory

    def why_not(self, cut: Chunking) -> Refusal | None:
        """The write that keeps a site from being cut."""
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
        """The first node behind one place and before another that writes to a tensor."""
        for storage in self.dag.effects.held(self.dag.index[node]):
            found = self.memory.first_direct_write(storage, first, last)
            if found is not None:
                return found
        return None

    def _refusal(self, cut: Chunking, tensor: Node, writer: int | None) -> Refusal:
        who = self.dag.nodes[writer].name if writer is not None else "something"
        sentence = f"{cut.launch.name} is not cut: {who} writes to {tensor.name}, which chunks would read later"
        return Refusal(Reason.MUTATED, sentence, who)


def is_chunk_of_gather(launch: Node) -> bool:
    """Whether a gather takes one of several slices of a tensor that are all gathered so."""
    part = _copied(launch.all_input_nodes[0])
    if ops.name_of(part.target) != "slice":
        return False
    dim = part.args[1] if len(part.args) > 1 else 0
    others = [
        user
        for user in part.all_input_nodes[0].users
        if ops.name_of(user.target) == "slice" and (user.args[1] if len(user.args) > 1 else 0) == dim
    ]
    sent = [user for other in others for user in _users_of_copies(other) if user.target is launch.target]
    return len(sent) > 1


def is_chunk_of_scatter(launch: Node) -> bool:
    """Whether the result of a scatter is joined with nothing but results of others like it, or gathered for that."""
    joins = [user for wait in launch.users for user in wait.users if ops.is_wait(wait.target)]
    if len(joins) == 1 and ops.kind_of(joins[0].target) is ops.Kind.ALL_GATHER:
        return is_chunk_of_scatter(joins[0])
    return len(joins) == 1 and ops.name_of(joins[0].target) == "cat" and _all_from(joins[0].all_input_nodes, launch)


def _all_from(waits: Iterable[Node], launch: Node) -> bool:
    sources = [wait.all_input_nodes[0] for wait in waits if ops.is_wait(wait.target)]
    return len(sources) > 1 and all(source.target is launch.target for source in sources)


def _copied(node: Node) -> Node:
    return node.all_input_nodes[0] if ops.name_of(node.target) == "clone" else node


def _users_of_copies(node: Node) -> Iterable[Node]:
    for user in node.users:
        if ops.name_of(user.target) == "clone":
            yield from user.users
        else:
            yield user
