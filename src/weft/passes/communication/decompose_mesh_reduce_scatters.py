"""Reduce-scatter over the fast mesh axis first, so that only parts cross the slow one, where that is faster.

Why: the gradient of a tensor that is sharded over two mesh axes is often scattered over the outer axis first, so each
rank sends the whole tensor over the slow links between nodes. If the ranks of a node scatter it first, each sends one
part over these links.

Before::

    rs: f32[4, 3] = reduce_scatter(g, 'sum', 2, 'outer')
    w: f32[4, 3] = wait(rs)
    rs1: f32[2, 3] = reduce_scatter(w, 'sum', 2, 'inner')
    w1: f32[2, 3] = wait(rs1)

After::

    w1_view: f32[2, 2, 6] = view(g, [2, 2, 6])
    w1_transpose: f32[2, 2, 6] = transpose.int(w1_view, 0, 1)
    w1_clone: f32[2, 2, 6] = clone(w1_transpose, memory_format=contiguous_format)
    w1_view_1: f32[8, 3] = view(w1_clone, [8, 3])
    w1_reduce_scatter: f32[4, 3] = reduce_scatter(w1_view_1, 'sum', 2, 'inner')
    w1_wait: f32[4, 3] = wait(w1_reduce_scatter)
    w1_reduce_scatter_1: f32[2, 3] = reduce_scatter(w1_wait, 'sum', 2, 'outer')
    w1_wait_1: f32[2, 3] = wait(w1_reduce_scatter_1)

Two scatters become one if another launch uses the group of all ranks; one scatter becomes two, in either order, if
other launches use groups that are its axes. No new groups are made.

Declines: any scatter without a cluster to predict times on; forms that are slower, alone or in large buckets, with the
copy that sorts the parts; scatters by different reduce operators; groups that are not axes of one mesh; ranks whose
graphs differ.
Numerics: reassociates. Bytes on the wire: fewer over the slow axis. Memory: one copy of the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.graph.ops import Kind
from weft.passes.base import Numerics
from weft.passes.mesh_pass import MeshPass, MeshSite
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.launches import scattered, why_not_commute
from weft.rewriting.mesh_axes import MeshAxis
from weft.rewriting.pattern import ANY, Var, op


@dataclass(frozen=True)
class DecomposeMeshReduceScatters(MeshPass):
    """Scatter over two mesh axes in the order, or at once, as it is fastest."""

    numerics = Numerics.REASSOCIATES
    kind = Kind.REDUCE_SCATTER
    pattern = op("wait", op("reduce_scatter", Var("sent"), Var("reduce_op"), Var("size"), ANY).named("launch"))

    def natural(self, site: MeshSite) -> tuple[MeshAxis, MeshAxis]:
        return site.major, site.minor

    def why_not(self, draft: Draft, site: MeshSite) -> Refusal | None:
        used = [match["reduce_op"] for match in site.waits]
        if len(set(used)) > 1:
            what = f"{site.root.name} stays: its scatters reduce by {', '.join(used)}"
            return Refusal(Reason.UNSUPPORTED_FORM, what)
        return why_not_commute(site.root.name, used, draft.value(site.root).dtype)

    def build(self, draft: Draft, site: MeshSite, form: Sequence[MeshAxis], is_sorted: bool) -> AnyNode:
        root, made, reduce_op = site.root, site.sent, site.waits[0]["reduce_op"]
        if is_sorted:
            shape = list(draft.value(made).shape)
            num_minor, num_major = site.minor.group.size, site.major.group.size
            rest = math.prod(shape) // (num_minor * num_major)
            parts = draft.call("view", made, [num_major, num_minor, rest], before=root)
            turned = draft.call("transpose.int", parts, 0, 1, before=root)
            whole = draft.call("clone", turned, before=root, memory_format=torch.contiguous_format)
            made = draft.call("view", whole, shape, before=root)
        for axis in form:
            made = scattered(draft, made, reduce_op, axis.group.size, axis.launch, root)
        return made
