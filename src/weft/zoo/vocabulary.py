"""The embedding and the loss of a language model; a rank may hold only a part of the vocabulary.

Contract: with `first_row` set, the module holds the rows of the vocabulary from there on, and gives the same results as
the whole vocabulary (the embedding after a sum over the group). `first_row` is a tensor, not a number, so that all
ranks run one graph.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.zoo.parallel.collectives import all_reduce


class TokenEmbedding(nn.Module):
    """Looks up a row for each token. With a part of the rows, tokens of other parts give zeros."""

    weight_is_a_table = True
    """Backward needs the tokens, not the weight."""

    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, dim))
        self.register_buffer("first_row", None)
        self.first_row: Tensor | None

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight
        if self.first_row is None:
            return F.embedding(tokens, weight)
        rows, outside = _own_rows(tokens, self.first_row, weight.shape[0])
        return F.embedding(rows, weight).masked_fill(outside[..., None], 0.0)


class OutputLoss(nn.Module):
    """The mean cross-entropy of logits [batch, sequence, vocabulary], computed in f32."""

    def __init__(self) -> None:
        super().__init__()
        self.group: str | None = None
        self.register_buffer("first_row", None)
        self.first_row: Tensor | None

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits, targets = logits.flatten(0, 1).float(), targets.flatten()
        if self.first_row is None or self.group is None:
            return F.cross_entropy(logits, targets)
        return cast(Tensor, SplitCrossEntropy.apply(logits, targets, self.first_row, self.group))


class SplitCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits whose columns are split over a group, with three small all-reduces."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first_row: Tensor, group: str) -> Tensor:
        largest = all_reduce(logits.amax(-1, keepdim=True), "max", group)
        shifted = logits - largest
        powers = shifted.exp()
        total = all_reduce(powers.sum(-1, keepdim=True), "sum", group)
        rows, outside = _own_rows(targets, first_row, logits.shape[-1])
        chosen = shifted.gather(-1, rows[:, None]).masked_fill(outside[:, None], 0.0)
        chosen = all_reduce(chosen, "sum", group)
        ctx.save_for_backward(powers / total, rows, outside)
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, rows, outside = ctx.saved_tensors
        hit = (~outside).to(probabilities.dtype)[:, None]
        difference = probabilities.scatter_add(-1, rows[:, None], -hit)
        return difference * (gradients[0] / probabilities.shape[0]), None, None, None


def _own_rows(indices: Tensor, first_row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Indices relative to the first row of this rank, and a mask of those that it does not hold."""
    rows = indices - first_row
    outside = (rows < 0) | (rows >= num_rows)
    return rows.masked_fill(outside, 0), outside
