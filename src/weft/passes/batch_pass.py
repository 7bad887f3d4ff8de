"""Base of the passes that compute several equal, independent calls as one batched call.

Contract: members of a batch do not depend on each other, neither by data nor by effects nor through another batch
(`Contraction` checks this). Nothing that they read or hold is written before the last member. A batch must save time on
the device of the given cluster: fewer kernels mean fewer launch gaps, but stacking the inputs copies their bytes.

A second run may find more. A write to an input of some members splits them into two batches; the first batch then reads
a copy, so a second run may merge what is left. Each run leaves fewer such calls, and the third finds nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from weft.cost.device import Device
from weft.graph.contraction import Contraction
from weft.graph.dag import Dag
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.launches import is_written
from weft.rewriting.pattern import Match
from weft.rewriting.rules import why_not_apply


@dataclass(frozen=True)
class BatchPass(GraphwisePass):
    """Base of the passes that compute several calls as one."""

    min_size: int = 5
    """Minimum number of calls in a batch."""

    max_size: int = 300
    """Maximum number of calls in a batch."""

    always: bool = False
    """Make batches even where they save no time."""

    @abstractmethod
    def key(self, node: Node) -> Hashable | Refusal | None:
        """A key that calls of one batch share, or why a call cannot be batched; None for calls of another kind."""

    def results(self, member: Node) -> list[Node]:
        """The nodes that hold the results of a call: the call itself, or its items."""
        return [member]

    @abstractmethod
    def build(self, draft: Draft, members: Sequence[Node]) -> list[AnyNode]:
        """Plan the batched call; returns a replacement for each result of each member, in order."""

    @abstractmethod
    def times_ns(self, device: Device, members: Sequence[Node]) -> tuple[int | None, int | None]:
        """The time of the members' kernels and of the batch's kernels, both without launch gaps."""

    @abstractmethod
    def num_kernels(self, members: Sequence[Node]) -> int:
        """Number of kernels of a batch: one for each kind of input that is stacked, and those that compute."""

    def plan_one(self, graph: Graph, context: Context) -> Step:
        by_key: dict[Hashable, list[Node]] = {}
        decisions: list[Decision] = []
        for node in graph.nodes:
            key = self.key(node) if node.op == "call_function" else None
            if isinstance(key, Refusal):
                decisions.append(self.decision(key.reason, key.sentence, node.name, blocking=key.blocking))
            elif key is not None:
                by_key.setdefault(key, []).append(node)
        alike = [nodes for nodes in by_key.values() if len(nodes) > 1]
        if not alike:
            return self.step([], decisions)
        draft = Draft(graph)
        dag = Dag(graph, register=[node for nodes in alike for node in nodes], keep_issue_order=True)
        contraction = Contraction(dag)
        written = [node for nodes in alike for node in nodes if is_written(draft, node)]
        decisions += [
            self.decision(Reason.MUTATED, f"{node.name} stays: its result is written later", node.name)
            for node in written
        ]
        left = [[node for node in nodes if node not in written] for nodes in alike]
        made = True
        while made:  # a batch may remove the dependency that kept two other calls apart
            found = [
                (nodes, members, self._batch(draft, dag, contraction, members, context))
                for nodes in left
                for members in self._sets(draft, dag, contraction, nodes)
            ]
            made = any(decision.applied for _, _, decision in found)
            decisions += [decision for _, _, decision in found if decision.applied or not made]
            for nodes, members, decision in found:
                nodes[:] = [node for node in nodes if not decision.applied or node not in members]
        explained = {name for decision in decisions for name in decision.nodes}
        decisions += [
            self.decision(Reason.ALONE, f"{node.name} stays: no call like it is independent of it", node.name)
            for nodes in left
            for node in nodes
            if node.name not in explained
        ]
        return self.step(draft.actions, decisions)

    def _sets(self, draft: Draft, dag: Dag, contraction: Contraction, nodes: Sequence[Node]) -> list[list[Node]]:
        """Sets of nodes that may be batched; each node joins the first set that accepts it."""
        sets: list[list[Node]] = []
        for node in nodes:
            for members in sets:
                ids = [dag.index[n] for n in (*members, node)]
                is_free = len(members) < self.max_size and contraction.why_not_merge(ids) is None
                if is_free and why_not_apply(draft, _match([*members, node])) is None:
                    members.append(node)
                    break
            else:
                sets.append([node])
        return [members for members in sets if len(members) > 1]

    def _batch(
        self, draft: Draft, dag: Dag, contraction: Contraction, members: Sequence[Node], context: Context
    ) -> Decision:
        names = [node.name for node in members]
        refusal = self._why_not(draft, dag, contraction, members, context)
        if refusal is None:
            results = [result for member in members for result in self.results(member)]
            replacements: dict[AnyNode, AnyNode] = dict(zip(results, self.build(draft, members), strict=True))
            checks = (draft.why_not_replace(old, new, keeps_strides=False) for old, new in replacements.items())
            refusal = next(filter(None, checks), None) or draft.replace(replacements, members)
        if refusal is not None:
            draft.forget()
            return self.decision(refusal.reason, refusal.sentence, *names, blocking=refusal.blocking)
        contraction.merge([dag.index[node] for node in members])
        return self.decision(Reason.APPLIED, f"computed {', '.join(names)} as one batch", *names)

    def _why_not(
        self, draft: Draft, dag: Dag, contraction: Contraction, members: Sequence[Node], context: Context
    ) -> Refusal | None:
        first = members[0].name
        if len(members) < self.min_size:
            sentence = f"{first} stays: its batch would have {len(members)} calls, and min-size is {self.min_size}"
            return Refusal(Reason.ALONE, sentence)
        needed = contraction.why_not_merge([dag.index[node] for node in members])
        if needed is not None:
            return Refusal(Reason.DEPENDENCY, f"{first} stays: others of its batch depend on {dag.nodes[needed].name}")
        refusal = why_not_apply(draft, _match(members))
        if refusal is not None or self.always:
            return refusal
        if context.cluster is None:
            return Refusal(Reason.NO_GAIN, f"{first} stays: without a cluster the gain of a batch is unknown")
        device = context.cluster.device
        separate, batched = self.times_ns(device, members)
        if separate is None or batched is None:
            return Refusal(Reason.UNKNOWN_SIZE, f"{first} stays: the device description lacks a rate for it")
        gaps = round(device.launch_gap_us * 1000) * (len(members) - self.num_kernels(members))
        if batched >= separate + gaps:
            return Refusal(Reason.NO_GAIN, f"{first} stays: stacking its batch would take longer than it saves")
        return None


def _match(members: Sequence[Node]) -> Match:
    return Match(nodes=list(members), roots=tuple(members))


def with_own_memory(draft: Draft, part: AnyNode, member: Node) -> AnyNode:
    """A slice of a batch's result; a copy of it if the graph returns it or a user depends on its layout."""
    returned = draft.dag.effects.held_by_outputs.intersection(draft.held(member))
    if not returned and draft.why_not_replace(member, part, keeps_strides=False) is None:
        return part
    if draft.value(part).stride() == draft.value(member).stride():
        return draft.call("clone", part, before=member)
    return draft.call("clone", part, before=member, memory_format=torch.contiguous_format)


def is_sized(*values: object) -> bool:
    """Whether all values are tensors of known sizes."""
    return all(isinstance(v, Tensor) and all(type(size) is int for size in v.shape) for v in values)


def bytes_of(*values: Tensor) -> int:
    """Total size of tensors in bytes."""
    return sum(value.numel() * value.element_size() for value in values)


def product_ns(device: Device, flops: int, moved: int, value: Tensor) -> int | None:
    """The time of a matmul: that of its flops or that of its bytes, whichever is longer."""
    flops_ns, traffic_ns = device.product_ns(flops, value.dtype), device.traffic_ns(moved)
    return None if flops_ns is None or traffic_ns is None else max(flops_ns, traffic_ns)
