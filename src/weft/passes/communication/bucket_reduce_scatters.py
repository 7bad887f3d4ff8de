"""Merge reduce-scatters of one group into a few large ones.

Why: every launch pays a fixed latency. One large reduce-scatter pays it once and uses more of the bandwidth.

Before::

    rs0: f32[2, 4] = reduce_scatter(x, 'sum', 2, 'dp')
    w0: f32[2, 4] = wait(rs0)
    rs1: f32[3, 4] = reduce_scatter(y, 'sum', 2, 'dp')
    w1: f32[3, 4] = wait(rs1)

After::

    x_flat: f32[2, 8] = view(x, [2, 8])
    y_flat: f32[2, 12] = view(y, [2, 12])
    packed: f32[2, 20] = cat([x_flat, y_flat], 1)
    packed_flat: f32[40] = view(packed, [-1])
    rs0_bucket: f32[20] = reduce_scatter(packed_flat, 'sum', 2, 'dp')
    rs0_done: f32[20] = wait(rs0_bucket)
    columns = split_with_sizes(rs0_done, [8, 12])
    ...

The buffer has one row per rank, and each row holds that rank's part of every member. A bucket is launched at its last
member. Its wait comes before its first use, and before the launch of the bucket after the next one.

Declines: the same as `bucket-all-gathers`. Dtypes and reduce operators never mix.
Numerics: reassociates; with three or more ranks, a ring sums in an order that depends on the offset in the buffer.
Bytes on the wire: unchanged. Memory: the buffer, and a copy of each result that the graph returns or writes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from weft.bucketing.policy import Policy
from weft.graph.ops import Kind
from weft.graph.roles import Role
from weft.passes.base import Numerics
from weft.passes.bucket_pass import BucketPass
from weft.plan.context import Context


@dataclass(frozen=True)
class BucketReduceScatters(BucketPass):
    """Merge reduce-scatters that share a group and a reduce operator."""

    numerics = Numerics.REASSOCIATES
    kinds = frozenset({Kind.REDUCE_SCATTER})

    only: Literal["all", "gradients"] = "all"
    """`gradients`: merge only reduce-scatters whose result feeds no matmul, as FSDP makes them."""
    defer: int = 1
    """Number of further buckets that may be launched before the wait for a bucket."""

    def policy(self, context: Context) -> Policy:
        role = Role.GRADIENTS if self.only == "gradients" else None
        return replace(super().policy(context), role=role, defer=self.defer)
