"""The embedding and the loss of a language model; a rank may hold only a part of the vocabulary.

Contract: with `first_row` set, the module holds the rows of the vocabulary from there on, and gives the same results as
the whole vocabulary (the embedding after a sum over the group). `first_row` is a tensor, not a number, so that all
ranks run one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

from weft.frontends.provenance import BACKWARD
from weft.graph.collective import num_bytes
from weft.zoo.parallel.collectives import all_reduce
from weft.zoo.parallel.parameters import reading_of

LOSSES = ("f32", "chunked", "parallel")
ADD, EXP = torch.ops.aten.add.Tensor, torch.ops.aten.exp.default
PUT = (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
NUM_CHUNKS = 8
"""Parts of the tokens in a chunked loss, as in torchtitan since 2026."""


class TokenEmbedding(nn.Module):
    """Looks up a row for each token. With a part of the rows, tokens of other parts give zeros."""

    backward_needs_weight = False
    """Backward needs the tokens."""

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
    """The mean cross-entropy of logits [batch, sequence, vocabulary], computed in f32.

    If the vocabulary is split, `split` computes it from this rank's logits, the targets, its first row and its group.
    """

    def __init__(self, split: type[torch.autograd.Function] | None = None) -> None:
        super().__init__()
        self.split = SplitCrossEntropy if split is None else split
        self.group: str | None = None
        self.register_buffer("first_row", None)
        self.first_row: Tensor | None

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits, targets = logits.flatten(0, 1).float(), targets.flatten()
        if self.first_row is None or self.group is None:
            return F.cross_entropy(logits, targets)
        return cast(Tensor, self.split.apply(logits, targets, self.first_row, self.group))


class ChunkedHead(nn.Linear):
    """The projection to the vocabulary together with the loss, a part of the tokens at a time.

    Each part is projected, compared and run back before the next one, so that the logits of only one part exist. The
    weight is gathered once, and the gradient of each part is reduced by itself.
    """

    backward_needs_weight = False
    """The gradients are ready when forward is."""

    def forward(self, x: Tensor, targets: Tensor, loss: OutputLoss) -> Tensor:  # type: ignore[override]
        part, gather = reading_of(self, "weight", self._parameters["weight"])
        return cast(Tensor, ChunkedLoss.apply(x, part, targets, loss, gather))


class ChunkedLoss(torch.autograd.Function):
    """The mean loss of tokens [batch, sequence, dim] and its gradients, in `NUM_CHUNKS` parts."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, part: Tensor, targets: Tensor, loss: OutputLoss, gather: Callable[[Tensor], Tensor]
    ) -> Tensor:
        rows, own_part = x.flatten(0, 1), part.detach().requires_grad_()
        total, row_gradients, part_gradients = rows.new_zeros((), dtype=torch.float32), [], None
        with torch.enable_grad():
            weight = gather(own_part)
            for own, own_targets in zip(rows.chunk(NUM_CHUNKS), targets.flatten().chunk(NUM_CHUNKS), strict=True):
                leaf = own.detach().requires_grad_()
                value = loss(F.linear(leaf, weight)[None], own_targets[None]) * (own.shape[0] / rows.shape[0])
                # A microbatch whose gradients wait for the last one gives none for the weight.
                to_rows, to_part = torch.autograd.grad(value, [leaf, own_part], retain_graph=True, allow_unused=True)
                row_gradients.append(to_rows)
                part_gradients = to_part if part_gradients is None else part_gradients + to_part
                total = total + value.detach()
        held = [torch.cat(row_gradients).view_as(x), part_gradients]
        ctx.save_for_backward(*(gradient for gradient in held if gradient is not None))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        to_x, *to_part = ctx.saved_tensors
        to_x = (to_x * gradients[0]).to(to_x.dtype)
        return to_x, to_part[0] * gradients[0] if to_part else None, None, None, None


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


class ParallelCrossEntropy(torch.autograd.Function):
    """The same with the operators of torch's `loss_parallel`, which keeps log-probabilities for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first_row: Tensor, group: str) -> Tensor:
        shifted = logits - all_reduce(logits.amax(-1, keepdim=True), "max", group)
        total = all_reduce(shifted.exp().sum(-1, keepdim=True), "sum", group)
        log_probabilities = shifted - total.log()
        rows, outside = _own_rows(targets, first_row, logits.shape[-1])
        chosen = log_probabilities.gather(-1, rows[:, None]).masked_fill(outside[:, None], 0.0)
        ctx.save_for_backward(log_probabilities, rows, outside)
        return -all_reduce(chosen, "sum", group).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        log_probabilities, rows, outside = ctx.saved_tensors
        difference = torch.zeros_like(log_probabilities)
        positions = torch.arange(rows.shape[0], device=rows.device)
        difference[positions, rows] = outside.to(difference.dtype) - 1.0
        scale = gradients[0] / rows.shape[0]
        return (difference + log_probabilities.exp()) * scale, None, None, None


def held_by_loss(graph: Graph) -> list[tuple[str, str, int]]:
    """Tensors that backward of `ParallelCrossEntropy` holds after their last use in eager runs: from, until, bytes.

    The argument and the variable of a function live until it returns: four tensors of the size of the logits at once.
    """
    found: list[tuple[str, str, int]] = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target is ADD and node.meta.get("partitioner_tag") == BACKWARD:
            difference, powers = node.args[:2]
            if getattr(difference, "target", None) in PUT and getattr(powers, "target", None) is EXP:
                (scaled,) = node.users
                size = num_bytes(node.meta["val"]) or 0
                found += [(node.name, scaled.name, size), (scaled.name, scaled.name, size)]
    return found


def _own_rows(indices: Tensor, first_row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Indices relative to the first row of this rank, and a mask of those that it does not hold."""
    rows = indices - first_row
    outside = (rows < 0) | (rows >= num_rows)
    return rows.masked_fill(outside, 0), outside
