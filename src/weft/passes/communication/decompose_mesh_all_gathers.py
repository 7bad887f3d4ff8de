"""Gather over the slow mesh axis first, while the shards are small, where that is faster.

Why: DTensor gathers a tensor that is sharded over two mesh axes over the inner axis first. Each rank then sends all
that its node holds over the slow links between nodes. If it gathers over the outer axis first, it sends its own shard
only.

Before::

    ag: f32[4, 3] = all_gather(x, 2, 'inner')
    w: f32[4, 3] = wait(ag)
    ag1: f32[8, 3] = all_gather(w, 2, 'outer')
    w1: f32[8, 3] = wait(ag1)

After::

    w1_all_gather: f32[4, 3] = all_gather(x, 2, 'outer')
    w1_wait: f32[4, 3] = wait(w1_all_gather)
    w1_all_gather_1: f32[8, 3] = all_gather(w1_wait, 2, 'inner')
    w1_wait_1: f32[8, 3] = wait(w1_all_gather_1)
    w1_view: f32[2, 2, 6] = view(w1_wait_1, [2, 2, 6])
    w1_transpose: f32[2, 2, 6] = transpose.int(w1_view, 0, 1)
    w1_clone: f32[2, 2, 6] = clone(w1_transpose, memory_format=contiguous_format)
    w1_view_1: f32[8, 3] = view(w1_clone, [8, 3])

Two gathers become one if another launch uses the group of all ranks; one gather becomes two, in either order, if other
launches use groups that are its axes. No new groups are made.

Declines: any gather without a cluster to predict times on; forms that are slower, alone or in large buckets, with the
copy that sorts the parts; groups that are not axes of one mesh; ranks whose graphs differ.
Numerics: exact. Bytes on the wire: fewer over the slow axis. Memory: one copy of the gathered tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.graph.ops import Kind
from weft.passes.base import Numerics
from weft.passes.mesh_pass import MeshPass, MeshSite
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.launches import gathered
from weft.rewriting.mesh_axes import MeshAxis
from weft.rewriting.pattern import ANY, Var, op


@dataclass(frozen=True)
class DecomposeMeshAllGathers(MeshPass):
    """Gather over two mesh axes in the order, or at once, as it is fastest."""

    numerics = Numerics.EXACT
    kind = Kind.ALL_GATHER
    pattern = op("wait", op("all_gather", Var("sent"), Var("size"), ANY).named("launch"))

    def natural(self, site: MeshSite) -> tuple[MeshAxis, MeshAxis]:
        return site.minor, site.major

    def build(self, draft: Draft, site: MeshSite, form: Sequence[MeshAxis], is_sorted: bool) -> AnyNode:
        root, made = site.root, site.sent
        for axis in form:
            made = gathered(draft, made, 0, axis.group.size, axis.launch, root)
        if not is_sorted:
            return made
        shape = list(draft.value(root).shape)
        num_minor, num_major = site.minor.group.size, site.major.group.size
        rest = math.prod(shape) // (num_minor * num_major)
        parts = draft.call("view", made, [num_minor, num_major, rest], before=root)
        turned = draft.call("transpose.int", parts, 0, 1, before=root)
        whole = draft.call("clone", turned, before=root, memory_format=torch.contiguous_format)
        return draft.call("view", whole, shape, before=root)
