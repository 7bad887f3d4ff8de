"""Small programs with collectives, for compilers that run in the test's own process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.zoo.parallel.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT

DIM = 16


class Gather(torch.autograd.Function):
    """A weight from its shards; its gradient goes back to shards."""

    @staticmethod
    def forward(ctx: object, shard: Tensor, group: str) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return WAIT(ALL_GATHER(shard, 2, group))

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return WAIT(REDUCE_SCATTER(gradients[0].contiguous(), "sum", 2, ctx.group)), None  # type: ignore[attr-defined]


def attend(x: Tensor, shards: list[Tensor], group: str) -> Tensor:
    """Attention between projections, each weight gathered where it is used."""
    query, key, value, out = (Gather.apply(shard, group) for shard in shards)
    parts = [(x @ weight).view(2, -1, 2, DIM // 2).transpose(1, 2) for weight in (query, key, value)]
    mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
    return (mixed.transpose(1, 2).reshape(x.shape) @ out).sum()


def attend_arguments(group: str) -> tuple[Tensor, list[Tensor], str]:
    shards = [torch.randn(DIM // 2, DIM, requires_grad=True) for _ in range(4)]
    return torch.randn(2, 4, DIM), shards, group


def share_a_read(x: Tensor, y: Tensor, shard: Tensor, group: str) -> Tensor:
    """Inductor likes to make one loop of `x * 2` and `x * 3 + weight`; the wait for the weight would go up to it."""
    first = ALL_GATHER(shard, 2, group)
    second = ALL_GATHER(x * 2, 2, group)
    product = y @ y
    mixed = product @ (x * 3 + WAIT(first))
    return WAIT(second).sum() + mixed.sum()


def share_a_read_arguments(group: str) -> tuple[Tensor, Tensor, Tensor, str]:
    return torch.randn(DIM, DIM), torch.randn(DIM, DIM), torch.randn(DIM // 2, DIM), group


def gather_and_multiply(x: Tensor, shard: Tensor, group: str) -> Tensor:
    """The smallest program in which a launch can be hoisted."""
    return torch.relu(x @ x) @ WAIT(ALL_GATHER(shard, 2, group))


def gather_and_multiply_arguments(group: str) -> tuple[Tensor, Tensor, str]:
    return torch.randn(DIM, DIM, requires_grad=True), torch.randn(DIM // 2, DIM), group


def gather_twice(x: Tensor, shard: Tensor, group: str) -> Tensor:
    """A weight that is gathered again behind its last use."""
    once = x @ WAIT(ALL_GATHER(shard, 2, group))
    return once @ WAIT(ALL_GATHER(shard, 2, group))


def multiply(x: Tensor) -> Tensor:
    """No communication."""
    return (x @ x).relu()
