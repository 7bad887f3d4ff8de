"""Merge the all-reduces of gradients, one per parameter under data parallelism, into a few large ones.

Why: every launch pays a fixed latency. A small first bucket starts communication early in the backward pass.

Before::

    d0: f32[2, 4] = div(g0, 2)
    ar0: f32[2, 4] = all_reduce(d0, 'sum', 'dp')
    w0: f32[2, 4] = wait(ar0)
    d1: f32[6] = div(g1, 2)
    ar1: f32[6] = all_reduce(d1, 'sum', 'dp')
    w1: f32[6] = wait(ar1)

After::

    d0_flat: f32[8] = view(g0, [8])
    packed: f32[14] = cat([d0_flat, g1])
    d0_packed: f32[14] = div(packed, 2)
    ar0_bucket: f32[14] = all_reduce(d0_packed, 'sum', 'dp')
    ...

The pass recognises a gradient by its uses: its result feeds no matmul. The gradient may be divided, cast for
communication, accumulated, clipped or used by an optimizer in the graph. Equal divisions and casts are applied once to
the bucket; different ones stay before it.

Declines: all-reduces of activations, or in groups that carry mostly activations; the same as `bucket-all-reduces`.
Groups, dtypes and reduce operators never mix.
Numerics: reassociates; with three or more ranks, a ring sums in an order that depends on the offset in the buffer.
Bytes on the wire: unchanged. Memory: the buffer, and a copy of each gradient that the graph returns or writes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.bucketing.policy import Policy
from weft.graph.ops import Kind
from weft.graph.roles import Role
from weft.passes.base import Numerics
from weft.passes.bucket_pass import BucketPass
from weft.plan.context import Context


@dataclass(frozen=True)
class FuseDdpAllReduces(BucketPass):
    """Merge all-reduces of gradients. A bucket closes once it reaches its cap, by default 1 MiB for the first."""

    numerics = Numerics.REASSOCIATES
    kinds = frozenset({Kind.ALL_REDUCE})
    may_overshoot = True
    first_bytes = 1 << 20

    def policy(self, context: Context) -> Policy:
        return replace(super().policy(context), role=Role.GRADIENTS, replicas=True)
