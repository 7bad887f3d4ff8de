"""A mixture of experts without capacity: every token reaches the experts that it chose, as in DeepSeek-V3 and Mixtral.

Contract: as `moe`, but no token is dropped. Each rank counts the tokens for every rank, the ranks exchange the counts,
and the host reads them: they are the sizes of the exchange of tokens. So sizes depend on the data, and a graph has
symbols for them. The experts multiply all their tokens by grouped products. A shared expert sees every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.compat import grouped_product
from weft.zoo.llama import Block, FeedForward
from weft.zoo.moe import Experts, MoE, MoEConfig, MoEFeedForward
from weft.zoo.parallel.collectives import ExchangeParts, exchange


@dataclass(frozen=True)
class DroplessConfig(MoEConfig):
    """The shape of a decoder whose experts take any number of tokens; the capacity is not used."""

    num_shared: int = 1
    """Width of the expert that sees every token, in widths of one expert; 0: the model has none."""


PRESETS = {
    "debug": DroplessConfig(64, 2, 8, 4, 96, 256, 32),
    # About the size of DeepSeek-V3 16B: width, layers, experts, heads and vocabulary are the same.
    "16b": DroplessConfig(2048, 27, 16, 16, 1408, 102400, 4096, num_experts=64, num_chosen=6, num_shared=2),
    # Mixtral 8x7B, without its sliding window: every token sees the whole sequence.
    "8x7b": DroplessConfig(4096, 32, 32, 8, 14336, 32000, 4096, num_experts=8, num_chosen=2, num_shared=0),
}


class GroupedExperts(Experts):
    """The SwiGLU networks of all experts, each on its own rows."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:  # type: ignore[override]
        """The results of the experts on `x`, whose rows are grouped by expert; `ends` are the ends of the groups."""
        narrow = x.bfloat16()  # the only dtype that every version of torch multiplies by groups
        hidden = F.silu(self._product(narrow, self.gate, ends)) * self._product(narrow, self.up, ends)
        return self._product(hidden, self.down, ends).to(x.dtype)

    def _product(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        stacked = weight.bfloat16().view(ends.shape[0], -1, rows.shape[1])
        return grouped_product(rows, stacked.transpose(1, 2), ends)


class DroplessFeedForward(MoEFeedForward):
    """Sends each token to the experts that it chose, and adds up their results."""

    config: DroplessConfig

    def __init__(self, config: DroplessConfig) -> None:
        super().__init__(config)
        self.experts = GroupedExperts(config)
        shared = replace(config, ffn_dim=config.ffn_dim * config.num_shared)
        self.shared = FeedForward(shared) if config.num_shared else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).float().softmax(-1)
        weights, chosen = scores.topk(self.config.num_chosen, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype)
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        counts = (experts[:, None] == torch.arange(self.config.num_experts, device=x.device)).sum(0)
        rows = tokens.index_select(0, order // self.config.num_chosen)
        rows = self._compute(rows, counts).index_select(0, order.argsort())
        mixed = (rows * weights.flatten()[:, None]).view(-1, self.config.num_chosen, tokens.shape[1]).sum(1)
        return (mixed if self.shared is None else mixed + self.shared(tokens)).view_as(x)

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The results of the experts on rows that are sorted by expert, wherever the experts are."""
        if self.group is None:
            return self.experts(rows, counts.cumsum(0).to(torch.int32))
        received = exchange(counts, self.num_ranks, self.group)
        sent, taken = self._splits(counts), self._splits(received)
        rows = cast(Tensor, ExchangeParts.apply(rows, taken, sent, self.group))
        # Rows arrive in order of rank and expert.
        local = self.config.num_experts // self.num_ranks
        experts = torch.arange(local, device=rows.device).repeat(self.num_ranks)
        experts = experts.repeat_interleave(received, output_size=rows.shape[0])
        order = experts.argsort(stable=True)
        ends = received.view(self.num_ranks, local).sum(0).cumsum(0).to(torch.int32)
        rows = self.experts(rows.index_select(0, order), ends).index_select(0, order.argsort())
        return cast(Tensor, ExchangeParts.apply(rows, sent, taken, self.group))

    def _splits(self, counts: Tensor) -> list[int]:
        """The number of rows for each rank, read by the host."""
        return counts.view(self.num_ranks, -1).sum(1).tolist()


class Dropless(MoE):
    """The decoder with its loss."""

    # The shared expert treats each token alone, too.
    tensor_plan: ClassVar[Mapping[str, str]] = {
        **MoE.tensor_plan,
        **dict.fromkeys(("shared.gate", "shared.up", "shared.down"), "sequence"),
    }

    def make_block(self, number: int) -> nn.Module:
        return Block(self.config, DroplessFeedForward(cast(DroplessConfig, self.config)))
