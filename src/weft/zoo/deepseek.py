"""A decoder like DeepSeek-V2 and V3: latent attention, a few dense layers, then experts without capacity.

Contract: as `dropless`. Keys and values of a token are projected to one narrow latent vector, and from there to the
heads; all heads share the part of the key that holds the position. Values are padded to the width of keys for the
attention kernel, as for FlashAttention-2, which takes one width; kernels that take two compute less. The router is that
of `dropless`: a softmax over all experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.zoo.dropless import Dropless, DroplessConfig, DroplessFeedForward
from weft.zoo.llama import Block, ComplexRotary, FeedForward, Rotary


@dataclass(frozen=True)
class DeepseekConfig(DroplessConfig):
    """The shape of such a decoder; all heads have keys and values of their own, so `num_kv_heads` is `num_heads`."""

    latent_width: int = 512
    """Width of the latent vector of keys and values."""
    query_latent_width: int = 0
    """Width of the latent vector of queries; 0: queries are projected directly."""
    head_width: int = 128
    """Width of a head's value, and of its query and key without position."""
    rotary_width: int = 64
    """Width of the part of queries and keys that holds the position."""
    num_dense: int = 1
    """The first layers, which have no experts."""
    dense_ffn_dim: int = 10944
    """Width of their feed-forward network."""

    @property
    def rotary_dim(self) -> int:
        return self.rotary_width


SMALL: dict[str, Any] = {"latent_width": 16, "head_width": 8, "rotary_width": 4, "dense_ffn_dim": 192}
PRESETS = {
    "debug": DeepseekConfig(64, 2, 8, 8, 96, 256, 32, query_latent_width=24, **SMALL),
    # The shapes of DeepSeek-V2-Lite, which torchtitan trains as DeepSeek-V3 16B, and of DeepSeek-V3.
    "16b": DeepseekConfig(2048, 27, 16, 16, 1408, 102400, 4096, num_experts=64, num_chosen=6, num_shared=2),
    "671b": DeepseekConfig(
        7168,
        61,
        128,
        128,
        2048,
        129280,
        4096,
        num_experts=256,
        num_chosen=8,
        num_shared=1,
        query_latent_width=1536,
        num_dense=3,
        dense_ffn_dim=18432,
    ),
}


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values are made of one latent vector for each token."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.head_width, self.rotary_width = config.head_width, config.rotary_width
        self.latent_width = config.latent_width
        num_queries = config.num_heads * (config.head_width + config.rotary_width)
        if config.query_latent_width:
            self.query_latent = config.linear(config.dim, config.query_latent_width)
            self.query_norm = config.make_norm(config.query_latent_width)
        self.query = config.linear(config.query_latent_width or config.dim, num_queries)
        self.latent = config.linear(config.dim, config.latent_width + config.rotary_width)
        self.latent_norm = config.make_norm(config.latent_width)
        self.key_value = config.linear(config.latent_width, config.num_heads * 2 * config.head_width)
        self.output = config.linear(config.num_heads * config.head_width, config.dim)

    def forward(self, x: Tensor, rotary: Rotary | ComplexRotary) -> Tensor:
        tokens, widths = x.shape[:2], [self.head_width, self.rotary_width]
        queries = self.query(self.query_norm(self.query_latent(x)) if hasattr(self, "query_latent") else x)
        plain, placed = queries.view(*tokens, -1, sum(widths)).split(widths, -1)
        queries = torch.cat([plain, rotary.turn(placed)], -1)
        latent, placed = self.latent(x).split([self.latent_width, self.rotary_width], -1)
        both = self.key_value(self.latent_norm(latent)).view(*tokens, -1, 2 * self.head_width)
        plain, values = both.chunk(2, -1)
        shared = rotary.turn(placed[:, :, None]).expand(-1, -1, plain.shape[2], -1)
        keys = torch.cat([plain, shared], -1)
        values = F.pad(values, [0, self.rotary_width])
        queries, keys, values = (part.transpose(1, 2) for part in (queries, keys, values))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)[..., : self.head_width]
        return self.output(mixed.transpose(1, 2).flatten(2))


class Deepseek(Dropless):
    """The decoder with its loss."""

    # All networks treat each token alone, so they can work on a part of the sequence. Each rank makes the keys, values
    # and queries of its heads of latent vectors that all ranks compute.
    tensor_plan: ClassVar[Mapping[str, str]] = {
        **{end: word for end, word in Dropless.tensor_plan.items() if not end.startswith("attention.")},
        **dict.fromkeys(("feed_forward.gate", "feed_forward.up", "feed_forward.down"), "sequence"),
        **dict.fromkeys(("attention.query", "attention.key_value"), "column"),
        **dict.fromkeys(("attention.latent", "attention.latent_norm"), "sequence"),
        **dict.fromkeys(("attention.query_latent", "attention.query_norm"), "sequence"),
        "attention.output": "row",
    }

    def make_block(self, number: int) -> nn.Module:
        config = cast(DeepseekConfig, self.config)
        is_dense = number < config.num_dense
        dense = replace(config, ffn_dim=config.dense_ffn_dim)
        return Block(config, FeedForward(dense) if is_dense else DroplessFeedForward(config), LatentAttention(config))
