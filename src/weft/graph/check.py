"""The invariants of a valid graph, one function each.

Contract: each function takes the Dag of a graph and raises a GraphError that names the node; `validate` runs them all.
Passes may rely on every one of them, and must leave every one of them true.
"""

from __future__ import annotations

from torch.fx import Node

from weft.compat import input_nodes
from weft.errors import GraphError, compose
from weft.graph import ops
from weft.graph.dag import Dag
from weft.graph.listings.writer import excerpt


def validate(dag: Dag) -> None:
    """Check every invariant."""
    for invariant in INVARIANTS:
        invariant(dag)


def inputs_come_first_and_the_output_last(dag: Dag) -> None:
    """All placeholders come before other nodes; there is one output, at the end."""
    seen_other: Node | None = None
    for node in dag.nodes:
        if node.op == "placeholder" and seen_other is not None:
            raise _error(node, f"input {node.name} stands after {seen_other.name}", "put inputs first")
        if node.op != "placeholder":
            seen_other = node
    outputs = [node for node in dag.nodes if node.op == "output"]
    if len(outputs) != 1 or dag.nodes[-1].op != "output":
        raise GraphError(compose("graph", f"it has {len(outputs)} outputs, one at the end is needed"))


def definitions_come_before_uses(dag: Dag) -> None:
    """Every argument is defined above its use."""
    for i, node in enumerate(dag.nodes):
        for source in input_nodes(node):
            j = dag.index.get(source)
            if j is None or j >= i:
                where = "another graph" if j is None else "a later line"
                raise _error(
                    node, f"{node.name} uses {source.name}, which {where} defines", f"move it after {source.name}"
                )


def names_are_unique(dag: Dag) -> None:
    """No two nodes share a name, because plans and listings refer to nodes by name."""
    seen: set[str] = set()
    for node in dag.nodes:
        if node.name in seen:
            raise _error(node, f"two nodes are called {node.name}", "rename one of them")
        seen.add(node.name)


def every_launch_is_waited_for_or_escapes(dag: Dag) -> None:
    """Each tensor in flight has a wait, or leaves the graph for the caller to wait for."""
    escaping = dag.effects.held_by_outputs
    for flight in dag.effects.flights:
        node = dag.nodes[flight.launch]
        if (
            flight.wait is None
            and not escaping.intersection(map(dag.effects.find, flight.writes))
            and ops.kind_of(node.target) is not ops.Kind.SEND
        ):
            what = f"{node.name} is never waited for and is not an output of the graph"
            raise _error(node, what, "wait for it, return it, or delete the launch")


def nothing_reads_a_result_in_flight(dag: Dag) -> None:
    """Between a launch and its wait only views, waits and the output may take its result."""
    for flight, i, _, is_write in dag.effects.accesses_in_flight():
        node, launch = dag.nodes[i], dag.nodes[flight.launch]
        if not is_write and node.op != "output":
            what = f"{node.name} reads the result of {launch.name} before its wait"
            raise _error(node, what, f"read it after the wait of {launch.name}")


def nothing_writes_a_buffer_in_flight(dag: Dag) -> None:
    """Between a launch and its wait nothing writes what it sends or receives."""
    for flight, i, storage, is_write in dag.effects.accesses_in_flight():
        if is_write:
            node, launch = dag.nodes[i], dag.nodes[flight.launch]
            role = "still sends" if storage in flight.reads else "has not received yet"
            what = f"{node.name} writes a buffer that {launch.name} {role}"
            raise _error(node, what, f"write it after the wait of {launch.name}")


INVARIANTS = (
    inputs_come_first_and_the_output_last,
    definitions_come_before_uses,
    names_are_unique,
    every_launch_is_waited_for_or_escapes,
    nothing_reads_a_result_in_flight,
    nothing_writes_a_buffer_in_flight,
)


def _error(node: Node, what: str, do: str) -> GraphError:
    return GraphError(compose("graph", what, where=excerpt(node), do=do))
