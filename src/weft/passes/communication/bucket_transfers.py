"""Merge broadcasts from one root, and all-to-alls with equal splits, into a few large ones.

Why: every launch pays a fixed latency, and buffers, norms and small expert batches are sent in many small launches.

Before::

    b0: f32[2, 4] = broadcast(x, 0, 'dp')
    w0: f32[2, 4] = wait(b0)
    b1: f32[6] = broadcast(y, 0, 'dp')
    w1: f32[6] = wait(b1)

After::

    x_flat: f32[8] = view(x, [8])
    packed: f32[14] = cat([x_flat, y])
    b0_bucket: f32[14] = broadcast(packed, 0, 'dp')
    b0_done: f32[14] = wait(b0_bucket)
    ...

Declines: the same as `bucket-all-gathers`, and splits that differ or are unknown.
Numerics: exact. Bytes on the wire: unchanged except for padding in a pack.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.graph.ops import Kind
from weft.passes.base import Numerics
from weft.passes.bucket_pass import BucketPass


@dataclass(frozen=True)
class BucketTransfers(BucketPass):
    """Merge broadcasts that share a root, and all-to-alls with equal splits."""

    numerics = Numerics.EXACT
    kinds = frozenset({Kind.BROADCAST, Kind.ALL_TO_ALL})
