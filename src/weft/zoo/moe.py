"""A mixture-of-experts decoder: each token is sent to its best experts, wherever they are.

Contract: as `llama`. Every expert takes the same number of tokens, its capacity; tokens beyond it are dropped. So
shapes are static, and the exchange between ranks is an all-to-all with equal splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.zoo.llama import TENSOR_PLAN, Block, Llama, LlamaConfig
from weft.zoo.parallel.collectives import ExchangeRows


@dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """The shape of a decoder whose feed-forward layers are experts; `ffn_dim` is the width of one expert."""

    num_experts: int = 8
    num_chosen: int = 2
    capacity_percent: int = 125
    """Capacity of each expert, in percent of an even share of the tokens."""


PRESETS = {
    "debug": MoEConfig(64, 2, 8, 4, 96, 256, 32, capacity_percent=400),
    "8x7b": MoEConfig(4096, 32, 32, 8, 14336, 32768, 4096),
}


class Experts(nn.Module):
    """The SwiGLU networks of all experts, as three weights with the experts stacked along dim 0."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.dim, self.ffn_dim = config.dim, config.ffn_dim
        self.gate = nn.Parameter(torch.empty(config.num_experts * config.ffn_dim, config.dim))
        self.up = nn.Parameter(torch.empty(config.num_experts * config.ffn_dim, config.dim))
        self.down = nn.Parameter(torch.empty(config.num_experts * config.dim, config.ffn_dim))

    def forward(self, x: Tensor) -> Tensor:
        """The results of the experts on their own rows of `x`, which is [experts, rows, dim]."""
        gate = self.gate.view(-1, self.ffn_dim, self.dim).transpose(1, 2)
        up = self.up.view(-1, self.ffn_dim, self.dim).transpose(1, 2)
        down = self.down.view(-1, self.dim, self.ffn_dim).transpose(1, 2)
        return torch.bmm(F.silu(torch.bmm(x, gate)) * torch.bmm(x, up), down)


class MoEFeedForward(nn.Module):
    """Routes tokens to experts and adds up their results."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.group: str | None = None
        self.num_ranks = 1

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, slots, capacity = self._route(tokens)
        copies = tokens.repeat_interleave(self.config.num_chosen, 0)
        rows = tokens.new_zeros(self.config.num_experts * capacity + 1, tokens.shape[1])
        rows = rows.index_add(0, slots, copies)[:-1]  # the last row collects dropped tokens
        rows = self._join(self.experts(self._part(self._exchange(rows))))
        rows = torch.cat([self._exchange(rows), rows.new_zeros(1, rows.shape[1])])
        chosen = rows.index_select(0, slots) * weights.flatten()[:, None]
        return chosen.view(-1, self.config.num_chosen, tokens.shape[1]).sum(1).view_as(x)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor, int]:
        """Weights of the chosen experts, the row of each choice, and the number of rows of one expert."""
        config = self.config
        scores = self.router(tokens).float().softmax(-1)
        weights, chosen = scores.topk(config.num_chosen, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype)
        capacity = -(-tokens.shape[0] * config.num_chosen * config.capacity_percent // (100 * config.num_experts))
        experts = chosen.flatten()
        hits = (experts[:, None] == torch.arange(config.num_experts, device=tokens.device)).long()
        places = (hits.cumsum(0) - 1).gather(1, experts[:, None])[:, 0]
        dropped = places >= capacity
        slots = (experts * capacity + places).masked_fill(dropped, config.num_experts * capacity)
        return weights, slots, capacity

    # Rows are sent in order of rank, expert, place, and computed in order of expert, rank, place.

    def _exchange(self, rows: Tensor) -> Tensor:
        if self.group is None:
            return rows
        return cast(Tensor, ExchangeRows.apply(rows, self.num_ranks, self.group))

    def _part(self, rows: Tensor) -> Tensor:
        local = self.config.num_experts // self.num_ranks
        by_rank = rows.view(self.num_ranks, local, -1, rows.shape[1])
        return by_rank.transpose(0, 1).reshape(local, -1, rows.shape[1])

    def _join(self, rows: Tensor) -> Tensor:
        by_expert = rows.view(rows.shape[0], self.num_ranks, -1, rows.shape[2])
        return by_expert.transpose(0, 1).reshape(-1, rows.shape[2])


class MoE(Llama):
    """The decoder with its loss."""

    config: MoEConfig

    # Experts treat each token alone, so they can work on a part of the sequence, as norms do.
    tensor_plan: ClassVar[Mapping[str, str]] = {
        **{end: word for end, word in TENSOR_PLAN.items() if not end.startswith("feed_forward")},
        "feed_forward_norm": "sequence",
        "feed_forward.router": "sequence",
        "feed_forward.experts": "sequence",
    }

    def make_block(self, number: int) -> nn.Module:
        return Block(self.config, MoEFeedForward(self.config))

    def expert_parameters(self) -> list[str]:
        """The paths of the parameters that expert parallelism splits."""
        return [path for path, _ in self.named_parameters() if ".experts." in path]

    def split_experts(self, group: str, num_ranks: int) -> None:
        """Exchange tokens between the ranks of a group; each rank holds some of the experts."""
        for module in self.modules():
            if isinstance(module, MoEFeedForward):
                module.group, module.num_ranks = group, num_ranks
