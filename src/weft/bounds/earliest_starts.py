"""Heads: the earliest moment at which each node can start, whatever the order. On reversed tasks: tails.

Contract: a head is the maximum of two kinds of argument. By path: a predecessor's head and its duration. By set: for
each resource and each threshold, what must be done before on that resource and cannot start before the threshold takes
its time after it. Heads of what comes before are such heads themselves: hence recursive.

A set says something new only where two predecessors bring different ancestors, so all other nodes are passed over. Sets
are integers with one bit per task of the resource; a node's set is dropped once its last successor has seen it. Where
sets are many and large, only as many are looked at as the budget allows, spread evenly: heads are lower, not wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.bounds.problem import COMPUTE, Machine, Tasks

BUDGET = 40_000_000
"""Members of the sets of one resource that are looked at, in all: a few seconds."""
SET_COST = 500
"""What looking at a set costs beside its members, in members."""


@dataclass(frozen=True)
class SetArgument:
    """A node starts no earlier than `threshold` + the time of its ancestors on the resource whose heads reach it."""

    node: int
    resource: int
    threshold: int


@dataclass(frozen=True)
class Heads:
    """The heads of all nodes, and the sets that they rest on beside paths."""

    start: list[int]
    arguments: dict[int, SetArgument]
    """By node: where a set says more than all paths."""
    compute_before: dict[int, int]
    """By collective, the compute that is done before it: a bit for each task of the stream, in order."""


def path_heads(tasks: Tasks) -> Heads:
    """Heads by paths alone."""
    start = [0] * len(tasks.preds)
    for node in tasks.order:
        start[node] = path_head(tasks, start, node)
    return Heads(start, {}, {})


def path_head(tasks: Tasks, start: list[int], node: int) -> int:
    return max((start[pred] + tasks.duration[pred] for pred in tasks.preds[node]), default=0)


def find_heads(tasks: Tasks) -> Heads:
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
    """One resource while heads are found: what is done before each node, and the heads of its tasks so far."""

    def __init__(self, tasks: Tasks, resource: int) -> None:
        self.tasks = tasks
        self.resource = resource
        self.machine = Machine(tasks, resource)
        self.done = [0] * len(tasks.preds)
        """By node, the tasks that are done when it is, itself included."""
        self.start = np.zeros(len(self.machine.nodes), np.int64)
        self.income = max(1, BUDGET // max(1, len(tasks.order)))
        self.budget = 0

    def enter(self, node: int, best: int) -> tuple[int, SetArgument] | None:
        """Collect what is done before a node; the head that it forces where that is more than the best so far."""
        preds = self.tasks.preds[node]
        done = self.done
        self.budget += self.income
        if not preds:
            return None
        before = done[preds[0]]
        is_new = False
        for pred in preds[1:]:
            union = before | done[pred]
            is_new = (is_new or union != before) and union != done[pred]
            before = union
        done[node] = before
        if not is_new or (cost := SET_COST + before.bit_count()) > self.budget:
            return None
        self.budget -= cost
        return self.force(node, before, best)

    def force(self, node: int, before: int, best: int) -> tuple[int, SetArgument] | None:
        chosen = self.machine.members(before)
        chosen = chosen[np.argsort(-self.start[chosen], kind="stable")]
        ends = self.start[chosen] + self.machine.spans(chosen)
        latest = int(ends.argmax())
        end = int(ends[latest])
        if end <= best:
            return None
        return end, SetArgument(node, self.resource, int(self.start[chosen[latest]]))

    def leave(self, node: int, start: int) -> None:
        position = self.machine.position.get(node)
        if position is not None:
            self.start[position] = start
            self.done[node] |= 1 << position


def arguments_for(tasks: Tasks, heads: Heads, levels: dict[int, int]) -> list[SetArgument]:
    """The sets that prove that the heads of some nodes reach some levels, in the order in which they can be checked."""
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
    """The tasks of a set. Heads never fall along an edge, so what is below the threshold has nothing behind it."""
    found: set[int] = set()
    stack = [argument.node]
    while stack:
        for pred in tasks.preds[stack.pop()]:
            if pred not in found and heads.start[pred] >= argument.threshold:
                found.add(pred)
                stack.append(pred)
    return [node for node in found if tasks.resource[node] == argument.resource and tasks.duration[node]]
