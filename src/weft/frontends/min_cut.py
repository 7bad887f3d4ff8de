"""The values that torch.compile saves for backward: AOTAutograd's min-cut, asked region by region.

Contract: `recomputed` says for each forward node of a region whether backward computes it again; `cleanup` carries that
out. A region is a layer, or what lies outside of the layers, by `provenance.region_of`: training programs compile layer
by layer, and alike layers get the same answer, so that a deep model costs no more than a shallow one. Weights, and what
is made of them alone (casts, gathers), are inputs of a region, as under FSDP2: the policies of their own decide them.

The policies of selective checkpointing bind the min-cut as they bind AOTAutograd. A region that computes gradients
inside forward, as a chunked loss does, is left as autograd has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from weft.compat import input_nodes, min_cut_partition
from weft.cost.flops import flops_of
from weft.frontends.cleanup import sources
from weft.frontends.provenance import BACKWARD, FORWARD, in_layer, policy_of, region_of
from weft.graph import metadata, ops
from weft.graph.edit import Edit, finish
from weft.graph.operator_effects import draws

Partition = Literal["autograd", "min-cut", "min-cut-layers"]
"""Who chooses the values that backward finds. Autograd saves what each operator asks for. With `min-cut` AOTAutograd
chooses in all regions, with `min-cut-layers` in the layers only: the rest of the model then runs uncompiled."""

aten = torch.ops.aten
STAND_INS: Mapping[str, Any] = {
    "aten::transpose.int": aten.permute.default,
    "aten::t": aten.permute.default,
    "aten::roll": aten.index.Tensor,
    "aten::_log_softmax": aten.exp.default,
    "aten::_log_softmax_backward_data": aten.mul.Tensor,
    "aten::nll_loss_forward": aten.sum.default,
    "aten::nll_loss_backward": aten.mul.Tensor,
}
"""Operators that a compiler decomposes before the cut, and the part of the decomposition that decides how the cut sees
them. The stand-ins are never run."""
ATTENTION = "aten::_scaled_dot_product_"


def recomputed(traced: GraphModule, num_state: int, layers_only: bool, memory_budget: float) -> dict[Node, bool]:
    """Whether backward computes a forward node again, for the nodes of all regions, or of layers only.

    The first `num_state` inputs are parameters, buffers and optimizer state. `memory_budget` is the share of what the
    plain min-cut of a region saves beyond its inputs.
    """
    names = sources(traced)

    def source_of(node: Node) -> Node:
        return names.get(node, node)

    answers: dict[Any, tuple[bool, ...]] = {}
    again: dict[Node, bool] = {}
    for region in _regions(traced, num_state, source_of):
        if not region.backward or (layers_only and not in_layer(region.forward[0])):
            continue
        if _has_gradients_in_forward(region, source_of):
            continue
        joint = _Joint(region, source_of)
        if joint.key not in answers:
            answers[joint.key] = joint.cut(memory_budget)
        again.update(zip(region.forward, answers[joint.key], strict=True))
    return again


@dataclass
class _Region:
    """The nodes of one region, in the order of the trace."""

    forward: list[Node] = field(default_factory=list[Node])
    backward: list[Node] = field(default_factory=list[Node])


def _regions(traced: GraphModule, num_state: int, source_of: Callable[[Node], Node]) -> Iterable[_Region]:
    found: dict[str, _Region] = {}
    of_batch: set[Node] = set()
    for number, node in enumerate(traced.graph.nodes):
        if (node.op == "placeholder" and number >= num_state) or any(x in of_batch for x in input_nodes(node)):
            of_batch.add(node)
        tag = node.meta.get("partitioner_tag")
        if node.op != "call_function" or source_of(node) is not node:
            continue
        if tag == BACKWARD:
            found.setdefault(region_of(node), _Region()).backward.append(node)
        elif tag == FORWARD and node in of_batch:
            found.setdefault(region_of(node), _Region()).forward.append(node)
    return [region for region in found.values() if region.forward]


def _has_gradients_in_forward(region: _Region, source_of: Callable[[Node], Node]) -> bool:
    """Whether forward reads what backward computes, as a chunked loss does: nothing is left to be saved or not."""
    backward = {*region.backward}
    return any(source_of(source) in backward for node in region.forward for source in input_nodes(node))


class _Joint:
    """The joint graph of one region, in the form that AOTAutograd partitions."""

    def __init__(self, region: _Region, source_of: Callable[[Node], Node]) -> None:
        self.region, self.source_of = region, source_of
        self.edit = Edit(Graph(), mode=metadata.mode_of(region.forward))
        self.made: dict[Node, Node] = {}
        self.key: Any = None
        inside = {*region.forward, *region.backward}
        members = [*region.forward, *region.backward]
        inputs = dict.fromkeys(
            source for node in members for source in map(source_of, input_nodes(node)) if source not in inside
        )
        # AOTAutograd knows the two kinds of inputs by their names.
        is_tangent = {node: node.meta.get("partitioner_tag") == BACKWARD for node in inputs}
        for number, node in enumerate(sorted(inputs, key=is_tangent.__getitem__)):
            word = "tangents" if is_tangent[node] else "primals"
            self.made[node] = self.edit.placeholder(f"{word}_{number}", ops.value_of(node))
        parts = [self._add(node, "is_forward") for node in region.forward]
        parts += [self._add(node, "must_be_in_backward") for node in region.backward]
        first, second = (
            [node for node in nodes if self._leaves(node, inside)] for nodes in (region.forward, region.backward)
        )
        self.edit.output(tuple(self.made[node] for node in (*first, *second)))
        self.num_forward_outputs = len(first)
        shapes = [str(ops.value_of(node)) for node in inputs]
        self.key = (tuple(parts), tuple(shapes), tuple(members.index(node) for node in (*first, *second)))

    def _add(self, node: Node, tag: str) -> Any:
        """Add a node; returns all that the cut may look at, in terms of the region alone."""
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda source: self.made[self.source_of(source)])
        made = self.edit.call(_stand_in(node), args, kwargs, value=ops.value_of(node))
        made.meta["partitioner_tag"] = tag
        policy = policy_of(node) if tag == "is_forward" else None
        if policy is not None:
            made.meta["recompute"] = CheckpointPolicy.MUST_SAVE if draws(node) else policy
        self.made[node] = made
        return str(made.target), str(args), str(kwargs), str(made.meta["val"]), str(policy)

    def _leaves(self, node: Node, inside: Collection[Node]) -> bool:
        """Whether a node outside of the region uses the value."""
        reached = [node]
        for name in reached:  # grows by the nodes that only rename the value
            for user in name.users:
                if user.op == "call_function" and self.source_of(user) is not user:
                    reached.append(user)
                elif user not in inside:
                    return True
        return False

    def cut(self, memory_budget: float) -> tuple[bool, ...]:
        """Whether backward computes each forward node of the region again."""
        flops = {self.made[node].name: _flops(node) for node in self.region.forward}
        _, backward = min_cut_partition(
            finish({}, self.edit.graph),
            self.num_forward_outputs,
            memory_budget,
            lambda node: float(flops[node.name]),
        )
        names = {node.name for node in backward.graph.nodes if node.op == "call_function"}
        return tuple(self.made[node].name in names for node in self.region.forward)


def _flops(node: Node) -> int:
    """The flops of a node as torch counts them: at least one, and causal attention in full."""
    bound = ops.bind(node) if isinstance(node.target, ops.OpOverload) else {}
    return max((flops_of(node) or 0) * (2 if bound.get("is_causal") else 1), 1)


def _stand_in(node: Node) -> Any:
    target: Any = node.target
    if not isinstance(target, ops.OpOverload):
        return target
    # A product stands in for attention, because AOTAutograd would carry the generator's state along with attention.
    return aten.bmm.default if target.name().startswith(ATTENTION) else STAND_INS.get(target.name(), target)
