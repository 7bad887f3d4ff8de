"""Compute equal pointwise operators as one, on stacked inputs.

Why: where no compiler fuses kernels, hundreds of small activations are one kernel each, and the device idles between
them.

Before::

    t0: f32[8, 4] = tanh(x0)
    t1: f32[8, 4] = tanh(x1)

After::

    t1_stack: f32[2, 8, 4] = stack([x0, x1])
    t1_tanh: f32[2, 8, 4] = tanh(t1_stack)
    t1_select: f32[8, 4] = select.int(t1_tanh, 0, 0)
    t1_select_1: f32[8, 4] = select.int(t1_tanh, 0, 1)

`BATCHED` lists the operators. Members of a batch have inputs of the same shape and dtype, results of the same layout,
and equal numbers among their arguments. Tensors that are not contiguous are stacked in their order in memory.

Declines: operators that depend on each other; inputs or results that are written; fewer calls than `min-size`; batches
that would not save time, and any batch without a cluster to predict times on.
Numerics: reassociates; the last bit of a tanh may depend on the element's position in memory. Memory: one copy of the
inputs.
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
    """Compute equal pointwise operators as one."""

    numerics = Numerics.REASSOCIATES

    def key(self, node: Node) -> Hashable | Refusal | None:
        if node.target not in BATCHED:
            return None
        given, result = ops.bind(node), ops.value_of(node)
        sources = [value for value in given.values() if isinstance(value, Node)]
        values = [ops.value_of(source) for source in sources]
        if not is_sized(result, *values):
            return Refusal(Reason.UNKNOWN_SIZE, f"{node.name} stays: its sizes are not known")
        if any(source.target is STACK for source in sources):
            return Refusal(Reason.ALREADY_DONE, f"{node.name} stays: it is already a batch")
        if not all(v.shape == result.shape for v in values):
            return Refusal(Reason.ALONE, f"{node.name} stays: an input has another shape than the result")
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
        single = device.traffic_ns(moved)
        batched = device.traffic_ns((moved + 2 * bytes_of(*values)) * len(members))
        return (None if single is None else single * len(members)), batched


def _order(result: Tensor) -> tuple[int, ...] | None:
    """The order of dims in which a result is contiguous; None if it has gaps in memory."""
    order = tuple(sorted(range(result.dim()), key=lambda dim: (-result.stride(dim), dim)))
    return order if result.permute(order).is_contiguous() else None


def _ordered(node: Node, given: Mapping[str, Any]) -> list[Any]:
    return [given[name] for name, keyword_only, _, _ in ops.parameters(node.target) if not keyword_only]


def _named(node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments that differ from their defaults."""
    parameters = ops.parameters(node.target)
    return {name: given[name] for name, only, _, default in parameters if only and given[name] != default}
