"""Models that are not of the zoo, for `ImportedModel`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Decoder(nn.Module):
    """A decoder in the style of nanoGPT, which returns its loss."""

    def __init__(self, vocabulary: int = 128, dim: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(dim, 4, 4 * dim, 0.0) for _ in range(num_layers))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def decoder(batch: int) -> tuple[Callable[[], nn.Module], tuple[Tensor, ...]]:
    tokens = torch.zeros(batch, 32, dtype=torch.long)
    return Decoder, (tokens, tokens)


def without_inputs(_batch: int) -> nn.Module:
    return Decoder()
