"""Pad the factors of a matmul to aligned sizes where that saves more time than the copies cost.

Why: tensor cores load rows in units of 16 bytes. A vocabulary of 50257 columns, 7 short of a multiple of 8, runs on
slow kernels.

Before::

    m: bf16[4096, 50257] = mm(x, w)

After::

    m_constant_pad_nd: bf16[4096, 50264] = constant_pad_nd(w, [0, 7, 0, 0])
    m_mm: bf16[4096, 50264] = mm(x, m_constant_pad_nd)
    m_slice: bf16[4096, 50257] = slice(m_mm, 1, 0, 50257)
    m_clone: bf16[4096, 50257] = clone(m_slice, memory_format=memory_format.contiguous_format)

The predicted time of a product is its flops at the rate of the given cluster's device, times `slowdown` if a row is not
aligned. The predicted time of a copy follows from its bytes. The zeros of the padding do not change the sums.

Declines: matmuls without a cluster to predict times on; padding that costs more time than it saves; unknown sizes.
Numerics: reassociates; another kernel may sum in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.pattern import Match, Var, op
from weft.rewriting.rules import Replacement, Rule

ALIGNMENT_BYTES = 16
"""Alignment of rows, in bytes, that tensor-core kernels need."""


@dataclass(frozen=True)
class PadMatmuls(RewritePass):
    """Pad the factors of a matmul where that saves time."""

    numerics = Numerics.REASSOCIATES

    slowdown: float = 4.5
    """Time of a product whose rows are not multiples of 16 bytes, relative to an aligned one.

    The smallest of six bf16 products on an H200, which took 4.5 to 5.9 times as long (torch 2.11, 15 November 2026,
    `benchmarks/gpu/rewrites.py`).
    """

    always: bool = False
    """Pad even where it saves no time."""

    def rules(self, context: Context) -> Iterable[Rule]:
        def padded(draft: Draft, match: Match) -> Replacement:
            x, w = draft.value(match["x"]), draft.value(match["w"])
            if not isinstance(x, Tensor) or not isinstance(w, Tensor):
                return None
            if any(type(size) is not int for size in (*x.shape, *w.shape)):
                return Refusal(Reason.UNKNOWN_SIZE, f"{match.root.name} stays: not all of its sizes are known")
            extra = [-size % (ALIGNMENT_BYTES // x.element_size()) for size in (x.shape[0], x.shape[1], w.shape[1])]
            if not any(extra[1:]):  # the rows of both factors are aligned
                return None
            return self._why_not(x, w, extra, match.root.name, context) or _padded(draft, match, extra)

        return [Rule(op("mm", Var("x"), Var("w")), padded)]

    def _why_not(self, x: Tensor, w: Tensor, extra: Sequence[int], name: str, context: Context) -> Refusal | None:
        if self.always:
            return None
        if context.cluster is None:
            return Refusal(Reason.NO_GAIN, f"{name} stays: without a cluster the gain of padding is unknown")
        rows, terms, columns = x.shape[0], x.shape[1], w.shape[1]
        more_terms, more_columns = terms + extra[1], columns + extra[2]
        device = context.cluster.device
        product = device.product_ns(2 * rows * terms * columns, x.dtype)
        larger = device.product_ns(2 * rows * more_terms * more_columns, x.dtype)
        copied = [(rows, more_terms)] * bool(extra[1]) + [(more_terms, more_columns)]
        copied += [(rows, columns)] * bool(extra[2])
        copies = device.traffic_ns(sum(2 * prod(size) * x.element_size() for size in copied))
        if product is None or larger is None or copies is None:
            return Refusal(Reason.UNKNOWN_SIZE, f"{name} stays: the device description has no peak for {x.dtype}")
        if larger + copies >= self.slowdown * product:
            return Refusal(Reason.NO_GAIN, f"{name} stays: padding would cost more time than it saves")
        return None


def _padded(draft: Draft, match: Match, extra: Sequence[int]) -> Replacement:
    root = match.root
    _, terms, columns = extra
    x: AnyNode = match["x"]
    if terms:
        x = draft.call("constant_pad_nd", x, [0, terms, 0, 0], before=root)
    w = draft.call("constant_pad_nd", match["w"], [0, columns, 0, terms], before=root)
    product = draft.call("mm", x, w, before=root)
    if not columns:
        return product
    whole = draft.call("slice", product, 1, 0, draft.value(root).shape[1], before=root)
    return draft.call("clone", whole, memory_format=torch.contiguous_format, before=root)
