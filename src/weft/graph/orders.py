"""Orders of nodes: which are legal, which put some side by side, and why there is none."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
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
