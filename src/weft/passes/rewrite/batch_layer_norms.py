"""Compute layer norms of equal shape as one layer norm of the stacked inputs.

Why: towers and experts normalise many small activations one at a time, and the device idles between the kernels.

Before::

    n0: f32[8, 4] = layer_norm(x0, [4], w0, b0)
    n1: f32[8, 4] = layer_norm(x1, [4], w1, b1)

After::

    n1_stack: f32[2, 8, 4] = stack([x0, x1])
    n1_layer_norm: f32[2, 8, 4] = layer_norm(n1_stack, [4], None, None, 1e-05)
    n1_stack_1: f32[2, 4] = stack([w0, w1])
    n1_view: f32[2, 1, 4] = view(n1_stack_1, [2, 1, 4])
    n1_mul: f32[2, 8, 4] = mul(n1_layer_norm, n1_view)
    ...
    n1_select: f32[8, 4] = select.int(n1_add, 0, 0)

Weights and biases that all members share are passed to the batched norm; different ones are stacked, and multiplied and
added after it. For 16-bit floats that would round once more, so only norms with the same weights and biases are
batched. The pass knows `layer_norm` and `native_layer_norm`, whose means and deviations are slices of those of the
batch.

Declines: norms that depend on each other; inputs or results that are written; fewer norms than `min-size`; results used
other than item by item; batches that would not save time, and any batch without a cluster to predict times on.
Numerics: reassociates; another kernel may sum in another order. Memory: one copy of the inputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from weft.cost.device import Device
from weft.graph import ops
from weft.passes.base import Numerics
from weft.passes.batch_pass import BatchPass, bytes_of, is_sized, with_own_memory
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft

NORM, NATIVE_NORM = ops.op_of("layer_norm"), ops.op_of("native_layer_norm")
STACK, ITEM = ops.op_of("stack"), ops.op_of("operator.getitem")
AFFINE = ("weight", "bias")


@dataclass(frozen=True)
class BatchLayerNorms(BatchPass):
    """Compute layer norms of equal shape as one."""

    numerics = Numerics.REASSOCIATES

    def key(self, node: Node) -> Hashable | Refusal | None:
        if node.target not in (NORM, NATIVE_NORM) or not node.users:
            return None
        given = ops.bind(node)
        values = {name: ops.value_of(given[name]) for name in ("input", *AFFINE) if isinstance(given[name], Node)}
        if not is_sized(*values.values()) or not all(type(n) is int for n in given["normalized_shape"]):
            return Refusal(Reason.UNKNOWN_SIZE, f"{node.name} stays: its sizes are not known")
        if given["input"].target is STACK:
            return Refusal(Reason.ALREADY_DONE, f"{node.name} stays: it is already a batch")
        taker = next((user for user in node.users if _number_of(user) is None), None)
        if node.target is NATIVE_NORM and taker is not None:
            return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: {taker.name} uses all its results", taker.name)
        value: Tensor = values["input"]
        dtypes = {v.dtype for v in values.values()}
        may_differ = dtypes in ({torch.float32}, {torch.float64})
        affine = tuple(given[name] is not None if may_differ else given[name] for name in AFFINE)
        kind = (tuple(value.shape), value.dtype, value.device, tuple(given["normalized_shape"]), given["eps"])
        return node.target, kind, affine

    def results(self, member: Node) -> list[Node]:
        return [member] if member.target is NORM else list(member.users)

    def build(self, draft: Draft, members: Sequence[Node]) -> list[AnyNode]:
        last = max(members, key=draft.position)
        given = [draft.bind(node) for node in members]
        stacked = draft.call("stack", [g["input"] for g in given], before=last)
        shape = list(given[0]["normalized_shape"])
        is_shared = all(_is_shared(given, name) for name in AFFINE)
        shared = [given[0][name] if is_shared else None for name in AFFINE]
        norm = draft.call(last.target, stacked, shape, *shared, given[0]["eps"], before=last)
        outputs: dict[int, AnyNode] = {0: norm}
        if last.target is NATIVE_NORM:
            numbers = sorted({_number_of(result) or 0 for member in members for result in self.results(member)})
            name = f"{last.name}_item"
            outputs = {n: draft.call("operator.getitem", norm, n, before=last, name=name) for n in numbers}
        for name, operator in zip(AFFINE, ("mul", "add"), strict=True):
            if not is_shared and given[0][name] is not None and 0 in outputs:
                row = draft.call("stack", [g[name] for g in given], before=last)
                sizes = [len(members), *[1] * (draft.value(stacked).dim() - 1 - len(shape)), *shape]
                row = draft.call("view", row, sizes, before=last)
                outputs[0] = draft.call(operator, outputs[0], row, before=last)
        parts: list[AnyNode] = []
        for k, member in enumerate(members):
            for result in self.results(member):
                part = draft.call("select.int", outputs[_number_of(result) or 0], 0, k, before=last)
                parts.append(with_own_memory(draft, part, result))
        return parts

    def num_kernels(self, members: Sequence[Node]) -> int:
        given = [ops.bind(node) for node in members]
        stacked = [name for name in AFFINE if given[0][name] is not None and not _is_shared(given, name)]
        return 2 + 2 * len(stacked)

    def times_ns(self, device: Device, members: Sequence[Node]) -> tuple[int | None, int | None]:
        given = [ops.bind(node) for node in members]
        value = bytes_of(ops.value_of(given[0]["input"]))
        single = device.traffic_ns(2 * value)
        batched = device.traffic_ns(2 * value * len(members) * self.num_kernels(members) // 2 + 2 * value)
        return (None if single is None else single * len(members)), batched


def _is_shared(given: Sequence[dict[str, Any]], name: str) -> bool:
    return all(g[name] is given[0][name] for g in given)


def _number_of(node: Node) -> int | None:
    """The index of the result that an item takes; None where the node is not an item."""
    number: Any = node.args[1] if node.target is ITEM else None
    return number % 3 if isinstance(number, int) else None
