"""Compute linear layers of equal shape as one batched matmul.

Why: experts, heads and towers launch many small matmuls one at a time, and the device idles between the kernels.

Before::

    m0: f32[8, 4] = mm(x0, w0)
    m1: f32[8, 4] = mm(x1, w1)

After::

    m1_stack: f32[2, 8, 16] = stack([x0, x1])
    m1_stack_1: f32[2, 16, 4] = stack([w0, w1])
    m1_bmm: f32[2, 8, 4] = bmm(m1_stack, m1_stack_1)
    m1_select: f32[8, 4] = select.int(m1_bmm, 0, 0)
    m1_select_1: f32[8, 4] = select.int(m1_bmm, 0, 1)

The biases of addmm are stacked too. For layers that share their input, fuse-linears is the better choice.

Declines: layers that depend on each other; inputs or results that are written; fewer layers than `min-size`; batches
that would not save time, and any batch without a cluster to predict times on.
Numerics: reassociates; another kernel may sum in another order. Memory: one copy of the inputs and weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from weft.cost.device import Device
from weft.graph import ops
from weft.passes.base import Numerics
from weft.passes.batch_pass import BatchPass, bytes_of, is_sized, product_ns, with_own_memory
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft

MM, ADDMM = ops.op_of("mm"), ops.op_of("addmm")


@dataclass(frozen=True)
class BatchLinears(BatchPass):
    """Compute linear layers of equal shape as one batched matmul."""

    numerics = Numerics.REASSOCIATES

    def key(self, node: Node) -> Hashable | Refusal | None:
        if node.target not in (MM, ADDMM):
            return None
        given = ops.bind(node)
        factors = _factors(node)
        values = [ops.value_of(n) for n in factors]
        if not is_sized(*values):
            return Refusal(Reason.UNKNOWN_SIZE, f"{node.name} stays: its sizes are not known")
        if (given.get("alpha", 1), given.get("beta", 1)) != (1, 1):
            return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: its alpha or beta is not 1")
        return node.target, tuple((tuple(v.shape), v.dtype, v.device) for v in values)

    def build(self, draft: Draft, members: Sequence[Node]) -> list[AnyNode]:
        last = max(members, key=draft.position)
        columns = zip(*(_arguments(draft, node) for node in members), strict=True)
        stacked: list[AnyNode] = [draft.call("stack", list(column), before=last) for column in columns]
        if last.target is MM:
            product = draft.call("bmm", *stacked, before=last)
        else:
            for _ in range(3 - draft.value(stacked[0]).dim()):  # a bias may be one row, or one number, per layer
                stacked[0] = draft.call("unsqueeze", stacked[0], 1, before=last)
            product = draft.call("baddbmm", *stacked, before=last)
        parts = [draft.call("select.int", product, 0, k, before=last) for k in range(len(members))]
        return [with_own_memory(draft, part, member) for part, member in zip(parts, members, strict=True)]

    def num_kernels(self, members: Sequence[Node]) -> int:
        return len(_factors(members[0])) + 1

    def times_ns(self, device: Device, members: Sequence[Node]) -> tuple[int | None, int | None]:
        values = [ops.value_of(n) for n in _factors(members[0])]
        result = ops.value_of(members[0])
        terms = values[-1].shape[0]
        flops, moved = 2 * result.numel() * terms, bytes_of(*values, result)
        single = product_ns(device, flops, moved, result)
        count = len(members)
        product = product_ns(device, flops * count, moved * count, result)
        copies = device.traffic_ns(2 * count * bytes_of(*values))
        batched = None if product is None or copies is None else product + copies
        return (None if single is None else single * count), batched


def _factors(node: Node) -> list[Node]:
    """The tensors that a layer takes: its bias if it has one, its input and its weight."""
    given = ops.bind(node)
    names = ("self", "mat2") if node.target is MM else ("self", "mat1", "mat2")
    return [given[name] for name in names]


def _arguments(draft: Draft, node: Node) -> list[AnyNode]:
    given = draft.bind(node)
    return [given[name] for name in (("self", "mat2") if node.target is MM else ("self", "mat1", "mat2"))]
