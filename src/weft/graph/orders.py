"""Orders of nodes: topological sorts, preferred positions, groups side by side, and errors for cycles."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.fx import Node

from weft.errors import GraphError, compose
from weft.graph.dag import Dag
from weft.graph.listings.writer import excerpt


def check_order(dag: Dag, order: Sequence[Node], keep_issue_order: bool) -> None:
    """Refuse an order that does not hold every node of a Dag once, or that breaks a dependency."""
    nodes = dag.nodes
    place = {node: i for i, node in enumerate(order)}
    if len(place) != len(nodes) or len(order) != len(nodes) or any(node not in place for node in nodes):
        what = f"the order has {len(order)} nodes, {len(place)} of them distinct; the graph has {len(nodes)}"
        raise GraphError(compose("edit", what, do="list each node once"))
    edges = [(j, i) for i, preds in enumerate(dag.preds) for j in preds]
    edges += dag.queue if keep_issue_order else []
    for earlier, later in edges:
        first, second = nodes[earlier], nodes[later]
        if place[first] > place[second]:
            what = f"the order puts {second.name} before {first.name}, which it needs"
            raise GraphError(compose("edit", what, where=excerpt(second), do="put each node after its inputs"))


def displaced(order: list[Node], positions: Mapping[Node, int], moved: Mapping[Node, Any]) -> set[Node]:
    """The nodes to relink: those that were moved, and those that had to give way to them."""
    displaced: set[Node] = set()
    last = -1
    for node in order:
        position = positions[node]
        if node in moved or position < last:
            displaced.add(node)
        else:
            last = position
    return displaced


def placed(nodes: Iterable[Node], anchors: Mapping[Node, tuple[Node, bool]]) -> list[Node]:
    """The nodes in the order that moves ask for: inputs first, the output last.

    `anchors` maps each moved node to the node next to which it goes, and to whether it goes after that node.
    """
    nodes = list(nodes)
    beside: dict[tuple[Node, bool], list[Node]] = {}
    for node, side in anchors.items():
        beside.setdefault(side, []).append(node)
    found: list[Node] = [] if anchors else nodes
    for root in nodes if anchors else ():
        if root in anchors:
            continue
        stack: list[tuple[Node, bool]] = [(root, False)]
        while stack:
            node, opened = stack.pop()
            before = [] if opened else beside.get((node, False), [])
            if before:
                stack += [(node, True), *((n, False) for n in reversed(before))]
                continue
            found.append(node)
            stack += [(n, False) for n in reversed(beside.get((node, True), []))]
    first = [n for n in found if n.op == "placeholder"]
    last = [n for n in found if n.op == "output"]
    return first + [n for n in found if n.op not in ("placeholder", "output")] + last


def topological(succs: Sequence[Iterable[int]], rank: Sequence[Any]) -> list[int]:
    """A topological order of the nodes 0, 1, ... that always takes the free node with the lowest rank.

    Equal ranks go by number. Nodes that are in a cycle or need one are left out. `succs` may name an edge twice.
    """
    missing = [0] * len(succs)
    for following in succs:
        for j in following:
            missing[j] += 1
    by_rank = sorted(range(len(succs)), key=rank.__getitem__)
    place = [0] * len(succs)
    for position, i in enumerate(by_rank):
        place[i] = position
    heap = [position for position, i in enumerate(by_rank) if not missing[i]]  # ascending, so already a heap
    order: list[int] = []
    while heap:
        i = by_rank[heapq.heappop(heap)]
        order.append(i)
        for j in succs[i]:
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(heap, place[j])
    return order


def settled(dag: Dag, wanted: Iterable[Node], keep_issue_order: bool) -> list[Node]:
    """The nodes of a Dag, each as near to its position in the wanted order as its dependencies allow."""
    nodes, wanted = dag.nodes, list(wanted)
    place = {node: i for i, node in enumerate(wanted)}
    rank, succs = [place[node] for node in nodes], dag.succs
    queue = dag.queue if keep_issue_order else []
    if _is_legal(rank, succs, queue):  # the usual case: an order like this is its own topological order
        return wanted
    if queue:
        succs = [list(s) for s in succs]
        for earlier, later in queue:
            succs[earlier].append(later)
    order = topological(succs, rank)
    if len(order) < len(nodes):
        raise _cycle([[node] for node in nodes], succs, order)
    return [nodes[i] for i in order]


def _is_legal(rank: Sequence[int], succs: Sequence[Iterable[int]], queue: Iterable[tuple[int, int]]) -> bool:
    """Whether every node has a lower rank than those that must follow it."""
    for i, following in enumerate(succs):
        mine = rank[i]
        for j in following:
            if rank[j] <= mine:
                return False
    return all(rank[earlier] < rank[later] for earlier, later in queue)


def contracted(dag: Dag, groups: Sequence[Sequence[Node]]) -> list[Node]:
    """The nodes in an order that the Dag allows, with the nodes of each group adjacent and few other changes."""
    last_of = list(range(len(dag.nodes)))
    members: dict[int, list[int]] = {}
    for group in groups:
        ids = sorted(dag.index[node] for node in group)
        members[ids[-1]] = ids
        for i in ids:
            last_of[i] = ids[-1]
    units = [members.get(i, [i]) for i, last in enumerate(last_of) if i == last]  # a group goes where its last node was
    number = {unit[-1]: k for k, unit in enumerate(units)}
    unit_of = [number[last] for last in last_of]
    succs = [[unit_of[j] for i in unit for j in dag.succs[i] if unit_of[j] != k] for k, unit in enumerate(units)]
    order = topological(succs, range(len(units)))
    if len(order) < len(units):
        raise _cycle([[dag.nodes[i] for i in unit] for unit in units], succs, order)
    return [dag.nodes[i] for k in order for i in units[k]]


def _cycle(units: Sequence[Sequence[Node]], succs: Sequence[Iterable[int]], order: Iterable[int]) -> GraphError:
    """The error for units that a topological order leaves out: walk back from one of them until a unit repeats."""
    stuck = set(range(len(units))).difference(order)
    preds: dict[int, int] = {}
    for i in sorted(stuck):
        for j in succs[i]:
            preds.setdefault(j, i)
    path = {min(stuck): None}
    last = preds[min(stuck)]
    while last not in path:
        path[last] = None
        last = preds[last]
    found = list(path)
    around = [last, *reversed(found[found.index(last) :])]
    names = [" and ".join(node.name for node in units[i]) for i in around]
    what = f"no order is possible: {' before '.join(names)}"
    return GraphError(compose("edit", what, where=excerpt(units[last][-1]), do="leave one of these edits out"))
