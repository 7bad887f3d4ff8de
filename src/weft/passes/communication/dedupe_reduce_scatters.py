"""Reduce a sum once instead of summing two reductions.

Why: a weight that is used twice has two gradients, which are scattered separately and then added. Adding them before
the reduce-scatter gives the same result with half the bytes on the wire.

Before::

    rs0: f32[2, 4] = reduce_scatter(a, 'sum', 2, 'dp')
    w0: f32[2, 4] = wait(rs0)
    rs1: f32[2, 4] = reduce_scatter(b, 'sum', 2, 'dp')
    w1: f32[2, 4] = wait(rs1)
    s: f32[2, 4] = add(w0, w1)

After::

    s_sent: f32[4, 4] = add(a, b)
    rs1_sum: f32[2, 4] = reduce_scatter(s_sent, 'sum', 2, 'dp')
    s_done: f32[2, 4] = wait(rs1_sum)

Sums of more than two reductions are folded too, and all-reduces like reduce-scatters. The reduce operator must be `sum`
or `avg`.

Declines: a result with other users; launches that differ in group, reduce operator or dtype; an addition with a factor;
a buffer that is written; a launch that does not return a new tensor.
Numerics: reassociates. Bytes on the wire: fewer. Memory: one sum in place of two buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from weft.bucketing.eligibility import Touches
from weft.graph import metadata, ops
from weft.graph.collective import Collective
from weft.graph.edit import Edit
from weft.graph.versions import dag_of
from weft.passes.base import NamedNodes, Numerics, Pass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Fold, Step

ADDITIVE = ("sum", "avg")
ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class DedupeReduceScatters(Pass):
    """Replace a sum of reductions with a reduction of the sum."""

    numerics = Numerics.REASSOCIATES
    reorders_launches = True

    def plan(self, graph: Graph, context: Context) -> Step:
        dag = dag_of(graph)
        touches = Touches(dag)
        trees: dict[Node, list[Node]] = {}
        decisions: list[Decision] = []
        for node in dag.nodes:
            launches = [launch for source in _addends(node) if (launch := _first_launch(source, trees)) is not None]
            if len(launches) != 2:
                continue
            names = tuple(launch.name for launch in launches)
            withheld = context.withheld.get(context.groups.canonical(Collective(launches[0]).group))
            refusal = Refusal(Reason.OTHER_RANKS, withheld) if withheld is not None else None
            refusal = refusal or _why_not(node, launches[0], launches[1], touches, trees)
            if refusal is not None:
                sentence = f"{node.name} still adds the results of {names[0]} and {names[1]}: {refusal.sentence}"
                decisions.append(self.decision(refusal.reason, sentence, *names, blocking=refusal.blocking))
                continue
            first, second = (trees.pop(source, []) for source in _addends(node))
            first += [*second, node]  # in place: copying would make long chains of additions quadratic
            trees[node] = first
            sentence = f"moved the addition {node.name} before {names[0]} and {names[1]}, which become one reduction"
            decisions.append(self.decision(Reason.APPLIED, sentence, *names))
        return self.step((Fold(tuple(n.name for n in tree)) for tree in trees.values()), decisions)

    def apply(self, edit: Edit, step: Step) -> None:
        nodes = NamedNodes(edit.graph.nodes)
        position = {node: i for i, node in enumerate(edit.graph.nodes)}
        replacements: dict[Node, Node] = {}
        for action in step.actions:
            if isinstance(action, Fold):
                tree = [nodes[name] for name in action.additions]
                replacements[tree[-1]] = _fold(edit, tree, position)
        edit.replace_each(replacements)


def _addends(node: Node) -> list[Node]:
    """The two tensors that a node adds."""
    found = [a for a in node.args if isinstance(a, Node)] if node.target is ADD else []
    return found if len(found) == 2 else []


def _first_launch(node: Node, trees: dict[Node, list[Node]]) -> Node | None:
    """The launch of the reduction that a node waits for, or the first one of a folded sum."""
    if node in trees:
        return _first_launch(_addends(trees[node][0])[0], {})
    launch = node.args[0] if ops.is_wait(node.target) else None
    form = ops.launch_form(launch.target) if isinstance(launch, Node) else None
    return launch if form is not None and form.kind in ops.REDUCTIONS and isinstance(launch, Node) else None


def _why_not(node: Node, first: Node, second: Node, touches: Touches, trees: dict[Node, list[Node]]) -> Refusal | None:
    values = [ops.value_of(n) for n in (node, *_addends(node))]
    keys = [_key(first), _key(second)]
    exact_sums = keys[0][1] == "sum" or (isinstance(values[0], Tensor) and values[0].dtype.is_floating_point)
    if keys[0] != keys[1] or keys[0][1] not in ADDITIVE or not exact_sums:
        return Refusal(Reason.UNSUPPORTED_FORM, "they differ in group or reduce operator, or do not sum or average")
    if node.kwargs or not metadata.same(values[0], values[1]) or not metadata.same(values[0], values[2]):
        return Refusal(Reason.UNSUPPORTED_FORM, "the addition scales, broadcasts or casts")
    for addend in _addends(node):
        other = next((user for user in addend.users if user is not node), None)
        if other is not None or addend is _addends(node)[0] is _addends(node)[1]:
            return Refusal(Reason.UNSUPPORTED_FORM, "one of them has other users", other and other.name)
        if addend in trees:
            continue
        launch: Any = addend.args[0]
        collective = Collective(launch)
        if len(launch.users) > 1 or collective.form.coalesced or not collective.is_functional:
            return Refusal(Reason.UNSUPPORTED_FORM, f"{launch.name} does not return one new tensor to one wait")
        if touches.is_written(collective.inputs[0]):
            return Refusal(Reason.MUTATED, f"the tensor that {launch.name} sends is written", collective.inputs[0].name)
    return None


def _key(launch: Node) -> tuple[Any, ...]:
    collective = Collective(launch)
    return launch.target, collective.reduce_op, collective.group, ops.bind(launch).get("group_size")


def _leaves(node: Node, tree: set[Node]) -> Iterator[Node]:
    """The launches whose results a tree of additions sums, in order."""
    stack = [node]
    while stack:
        top = stack.pop()
        if top in tree:
            stack += reversed(_addends(top))
        else:
            yield top.args[0]  # type: ignore[misc]


def _fold(edit: Edit, tree: list[Node], position: dict[Node, int]) -> Node:
    """Create the additions, the launch and the wait; erase the nodes that they replace. Returns the wait."""
    inner, root = set(tree), tree[-1]
    launches = list(_leaves(root, inner))
    last = max(launches, key=position.__getitem__)
    sums: dict[Node, Node] = {}
    for addition in tree:
        operands = [sums[a] if a in inner else Collective(a.args[0]).inputs[0] for a in _addends(addition)]  # type: ignore[arg-type]
        sums[addition] = edit.call(ADD, tuple(operands), before=last, name=f"{addition.name}_sent", like=[addition])
    form = Collective(last).form
    arguments = {**ops.bind(last), form.tensors: sums[root]}
    target: Any = last.target
    launch = edit.call(
        target,
        tuple(arguments.values()),
        before=last,
        name=f"{last.name}_sum",
        like=[launches[0]],
        annotated=launches,
    )
    wait = edit.call(ops.op_names()["wait"], (launch,), before=root, name=f"{root.name}_done", like=[root])
    for node in (*tree, *(a for addition in tree for a in _addends(addition) if a not in inner), *launches):
        edit.erase(node)
    return wait
