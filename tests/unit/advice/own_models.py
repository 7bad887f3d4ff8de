"""Models that are not of the zoo, for `ImportedModel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

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


class Attention(nn.Module):
    """Attention with the names and the call of Hugging Face's Llama."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, hidden_states: Tensor, position_embeddings: Tensor) -> tuple[Tensor, None]:
        rows = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (f(hidden_states).view(rows).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        found = nn.functional.scaled_dot_product_attention(
            q + position_embeddings.to(q.dtype), k, v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(found.transpose(1, 2).flatten(2)), None


class FeedForward(nn.Module):
    """A feed-forward block with the names of Hugging Face's Llama."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One layer with the names of Hugging Face's Llama."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.self_attn, self.mlp = Attention(dim, 4, 2), FeedForward(dim, 4 * dim)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        x = x + self.self_attn(hidden_states=self.input_layernorm(x), position_embeddings=places)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class NamedDecoder(nn.Module):
    """A decoder whose blocks have names that Weft knows; it returns its loss."""

    def __init__(self, vocabulary: int = 128, dim: int = 64, num_layers: int = 2, sequence: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, dim)
        self.register_buffer("places", torch.linspace(0, 1, sequence).view(1, 1, sequence, 1))
        self.layers = nn.ModuleList(Layer(dim) for _ in range(num_layers))
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.get_buffer("places"))
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1).float(), targets.flatten())


def named_decoder(batch: int) -> tuple[Callable[[], nn.Module], tuple[Tensor, ...]]:
    tokens = torch.zeros(batch, 32, dtype=torch.long)
    return NamedDecoder, (tokens, tokens)


class Turn(nn.Module):
    """A layer that does more in every second place, which its modules do not show."""

    def __init__(self, dim: int, place: int) -> None:
        super().__init__()
        self.inner, self.place = nn.Linear(dim, dim), place

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x if self.place % 2 else x.exp())


class TurningDecoder(Decoder):
    """Blocks of one kind that do different things."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turn(64, place) for place in range(6))


class NamingDecoder(Decoder):
    """It names a block, so it cannot be cut."""

    def __init__(self) -> None:
        super().__init__(num_layers=6)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return super().forward(tokens, targets) + next(iter(self.blocks[5].parameters())).float().sum()


class MixedDecoder(Decoder):
    """Two wide blocks come first."""

    def __init__(self) -> None:
        super().__init__()
        widths = [512, 512, *[128] * 6]
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, width, 0.0) for width in widths)


class Mlp(nn.Module):
    """A feed-forward block with the names of nanoGPT."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(nn.functional.relu(self.c_fc(x)))


class MlpBlock(nn.Module):
    """A layer with few operators, so that many layouts are planned in seconds."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class MlpDecoder(Decoder):
    """Layers large enough that compute, latency and bandwidth all matter."""

    def __init__(self) -> None:
        super().__init__(dim=1024, num_layers=0)
        self.blocks = nn.ModuleList(MlpBlock(1024) for _ in range(4))


def mlp_decoder(batch: int) -> tuple[Callable[[], nn.Module], tuple[Tensor, ...]]:
    tokens = torch.zeros(batch, 512, dtype=torch.long)
    return MlpDecoder, (tokens, tokens)


class SplitDecoder(MlpDecoder):
    """Tensor parallelism splits all blocks but the last."""

    tensor_plan: ClassVar[dict[str, str]] = {
        **{"mlp": "sum", "c_fc": "column", "c_proj": "row"},
        **dict.fromkeys(("blocks.3.mlp", "blocks.3.mlp.c_fc", "blocks.3.mlp.c_proj"), "whole"),
    }


def split_decoder(batch: int) -> tuple[Callable[[], nn.Module], tuple[Tensor, ...]]:
    return SplitDecoder, mlp_decoder(batch)[1]


def shallow_decoder(batch: int) -> tuple[Callable[[], nn.Module], tuple[Tensor, ...]]:
    return lambda: Decoder(num_layers=1), decoder(batch)[1]


def deep_decoder(batch: int) -> tuple[Callable[[], nn.Module], tuple[Tensor, ...]]:
    return lambda: Decoder(num_layers=6), decoder(batch)[1]


def turning_decoder(batch: int) -> tuple[Callable[[], nn.Module], tuple[Tensor, ...]]:
    return TurningDecoder, decoder(batch)[1]


def naming_decoder(batch: int) -> tuple[Callable[[], nn.Module], tuple[Tensor, ...]]:
    return NamingDecoder, decoder(batch)[1]


def mixed_decoder(batch: int) -> tuple[Callable[[], nn.Module], tuple[Tensor, ...]]:
    return MixedDecoder, decoder(batch)[1]


def without_inputs(_batch: int) -> nn.Module:
    return Decoder()
