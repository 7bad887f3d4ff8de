"""Heads: the earliest time at which each node can start, in any order. On reversed tasks these are the tails.

Contract: "head" and "tail" are the words of the scheduling literature (release date and delivery time of Carlier's
one-machine problem). A head is the maximum of two arguments:

    path    the head of a predecessor plus its duration
    set     all ancestors of the node on one resource whose heads reach a threshold run one after the other, so the
            node starts no earlier than the threshold plus their total time

The second one is applied recursively: the heads of ancestors are themselves raised by sets, for every resource.

A set can beat the paths only where two predecessors have different ancestors; other nodes are skipped. Sets are integer
bit masks with one bit for each task of the resource. A node's set is dropped once its last successor has used it. A
budget limits the total size of the sets; it is spread evenly over the nodes. A skipped set makes a head lower, which is
still valid.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.bounds.problem import COMPUTE, Machine, Tasks

BUDGET = 40_000_000
"""Total members of the sets examined for one resource. 40 million take a few seconds on one core."""
SET_COST = 500
"""Fixed cost of examining one set, counted in members: about the overhead of the numpy calls."""


@dataclass(frozen=True)
class SetArgument:
    """A node starts no earlier than `threshold` plus the time of its ancestors on `resource` whose heads reach that."""

    node: int
    resource: int
    threshold: int


@dataclass(frozen=True)
class Heads:
    """The heads of all nodes, and the sets that prove them."""

    start: list[int]
    arguments: dict[int, SetArgument]
    """By node, the set that gives a higher head than every path."""
    compute_before: dict[int, int]
    """By collective, its compute ancestors as a bit mask over the tasks of the compute stream."""


def path_heads(tasks: Tasks) -> Heads:
    """Heads by paths alone."""
    start = [0] * len(tasks.preds)
    for node in tasks.order:
        start[node] = path_head(tasks, start, node)
    return Heads(start, {}, {})


def path_head(tasks: Tasks, start: list[int], node: int) -> int:
    """The head of a node by its predecessors alone."""
    duration, head = tasks.duration, 0
    for pred in tasks.preds[node]:
        end = start[pred] + duration[pred]
        if end > head:
            head = end
    return head


def find_heads(tasks: Tasks) -> Heads:
    """Heads by paths and sets."""
    heads = Heads([0] * len(tasks.preds), {}, {})
    sweeps = [AncestorSweep(tasks, resource) for resource in range(tasks.num_resources)]
    sweeps = [sweep for sweep in sweeps if sweep.machine.nodes or sweep.resource == COMPUTE]
    unseen = [len(succs) for succs in tasks.succs]
    for node in tasks.order:
        best = path_head(tasks, heads.start, node)
        for sweep in sweeps:
            found = sweep.enter(node, best)
            if found is not None:
                best, heads.arguments[node] = found
        heads.start[node] = best
        for sweep in sweeps:
            sweep.leave(node, best)
        if tasks.queue[node] >= 0:
            heads.compute_before[node] = sweeps[COMPUTE].done[node]
        for pred in tasks.preds[node]:
            unseen[pred] -= 1
            if not unseen[pred]:
                for sweep in sweeps:
                    sweep.done[pred] = 0
    return heads


class AncestorSweep:
    """One resource during the search: the ancestors of each node on it, and the heads of its tasks so far."""

    def __init__(self, tasks: Tasks, resource: int) -> None:
        self.tasks = tasks
        self.resource = resource
        self.machine = Machine(tasks, resource)
        self.done = [0] * len(tasks.preds)
        """By node, the tasks of the resource that have ended when the node ends, as a bit mask."""
        self.start = np.zeros(len(self.machine.nodes), np.int64)
        self.budget_per_node = max(1, BUDGET // max(1, len(tasks.order)))
        self.budget = 0

    def enter(self, node: int, best: int) -> tuple[int, SetArgument] | None:
        """Collect the ancestors of a node; return the head that they force if it beats the best so far."""
        preds = self.tasks.preds[node]
        done = self.done
        self.budget += self.budget_per_node
        if not preds:
            return None
        before = done[preds[0]]
        is_new = False
        for pred in preds[1:]:
            union = before | done[pred]
            # A predecessor that has all the others' ancestors implies their set by its own head and duration.
            is_new = (is_new or union != before) and union != done[pred]
            before = union
        done[node] = before
        if not is_new or (cost := SET_COST + before.bit_count()) > self.budget:
            return None
        self.budget -= cost
        return self.set_head(node, before, best)

    def set_head(self, node: int, before: int, best: int) -> tuple[int, SetArgument] | None:
        # Sorted by falling head, the prefix up to a task is the set of all ancestors whose heads reach its head. So one
        # cumulative sum evaluates every threshold.
        chosen = self.machine.members(before)
        chosen = chosen[np.argsort(-self.start[chosen], kind="stable")]
        ends = self.start[chosen] + self.machine.busy_times(chosen)
        latest = int(ends.argmax())
        end = int(ends[latest])
        if end <= best:
            return None
        return end, SetArgument(node, self.resource, int(self.start[chosen[latest]]))

    def leave(self, node: int, start: int) -> None:
        """Record the final head of a node, and add it to its own set."""
        position = self.machine.position.get(node)
        if position is not None:
            self.start[position] = start
            self.done[node] |= 1 << position


def arguments_for(tasks: Tasks, heads: Heads, levels: dict[int, int]) -> list[SetArgument]:
    """The sets that prove that the heads of some nodes reach some levels, in the order in which they can be checked.

    It walks back from the wanted nodes and keeps only the arguments that they need, so that certificates stay short.
    """
    by_path = path_heads(tasks).start
    wanted = dict(levels)
    needed: list[SetArgument] = []
    for node in reversed(tasks.order):
        level = wanted.get(node, 0)
        if level <= by_path[node]:
            continue
        argument = heads.arguments.get(node)
        if argument is not None:
            needed.append(argument)
            nodes = members(tasks, heads, argument)
            level = argument.threshold
        else:
            nodes = [next(p for p in tasks.preds[node] if heads.start[p] + tasks.duration[p] >= level)]
            level -= tasks.duration[nodes[0]]
        for other in nodes:
            wanted[other] = max(level, wanted.get(other, 0))
    return needed[::-1]


def members(tasks: Tasks, heads: Heads, argument: SetArgument) -> list[int]:
    """The tasks of a set. Heads never fall along an edge, so the search stops at nodes below the threshold."""
    found: set[int] = set()
    stack = [argument.node]
    while stack:
        for pred in tasks.preds[stack.pop()]:
            if pred not in found and heads.start[pred] >= argument.threshold:
                found.add(pred)
                stack.append(pred)
    return [node for node in found if tasks.resource[node] == argument.resource and tasks.duration[node]]
