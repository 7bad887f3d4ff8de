"""Gradient clipping by the norm of all gradients, as training programs do it before the optimizer.

Contract: gradients are scaled in place so that their norm over all ranks is at most the limit. A gradient that several
ranks hold counts once. Each mesh axis that shards a gradient costs one all-reduce of a scalar.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from weft.compat import foreach_scale
from weft.graph.ops import op_names

EPSILON = 1e-6
"""Added to the norm, as torch's own clipping does."""


@torch.no_grad()
def clip_gradients(gradients: Sequence[Tensor], max_norm: float) -> None:
    """Scale the gradients in place."""
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    for gradient in gradients:
        by_axes.setdefault(_sharded_over(gradient), []).append(_local(gradient))
    meshes = [gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)]
    used = (
        [axis for axis in (meshes[0].mesh_dim_names or ()) if any(axis in axes for axes in by_axes)] if meshes else []
    )
    terms: list[Tensor] = []
    for axes, held in by_axes.items():
        term = get_total_norm(held, foreach=True).square()
        for axis in used:
            term = term if axis in axes else term / meshes[0][axis].size()  # every rank of the axis adds this term
        terms.append(term)
    total = torch.stack(terms).sum()
    reduce, wait = op_names()["all_reduce"], op_names()["wait"]
    for axis in used:
        total = wait(reduce(total, "sum", meshes[0].get_group(axis).group_name))
    scale = (max_norm / (total.sqrt() + EPSILON)).clamp(max=1.0)
    for held in by_axes.values():
        foreach_scale(held, scale)


def _sharded_over(gradient: Tensor) -> tuple[str, ...]:
    """The mesh axes that hold different parts of the gradient."""
    if not isinstance(gradient, DTensor):
        return ()
    axes = gradient.device_mesh.mesh_dim_names or ()
    return tuple(axis for axis, placed in zip(axes, gradient.placements, strict=True) if not placed.is_replicate())


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
