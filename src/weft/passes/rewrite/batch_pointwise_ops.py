"""Compute pointwise operators that are alike as one, on tensors that are stacked.

Why: where nothing below fuses kernels, hundreds of small activations pay a gap each.

Before::

    t0: f32[8, 4] = tanh(x0)
    t1: f32[8, 4] = tanh(x1)

After::

    t1_stack: f32[2, 8, 4] = stack([x0, x1])
    t1_tanh: f32[2, 8, 4] = tanh(t1_stack)
    t1_select: f32[8, 4] = select.int(t1_tanh, 0, 0)
    t1_select_1: f32[8, 4] = select.int(t1_tanh, 0, 1)

Operators are those of `BATCHED`, on tensors of one shape and dtype with results of one layout; numbers among their
arguments are the same. Results that are not contiguous are stacked in the order in which they lie.

Declines: operators that need each other; inputs or results that are written; too few of them; where stacking costs more
than is saved, and without a cluster to say so.
Numerics: reassociates; the last digit of a tanh may depend on its place in memory. Memory: a copy of the inputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from weft.cost.device import Device
from weft.graph import ops
from weft.passes.base import Numerics
from weft.passes.batch_pass import BatchPass, bytes_of, is_sized, with_own_memory
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft

BATCHED = frozenset(
    ops.op_of(name)
    for name in (
        "tanh",
        "sigmoid",
        "relu",
        "add",
        "sub",
        "mul",
        "div",
        "exp",
        "neg",
        "clamp",
        "clamp.default",
        "nan_to_num",
    )
)
STACK = ops.op_of("stack")


@dataclass(frozen=True)
class BatchPointwiseOps(BatchPass):
    """Compute pointwise operators that are alike as one."""

    numerics = Numerics.REASSOCIATES

    def key(self, node: Node) -> Hashable | Refusal | None:
        if node.target not in BATCHED:
            return None
        given, result = ops.bind(node), ops.value_of(node)
        sources = [value for value in given.values() if isinstance(value, Node)]
        values = [ops.value_of(source) for source in sources]
        if not is_sized(result, *values):
            return Refusal(Reason.UNKNOWN_SIZE, f"{node.name} stays: its sizes are no numbers")
        if any(source.target is STACK for source in sources):
            return Refusal(Reason.ALREADY_DONE, f"{node.name} stays: it is a batch")
        if not all(v.shape == result.shape for v in values):
            return Refusal(Reason.ALONE, f"{node.name} stays: what it takes is not of its shape")
        order = _order(result)
        if order is None:
            return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: its result has gaps in memory")
        numbers = tuple((name, str(value)) for name, value in given.items() if not isinstance(value, Node))
        return node.target, numbers, tuple(result.shape), order, tuple((v.dtype, v.device) for v in values)

    def build(self, draft: Draft, members: Sequence[Node]) -> list[AnyNode]:
        last = max(members, key=draft.position)
        given = [draft.bind(node) for node in members]
        order = _order(draft.value(last)) or ()
        back = tuple(map(order.index, range(len(order))))

        def turned(node: AnyNode, dims: tuple[int, ...]) -> AnyNode:
            return node if list(dims) == sorted(dims) else draft.call("permute", node, list(dims), before=last)

        stacked = {
            name: draft.call("stack", [turned(g[name], order) for g in given], before=last)
            if isinstance(value, AnyNode)
            else value
            for name, value in given[0].items()
        }
        result = draft.call(last.target, *_ordered(last, stacked), before=last, **_named(last, stacked))
        parts = [turned(draft.call("select.int", result, 0, k, before=last), back) for k in range(len(members))]
        return [with_own_memory(draft, part, member) for part, member in zip(parts, members, strict=True)]

    def num_kernels(self, members: Sequence[Node]) -> int:
        return len(members[0].all_input_nodes) + 1

    def times_ns(self, device: Device, members: Sequence[Node]) -> tuple[int | None, int | None]:
        values = [v for n in members[0].all_input_nodes if isinstance(v := ops.value_of(n), Tensor)]
        moved = bytes_of(*values, ops.value_of(members[0]))
        alone = device.traffic_ns(moved)
        together = device.traffic_ns((moved + 2 * bytes_of(*values)) * len(members))
        return (None if alone is None else alone * len(members)), together


def _order(result: Tensor) -> tuple[int, ...] | None:
    """The order of dims in which a result is contiguous; None where it is in none."""
    order = tuple(sorted(range(result.dim()), key=lambda dim: (-result.stride(dim), dim)))
    return order if result.permute(order).is_contiguous() else None


def _ordered(node: Node, given: Mapping[str, Any]) -> list[Any]:
    return [given[name] for name, keyword_only, _, _ in ops.parameters(node.target) if not keyword_only]


def _named(node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by keyword that are not at their defaults."""
    parameters = ops.parameters(node.target)
    return {name: given[name] for name, only, _, default in parameters if only and given[name] != default}
