"""A small convolutional classifier whose batch norms see the batches of all ranks.

Contract: `model(images, labels)` returns the loss. With `share_statistics`, each batch norm all-reduces its sums in
forward and in backward, and computes the same as one norm over the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.zoo.parallel.collectives import all_reduce


@dataclass(frozen=True)
class VisionConfig:
    """The shape of a classifier."""

    channels: int
    num_layers: int
    num_classes: int
    image_size: int
    momentum: float = 0.1
    eps: float = 1e-5


PRESETS = {"debug": VisionConfig(16, 2, 8, 16), "small": VisionConfig(256, 16, 1024, 224)}


class SharedBatchNorm(nn.Module):
    """Batch norm with the statistics of this rank, or of all ranks of a group."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.eps, self.momentum = config.eps, config.momentum
        self.weight = nn.Parameter(torch.ones(config.channels))
        self.bias = nn.Parameter(torch.zeros(config.channels))
        self.register_buffer("running_mean", torch.zeros(config.channels))
        self.register_buffer("running_variance", torch.ones(config.channels))
        self.running_mean: Tensor
        self.running_variance: Tensor
        self.group: str | None = None
        self.num_ranks = 1

    def share_statistics(self, group: str, num_ranks: int) -> None:
        """Normalise over the batches of all ranks of a group."""
        self.group, self.num_ranks = group, num_ranks

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed, mean, variance = cast(
            tuple[Tensor, Tensor, Tensor], Standardise.apply(wide, self.eps, self.group, self.num_ranks)
        )
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_variance.lerp_(variance, self.momentum)
        scaled = normed * self.weight.float()[:, None, None] + self.bias.float()[:, None, None]
        return scaled.to(x.dtype)


class Standardise(torch.autograd.Function):
    """Zero mean and unit variance per channel, over the batches of a group of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, group: str | None, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
        count = x.numel() // x.shape[1] * num_ranks
        mean, square = _channel_means(x, x * x, group, count)
        variance = square - mean * mean
        scale = torch.rsqrt(variance + eps)
        normed = (x - mean[:, None, None]) * scale[:, None, None]
        ctx.save_for_backward(normed, scale)
        ctx.group, ctx.count = group, count
        ctx.mark_non_differentiable(mean, variance)
        return normed, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        normed, scale = ctx.saved_tensors
        gradient = gradients[0]
        mean, slope = _channel_means(gradient, gradient * normed, ctx.group, ctx.count)
        centred = gradient - mean[:, None, None] - normed * slope[:, None, None]
        return centred * scale[:, None, None], None, None, None


def _channel_means(first: Tensor, second: Tensor, group: str | None, count: int) -> tuple[Tensor, Tensor]:
    """The means per channel of two images, by one all-reduce."""
    sums = torch.cat([first.sum((0, 2, 3)), second.sum((0, 2, 3))])
    if group is not None:
        sums = all_reduce(sums, "sum", group)
    mean, other = (sums / count).chunk(2)
    return mean, other


class ResidualBlock(nn.Module):
    """Two convolutions with norms, and a residual around them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.first = nn.Conv2d(config.channels, config.channels, 3, padding=1, bias=False)
        self.first_norm = SharedBatchNorm(config)
        self.second = nn.Conv2d(config.channels, config.channels, 3, padding=1, bias=False)
        self.second_norm = SharedBatchNorm(config)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(inner)))


class Vision(nn.Module):
    """The classifier with its loss."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = nn.Conv2d(3, config.channels, 3, stride=2, padding=1, bias=False)
        self.norm = SharedBatchNorm(config)
        self.layers = nn.ModuleList(ResidualBlock(config) for _ in range(config.num_layers))
        self.head = nn.Linear(config.channels, config.num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(images)))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)
