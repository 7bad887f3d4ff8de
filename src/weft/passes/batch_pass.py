"""Batches: calls that are alike and need not wait for each other, made as one.

Contract: members of a batch are independent by data and by effects, also by way of other batches (`Contraction`), and
nothing that they read or hold is written before the last of them. A batch is made where that saves time on the device
of the cluster that is given: kernels pay a gap each, laying tensors side by side pays their bytes.

A batch takes copies. So calls that a write to what some of them take kept apart may be alike in a second run: those
before the write are then one call of a copy. Each run makes fewer calls of the same, and the third finds nothing.
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
    """Base of the passes that make one call of several."""

    min_size: int = 5
    """Fewer calls than this are left alone."""

    max_size: int = 300
    """No batch has more calls than this."""

    always: bool = False
    """Make batches whatever they cost."""

    @abstractmethod
    def key(self, node: Node) -> Hashable | Refusal | None:
        """What calls of one batch have in common, or why a call is in none; None for calls of another kind."""

    def results(self, member: Node) -> list[Node]:
        """The nodes that hold what a call computes: the call, or its items."""
        return [member]

    @abstractmethod
    def build(self, draft: Draft, members: Sequence[Node]) -> list[AnyNode]:
        """Plan the batch; returns what stands for each result of each member."""

    @abstractmethod
    def times_ns(self, device: Device, members: Sequence[Node]) -> tuple[int | None, int | None]:
        """How long the kernels of the members take, and those of their batch, without the gaps between them."""

    @abstractmethod
    def num_kernels(self, members: Sequence[Node]) -> int:
        """How many kernels a batch takes: one for each kind of tensor that is laid side by side, and one to compute."""

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
            self.decision(Reason.MUTATED, f"{node.name} stays: its result is written", node.name) for node in written
        ]
        left = [[node for node in nodes if node not in written] for nodes in alike]
        made = True
        while made:  # what one batch keeps apart, another may bring together
            found = [
                (nodes, members, self._batch(draft, dag, contraction, members, context))
                for nodes in left
                for members in self._sets(draft, dag, contraction, nodes)
            ]
            made = any(decision.applied for _, _, decision in found)
            decisions += [decision for _, _, decision in found if decision.applied or not made]
            for nodes, members, decision in found:
                nodes[:] = [node for node in nodes if not decision.applied or node not in members]
        told = {name for decision in decisions for name in decision.nodes}
        decisions += [
            self.decision(Reason.ALONE, f"{node.name} stays: it can be one with none that are like it", node.name)
            for nodes in left
            for node in nodes
            if node.name not in told
        ]
        return self.step(draft.actions, decisions)

    def _sets(self, draft: Draft, dag: Dag, contraction: Contraction, nodes: Sequence[Node]) -> list[list[Node]]:
        """The nodes in sets that can be one, each node in the first that takes it."""
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
        return self.decision(Reason.APPLIED, f"{', '.join(names)} are computed as one", *names)

    def _why_not(
        self, draft: Draft, dag: Dag, contraction: Contraction, members: Sequence[Node], context: Context
    ) -> Refusal | None:
        first = members[0].name
        if len(members) < self.min_size:
            return Refusal(Reason.ALONE, f"{first} stays: there are {len(members)} like it, {self.min_size} pay")
        needed = contraction.why_not_merge([dag.index[node] for node in members])
        if needed is not None:
            return Refusal(Reason.DEPENDENCY, f"{first} stays: others of its batch need {dag.nodes[needed].name}")
        refusal = why_not_apply(draft, _match(members))
        if refusal is not None or self.always:
            return refusal
        if context.cluster is None:
            return Refusal(Reason.NO_GAIN, f"{first} stays: without a cluster nobody knows whether a batch pays")
        device = context.cluster.device
        apart, together = self.times_ns(device, members)
        if apart is None or together is None:
            return Refusal(Reason.UNKNOWN_SIZE, f"{first} stays: the device does not say how long it takes")
        gaps = round(device.launch_gap_us * 1000) * (len(members) - self.num_kernels(members))
        if together >= apart + gaps:
            return Refusal(Reason.NO_GAIN, f"{first} stays: laying tensors side by side takes longer than is saved")
        return None


def _match(members: Sequence[Node]) -> Match:
    return Match(nodes=list(members), roots=tuple(members))


def with_own_memory(draft: Draft, part: AnyNode, member: Node) -> AnyNode:
    """A part of a batch, as a tensor of its own where the graph returns it or somebody minds where it lies."""
    returned = draft.dag.effects.held_by_outputs.intersection(draft.held(member))
    if not returned and draft.why_not_replace(member, part, keeps_strides=False) is None:
        return part
    if draft.value(part).stride() == draft.value(member).stride():
        return draft.call("clone", part, before=member)
    return draft.call("clone", part, before=member, memory_format=torch.contiguous_format)


def is_sized(*values: object) -> bool:
    """Whether values are tensors whose sizes are numbers."""
    return all(isinstance(v, Tensor) and all(type(size) is int for size in v.shape) for v in values)


def bytes_of(*values: Tensor) -> int:
    """Bytes of tensors."""
    return sum(value.numel() * value.element_size() for value in values)


def product_ns(device: Device, flops: int, moved: int, value: Tensor) -> int | None:
    """The time of a product: of its flops or of its bytes, whichever is longer."""
    flops_ns, traffic_ns = device.product_ns(flops, value.dtype), device.traffic_ns(moved)
    return None if flops_ns is None or traffic_ns is None else max(flops_ns, traffic_ns)
