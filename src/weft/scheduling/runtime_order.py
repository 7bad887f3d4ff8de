"""Runtime orders: where the hooks of a training runtime put launches and waits around compute that keeps its order.

Contract: a node has a place: a node of the graph, and whether it comes before it. Every node that was given no place
keeps its own. `order` puts each node as near to its place as the dependencies allow, so every order is legal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch.fx import Node

from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.groups import GroupTable
from weft.graph.operator_effects import COPIES, is_alias, is_cheap
from weft.graph.ops import Kind
from weft.graph.orders import topological
from weft.graph.roles import PACKS, Role, Roles
from weft.plan.decision import Reason, Refusal

TOP = -1
"""The place before all compute."""
WAITS, LAUNCHES, COMPUTE = range(3)
"""The order at one place: waits and the copies out of buffers, launches, then the node itself."""
MAX_ROUNDS = 16
"""Most rounds until an order must settle. Captured steps take two; graphs that need more are made up."""
UNSETTLED = "stays: each order of this graph that puts it in its place moves others out of theirs"
"""Why a pass declines, if the orders do not settle."""


class RuntimeOrder:
    """The places of the nodes of one Dag."""

    def __init__(self, dag: Dag) -> None:
        self.dag = dag
        self.places: list[tuple[int, int, int]] = [
            (TOP, WAITS, TOP) if node.op == "placeholder" else (i, COMPUTE, 0) for i, node in enumerate(dag.nodes)
        ]
        self.moved: set[int] = set()

    def put(self, nodes: Iterable[int], anchor: int, what: int, turn: int) -> None:
        """Put nodes before the anchor; of several that are put there, those of the lower turn come first.

        A node that is put twice, such as a cast that two launches need, goes to the earlier place.
        """
        for i in nodes:
            place = (anchor, what, turn)
            self.places[i] = min(place, self.places[i]) if i in self.moved else place
            self.moved.add(i)

    def order(self, dag: Dag) -> list[Node]:
        """The new order of the nodes, which a Dag allows: the own one, or that of another order of the same nodes."""
        places = [self.places[self.dag.index[node]] for node in dag.nodes]
        return [dag.nodes[i] for i in topological(dag.succs, places)]

    def changed(self, order: Iterable[Node]) -> set[Node]:
        """The nodes that were put somewhere and have other compute before them in this order."""
        moved = {self.dag.nodes[i] for i in self.moved}
        old, new = _compute_before(self.dag.nodes, moved), _compute_before(order, moved)
        return {node for node in moved if old[node] != new[node]}


def settle(first: RuntimeOrder, put: Callable[[Dag], RuntimeOrder], *, keep_issue_order: bool) -> list[Node] | None:
    """The order that putting the nodes again does not change; None if the orders do not settle.

    A node that moves may bring others next to it that belong with it, so one round is not always enough. Each order is
    one that the given graph allows: of two waits for one launch the first one counts, so the dependencies of another
    order may be others.
    """
    found = first
    for _ in range(MAX_ROUNDS):
        if found.order(found.dag) == found.dag.nodes:
            return found.dag.nodes
        found = put(Dag(found.order(first.dag), keep_issue_order=keep_issue_order))
    return None


def _compute_before(order: Iterable[Node], moved: Collection[Node]) -> dict[Node, int]:
    """For each moved node, the number of other nodes before it."""
    found: dict[Node, int] = {}
    others = 0
    for node in order:
        if node in moved:
            found[node] = others
        else:
            others += 1
    return found


class Carried:
    """The collectives of one Dag that carry parameters or gradients of data parallelism, in launch order.

    Those of a group that carries mostly activations belong to tensor parallelism and are left out.
    """

    def __init__(self, dag: Dag, groups: GroupTable) -> None:
        roles = Roles(dag)
        tensor_groups = roles.tensor_groups(groups)
        launches = [node for node in dag.nodes if node.op == "call_function" and ops.launch_form(node.target)]
        found = [Collective(node) for node in launches]
        gathers = [c for c in found if c.kind is Kind.ALL_GATHER and roles.of(c) is Role.PARAMETERS]
        reduced = [
            c
            for c in found
            if c.kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
            and roles.of(c) is Role.GRADIENTS
            and groups.canonical(c.group) not in tensor_groups
        ]
        self.dag = dag
        self.refused = {c: refusal for c in (*gathers, *reduced) if (refusal := _why_not(c)) is not None}
        self.gathers = [c for c in gathers if c not in self.refused]
        reduced = [c for c in reduced if c not in self.refused]
        self.scatters = [c for c in reduced if c.kind is Kind.REDUCE_SCATTER]
        self.sums = [c for c in reduced if c.kind is Kind.ALL_REDUCE]
        self._deferrable = {dag.index[c.launch] for c in self.sums}
        last = max((dag.index[c.launch] for c in (*self.scatters, *self.sums)), default=TOP)
        self.epilogues = {c.launch: self._epilogue(c) for c in (*self.scatters, *self.sums)}
        uses = sorted(i for launch in self.epilogues for i in self._uses(self.epilogues[launch]))
        self.end_of_backward = next((i for i in uses if i > last), len(dag.nodes) - 1)
        """The first node that uses a gradient after the last gradient was launched."""

    def first_use(self, collective: Collective) -> int:
        """The first node that uses the finished gradient, or the end of backward if that is earlier."""
        return min([self.end_of_backward, *self._uses(self.epilogues[collective.launch])])

    def _uses(self, epilogue: Collection[int]) -> list[int]:
        index = self.dag.index
        return [index[u] for i in epilogue for u in self.dag.nodes[i].users if index[u] not in epilogue]

    def _epilogue(self, collective: Collective) -> set[int]:
        """The waits of a reduction, and the nodes right after them that only finish its results.

        These are views, casts, scalings, the addition to an earlier gradient, and a reduction over replicas.
        """
        dag = self.dag
        found = {dag.index[wait] for wait in collective.waits}
        for i in range(min(found) + 1, len(dag.nodes) - 1):
            node = dag.nodes[i]
            sources = node.all_input_nodes
            finishes = any(dag.index[s] in found for s in sources) and all(
                dag.index[s] in found or s.op in ("placeholder", "get_attr") for s in sources
            )
            if i in found or (finishes and (_is_light(node) or i in self._deferrable)):
                found.add(i)
            elif ops.is_wait(node.target) or not is_alias(node):
                break
        return found


def _why_not(collective: Collective) -> Refusal | None:
    name = collective.launch.name
    if collective.escapes:
        return Refusal(Reason.ESCAPES, f"{name} stays: the graph returns the launch, not just the result of its wait")
    if not collective.waits:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: nothing waits for it")
    return None


def _is_light(node: Node) -> bool:
    return node.op == "call_function" and (is_cheap(node.target) or ops.is_wait(node.target))


def copy_out(dag: Dag, collective: Collective) -> set[int]:
    """The waits of a gather, and the views and copies that take the results out of its buffer."""
    found = set(collective.waits)
    stack = list(found)
    while stack:
        for user in stack.pop().users:
            copies = ops.qualified_name(user.target) in ("aten::reshape", "aten::clone")
            if user not in found and (is_alias(user) or copies) and len(user.all_input_nodes) == 1:
                found.add(user)
                stack.append(user)
    return {dag.index[node] for node in found}


def preparation(dag: Dag, launch: Node) -> tuple[set[int], set[Node]]:
    """A launch and the nodes that prepare what it sends, back to graph inputs; and these inputs."""
    found: set[int] = set()
    inputs: set[Node] = set()
    stack = [launch]
    while stack:
        node = stack.pop()
        if node.op in ("placeholder", "get_attr"):
            inputs.add(node)
        if node.op != "placeholder" and dag.index[node] not in found:
            found.add(dag.index[node])
            stack += node.all_input_nodes
    return found, inputs


def copy_in(dag: Dag, launch: Node) -> int:
    """The first node of the copies and casts that fill the buffer of a launch, or the launch itself."""
    first, node = dag.index[launch], launch
    while len(node.all_input_nodes) == 1 and ops.qualified_name(node.target) not in PACKS:
        node = node.all_input_nodes[0]
        copies = ops.qualified_name(node.target) in (COPIES | PACKS)
        if node.op != "call_function" or not (copies or is_alias(node)) or ops.is_wait(node.target):
            break
        first = dag.index[node] if copies else first
    return first
