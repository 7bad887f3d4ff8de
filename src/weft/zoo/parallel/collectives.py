"""Functional collectives as plain functions that launch and wait at once, as in a captured step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.graph.ops import op_names

__tracebackhide__ = True  # errors should show a line of the model

# Looked up once: torch.compile traces operator calls, not the look-up.
ALL_REDUCE = op_names()["all_reduce"]
ALL_GATHER = op_names()["all_gather"]
REDUCE_SCATTER = op_names()["reduce_scatter"]
ALL_TO_ALL = op_names()["all_to_all"]
WAIT = op_names()["wait"]


def group_name(mesh: DeviceMesh, axes: tuple[str, ...]) -> str:
    """The run-time name of the group of one axis, or of all axes of a mesh that spans the world."""
    group: Any = mesh.get_group(axes[0]) if len(axes) == 1 else dist.group.WORLD
    return group.group_name


def all_reduce(x: Tensor, reduce_op: str, group: str) -> Tensor:
    """The reduction of `x` over the group."""
    return WAIT(ALL_REDUCE(x.contiguous(), reduce_op, group))


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """The tensors of all ranks, concatenated along dim 0."""
    return WAIT(ALL_GATHER(x.contiguous(), size, group))


def reduce_scatter(x: Tensor, reduce_op: str, size: int, group: str) -> Tensor:
    """This rank's part, along dim 0, of the reduction of `x` over the group."""
    return WAIT(REDUCE_SCATTER(x.contiguous(), reduce_op, size, group))


class ExchangeRows(torch.autograd.Function):
    """All-to-all of equal parts of dim 0 over the group; backward sends gradients the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return exchange(x, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return exchange(gradients[0], ctx.size, ctx.group), None, None


class ExchangeParts(torch.autograd.Function):
    """All-to-all of parts of dim 0 of any size; backward sends gradients the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taken: list[int], sent: list[int], group: str) -> Tensor:
        ctx.taken, ctx.sent, ctx.group = taken, sent, group
        return WAIT(ALL_TO_ALL(x.contiguous(), taken, sent, group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return WAIT(ALL_TO_ALL(gradients[0].contiguous(), ctx.sent, ctx.taken, ctx.group)), None, None, None


def exchange(x: Tensor, size: int, group: str) -> Tensor:
    """All-to-all of equal parts of dim 0 over the group."""
    splits = [x.shape[0] // size] * size
    return WAIT(ALL_TO_ALL(x.contiguous(), splits, splits, group))
