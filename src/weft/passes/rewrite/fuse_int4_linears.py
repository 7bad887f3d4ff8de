"""Fuse matmuls of one input with several packed int4 weights.

Why: queries, keys and values with int4 weights can be one matmul with the concatenated weights: one kernel, which reads
the activation once.

Before::

    q: bf16[4, 64] = _weight_int4pack_mm_for_cpu(x, wq, 32, sq)
    k: bf16[4, 64] = _weight_int4pack_mm_for_cpu(x, wk, 32, sk)

After::

    k_cat: u8[128, 64] = cat([wq, wk])
    k_cat_1: bf16[4, 128, 2] = cat([sq, sk], 1)
    k_weight_int4pack_mm_for_cpu: bf16[4, 128] = _weight_int4pack_mm_for_cpu(x, k_cat, 32, k_cat_1)
    k_slice: bf16[4, 64] = slice(k_weight_int4pack_mm_for_cpu, 1, 0, 64)
    k_clone: bf16[4, 64] = clone(k_slice, memory_format=memory_format.contiguous_format)
    k_slice_1: bf16[4, 64] = slice(k_weight_int4pack_mm_for_cpu, 1, 64, 128)
    k_clone_1: bf16[4, 64] = clone(k_slice_1, memory_format=memory_format.contiguous_format)

The weights are packed in blocks of 64 rows, so weights of whole blocks can be concatenated without unpacking. If they
are constants, a compiler folds the concatenation.

Declines: weights that are not whole blocks; different numbers of terms or group sizes; fewer layers than `min-size`;
inputs or results that are written; fusions that would not save time, and any fusion without a cluster to predict times
on.
Numerics: reassociates; another kernel may sum in another order. Memory: one copy of the packed weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from weft.cost.device import Device
from weft.graph import ops
from weft.passes.base import Numerics
from weft.passes.batch_pass import BatchPass, bytes_of, is_sized, product_ns
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft

PRODUCT = ops.op_of("_weight_int4pack_mm_for_cpu")
BLOCK = 64
"""Number of rows packed together. In torch 2.13, concatenating packed weights of 32 rows gives wrong values."""


@dataclass(frozen=True)
class FuseInt4Linears(BatchPass):
    """Fuse matmuls of one input with several packed int4 weights."""

    numerics = Numerics.REASSOCIATES

    min_size: int = 2
    """Minimum number of layers to fuse."""

    def key(self, node: Node) -> Hashable | Refusal | None:
        if PRODUCT is None or node.target is not PRODUCT:
            return None
        given = ops.bind(node)
        values = [ops.value_of(given[name]) for name in ("self", "mat2", "qScaleAndZeros")]
        if not is_sized(*values):
            return Refusal(Reason.UNKNOWN_SIZE, f"{node.name} stays: its sizes are not known")
        if values[1].shape[0] % BLOCK:
            sentence = f"{node.name} stays: its weight has {values[1].shape[0]} rows, not a multiple of {BLOCK}"
            return Refusal(Reason.DOES_NOT_SPLIT, sentence)
        return given["self"], given["qGroupSize"], values[1].shape[1], values[2].dtype, values[1].device

    def build(self, draft: Draft, members: Sequence[Node]) -> list[AnyNode]:
        last = max(members, key=draft.position)
        given = [draft.bind(node) for node in members]
        weights = draft.call("cat", [g["mat2"] for g in given], before=last)
        scales = draft.call("cat", [g["qScaleAndZeros"] for g in given], 1, before=last)
        product = draft.call(PRODUCT, given[0]["self"], weights, given[0]["qGroupSize"], scales, before=last)
        parts: list[AnyNode] = []
        begin = 0
        for member in members:
            end = begin + draft.value(member).shape[1]
            part = draft.call("slice", product, 1, begin, end, before=last)
            parts.append(draft.call("clone", part, memory_format=torch.contiguous_format, before=last))
            begin = end
        return parts

    def num_kernels(self, members: Sequence[Node]) -> int:
        return 3

    def times_ns(self, device: Device, members: Sequence[Node]) -> tuple[int | None, int | None]:
        given = [ops.bind(node) for node in members]
        shared = ops.value_of(given[0]["self"])
        results = [ops.value_of(node) for node in members]
        weights = [ops.value_of(g[name]) for g in given for name in ("mat2", "qScaleAndZeros")]
        flops = 2 * sum(result.numel() for result in results) * shared.shape[1]
        moved = bytes_of(*weights, *results)
        separate = product_ns(device, flops, moved + len(members) * bytes_of(shared), shared)
        product = product_ns(device, flops, moved + bytes_of(shared), shared)
        copies = device.traffic_ns(2 * bytes_of(*weights, *results))
        return separate, None if product is None or copies is None else product + copies
