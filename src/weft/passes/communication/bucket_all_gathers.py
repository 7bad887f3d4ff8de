"""Merge all-gathers of one group into a few large ones.

Why: every launch pays a fixed latency. One large gather pays it once and uses more of the bandwidth.

Before::

    ag0: f32[4, 4] = all_gather(x, 2, 'dp')
    w0: f32[4, 4] = wait(ag0)
    ag1: f32[6, 4] = all_gather(y, 2, 'dp')
    w1: f32[6, 4] = wait(ag1)

After::

    x_flat: f32[8] = view(x, [8])
    y_flat: f32[12] = view(y, [12])
    packed: f32[20] = cat([x_flat, y_flat])
    ag0_bucket: f32[40] = all_gather(packed, 2, 'dp')
    ag0_done: f32[40] = wait(ag0_bucket)
    rows: f32[2, 20] = view(ag0_done, [2, -1])
    columns = split_with_sizes(rows, [8, 12], 1)
    ag0_part: f32[2, 8] = columns[0]
    ag1_part: f32[2, 12] = columns[1]
    ag0_out: f32[4, 4] = reshape(ag0_part, [4, 4])
    ag1_out: f32[6, 4] = reshape(ag1_part, [6, 4])

Members of a bucket need not be adjacent. A gather that depends on a member goes into a later bucket. Two gathers of the
same shard, as in forward and backward under FSDP, never share a bucket: the weight would stay in memory in between.

Declines: a gather whose launch is returned before its wait; sizes without a hint; a launch of several dtypes, unless
the strategy is `pack`.
Numerics: exact. Bytes on the wire: unchanged except for padding in a pack. Memory: the buffer, and a copy of each
result.
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
class BucketAllGathers(BucketPass):
    """Merge all-gathers that share a group."""

    numerics = Numerics.EXACT
    kinds = frozenset({Kind.ALL_GATHER})

    only: Literal["all", "parameters"] = "all"
    """`parameters`: merge only gathers of a single graph input, as FSDP makes them, and leave those of activations."""
    prefetch: int = 0
    """Number of buckets by which to launch each bucket earlier than its first use requires."""

    def policy(self, context: Context) -> Policy:
        role = Role.PARAMETERS if self.only == "parameters" else None
        return replace(super().policy(context), role=role, prefetch=self.prefetch)
