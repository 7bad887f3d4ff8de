"""Merge reduce-scatters of one group into few large ones.

Why: every launch pays a fixed latency; one large reduce-scatter pays it once and uses more of the bandwidth.

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

Members are laid side by side in rows, one row for each rank. A bucket is launched where its last member was, and waited
for before the next but one is launched, or before its first use.

Declines: as `bucket-all-gathers`; dtypes never mix, nor do reduce operators.
Numerics: reassociates: from three ranks on a ring adds in an order that depends on the place in the buffer.
Bytes on the wire: unchanged. Memory: the buffer; a copy of each result that the graph returns or writes to.
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
    """`gradients`: only those behind which no product of matrices follows, as FSDP's; those of activations stay."""
    defer: int = 1
    """How many other buckets may be launched before a bucket is waited for."""

    def policy(self, context: Context) -> Policy:
        role = Role.GRADIENTS if self.only == "gradients" else None
        return replace(super().policy(context), role=role, defer=self.defer)
