"""Orders of nodes: which are legal, which put some side by side or elsewhere, and why there is none."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.fx import Node

from weft.errors import GraphError, compose
from weft.graph.dag import Dag
from weft.graph.listings.writer import excerpt


def check_order(dag: Dag, order: Sequence[Node], keep_issue_order: bool) -> None:
    """Refuse what is no order of the nodes of a Dag, or does not keep what depends on what."""
    nodes = dag.nodes
    place = {node: i for i, node in enumerate(order)}
    if len(place) != len(nodes) or len(order) != len(nodes) or any(node not in place for node in nodes):
        what = f"the order has {len(order)} nodes, {len(place)} of them different; the graph has {len(nodes)}"
        raise GraphError(compose("edit", what, do="order each node once"))
    edges = [(j, i) for i, preds in enumerate(dag.preds) for j in preds]
    edges += dag.queue if keep_issue_order else []
    for earlier, later in edges:
        first, second = nodes[earlier], nodes[later]
        if place[first] > place[second]:
            what = f"{second.name} is put before {first.name}, which it needs"
            raise GraphError(compose("edit", what, where=excerpt(second), do="keep what depends on what in order"))


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

    Anchors: by moved node the one that it is to stand beside, and whether after it.
    """
    nodes = list(nodes)
    beside: dict[tuple[Node, bool], list[Node]] = {}
    for node, side in anchors.items():
        beside.setdefault(side, []).append(node)
    found: list[Node] = []
    for root in nodes:
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


def settled(dag: Dag, wanted: Iterable[Node], keep_issue_order: bool) -> list[Node]:
    """The nodes of a Dag, each as near to its place in the order that is wanted as its dependencies allow."""
    nodes = dag.nodes
    place = {node: i for i, node in enumerate(wanted)}
    waiting = [len(p) for p in dag.preds]
    succs = dag.succs
    if keep_issue_order:
        succs = [list(s) for s in succs] if dag.queue else succs
        for earlier, later in dag.queue:
            succs[earlier].append(later)
            waiting[later] += 1
    rank = [place[node] for node in nodes]
    by_rank = {r: i for i, r in enumerate(rank)}
    heap = [rank[i] for i, count in enumerate(waiting) if count == 0]
    heapq.heapify(heap)
    order: list[Node] = []
    while heap:
        i = by_rank[heapq.heappop(heap)]
        order.append(nodes[i])
        for j in succs[i]:
            waiting[j] -= 1
            if waiting[j] == 0:
                heapq.heappush(heap, rank[j])
    if len(order) < len(nodes):
        raise cycle([nodes[i] for i, count in enumerate(waiting) if count], dag)
    return order


def contracted(dag: Dag, groups: Sequence[Sequence[Node]]) -> list[Node]:
    """The nodes in an order that the Dag allows, each group in one place and everything else as it was if possible."""
    leader = list(range(len(dag.nodes)))
    members: dict[int, list[int]] = {}
    for group in groups:
        ids = sorted(dag.index[node] for node in group)
        members[ids[-1]] = ids
        for i in ids:
            leader[i] = ids[-1]
    waiting: dict[int, int] = dict.fromkeys(leader, 0)
    for i, preds in enumerate(dag.preds):
        waiting[leader[i]] += sum(leader[j] != leader[i] for j in preds)
    heap = sorted(i for i, count in waiting.items() if count == 0)
    order: list[Node] = []
    while heap:
        popped = heapq.heappop(heap)
        for i in members.get(popped, [popped]):
            order.append(dag.nodes[i])
            for j in dag.succs[i]:
                if leader[j] != popped:
                    waiting[leader[j]] -= 1
                    if waiting[leader[j]] == 0:
                        heapq.heappush(heap, leader[j])
    if len(order) < len(dag.nodes):
        stuck = {node for i, node in enumerate(dag.nodes) if waiting[leader[i]]}
        raise cycle([node for node in dag.nodes if node in stuck], dag)
    return order


def cycle(stuck: list[Node], dag: Dag) -> GraphError:
    """The error for nodes that need one another: walk back from one of them until a node repeats."""
    inside = {dag.index[node] for node in stuck}
    path = [min(inside)]
    while path.count(path[-1]) == 1:
        back = [p for p in dag.preds[path[-1]] if p in inside]
        back += [a for a, b in dag.queue if b == path[-1] and a in inside]
        path.append(back[0])
    names = [dag.nodes[i].name for i in reversed(path[path.index(path[-1]) :])]
    what = f"no order is possible: {' before '.join(names)}"
    return GraphError(compose("edit", what, where=excerpt(dag.nodes[path[-1]]), do="leave one of these edits out"))
