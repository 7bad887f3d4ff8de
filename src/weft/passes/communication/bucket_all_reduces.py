"""Merge all-reduces of one group into a few large ones.

Why: every launch pays a fixed latency. One large all-reduce pays it once and uses more of the bandwidth.

Before::

    ar0: f32[2, 4] = all_reduce(x, 'sum', 'dp')
    w0: f32[2, 4] = wait(ar0)
    ar1: f32[6] = all_reduce(y, 'sum', 'dp')
    w1: f32[6] = wait(ar1)

After::

    x_flat: f32[8] = view(x, [8])
    packed: f32[14] = cat([x_flat, y])
    ar0_bucket: f32[14] = all_reduce(packed, 'sum', 'dp')
    ar0_done: f32[14] = wait(ar0_bucket)
    columns = split_with_sizes(ar0_done, [8, 6])
    ar0_part: f32[8] = columns[0]
    ar1_part: f32[6] = columns[1]
    ar0_view: f32[2, 4] = view(ar0_part, [2, 4])
    ...

Under hybrid sharding, the all-reduces over the replicas follow a bucket of reduce-scatters. If they reduce all parts of
that bucket in order, its buffer is reduced without another copy.

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
class BucketAllReduces(BucketPass):
    """Merge all-reduces that share a group and a reduce operator."""

    numerics = Numerics.REASSOCIATES
    kinds = frozenset({Kind.ALL_REDUCE})

    only: Literal["all", "replicas"] = "all"
    """`replicas`: merge only gradients, and not in groups that carry mostly activations: what HSDP and DDP sum."""

    def policy(self, context: Context) -> Policy:
        is_limited = self.only == "replicas"
        return replace(super().policy(context), role=Role.GRADIENTS if is_limited else None, replicas=is_limited)
