"""A Llama-like decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

Contract: plain single-device code. `model(tokens, targets)` returns the loss. The modules take the numbers of heads and
features from the shapes of their weights, so that a rank that holds a part of them computes its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.arguments import check_choice
from weft.errors import CaptureError
from weft.graph.rms_norm import RMS_NORM, RMS_NORM_BACKWARD
from weft.zoo.checkpointing import CHECKPOINTS, Recomputation, recomputation_of, run_block
from weft.zoo.fp8 import PRODUCTS, Fp8Linear
from weft.zoo.vocabulary import LOSSES, ChunkedHead, OutputLoss, ParallelCrossEntropy, TokenEmbedding

NORMS = ("operators", "kernel")
ROTARIES = ("real", "complex")


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a decoder."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocabulary: int
    sequence: int
    rope_base: float = 500_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    """Whether the output projection is the embedding's weight."""
    checkpoint: str = "none"
    """The part of a block that backward computes again: one of `CHECKPOINTS` (`checkpointing.py`)."""
    repeat_kv: bool = False
    """Whether keys and values are copied for all query heads before attention, not shared by it."""
    products: str = "compute"
    """Dtype of the matrix products with weights in the blocks: `compute`, the dtype of a step, or `fp8`."""
    norm: str = "operators"
    """How the RMS norm runs: `operators` one by one, or as one `kernel` forward and one backward."""
    rotary: str = "real"
    """How rotary embeddings turn features: `real` sums of two halves, or `complex` products of pairs in f32."""
    loss: str = "f32"
    """How the loss is computed: `f32` for all tokens at once, `chunked` in 8 parts that are run back at once, or
    `parallel` as `f32`, with the operators of torch's `loss_parallel` if the vocabulary is split."""

    def __post_init__(self) -> None:
        check_choice("zoo", "checkpoint", self.checkpoint, CHECKPOINTS, error=CaptureError)
        check_choice("zoo", "products", self.products, PRODUCTS, error=CaptureError)
        check_choice("zoo", "norm", self.norm, NORMS, error=CaptureError)
        check_choice("zoo", "rotary", self.rotary, ROTARIES, error=CaptureError)
        check_choice("zoo", "loss", self.loss, LOSSES, error=CaptureError)

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def rotary_dim(self) -> int:
        """Features of a head that are turned by its position."""
        return self.head_dim

    def make_norm(self, width: int = 0) -> RMSNorm:
        """The norm of a vector of this width; by default that before a part of a block, or before the output."""
        return (KernelRMSNorm if self.norm == "kernel" else RMSNorm)(width or self.dim, self.norm_eps)

    def linear(self, num_inputs: int, num_outputs: int) -> nn.Linear:
        """A projection of a block."""
        return (Fp8Linear if self.products == "fp8" else nn.Linear)(num_inputs, num_outputs, bias=False)


PRESETS = {
    "debug": LlamaConfig(64, 2, 8, 4, 192, 256, 32),
    "1b": LlamaConfig(2048, 16, 32, 8, 8192, 131072, 4096),
    "8b": LlamaConfig(4096, 32, 32, 8, 14336, 131072, 4096),
    "70b": LlamaConfig(8192, 80, 64, 8, 28672, 131072, 8192),
    # As published: Llama 2 7B and 13B, Code Llama 34B with the vocabulary and sequence of Llama 2, Llama 3.1 405B.
    "7b": LlamaConfig(4096, 32, 32, 32, 11008, 32000, 4096),
    "13b": LlamaConfig(5120, 40, 40, 40, 13824, 32000, 4096),
    "34b": LlamaConfig(8192, 48, 64, 8, 22016, 32000, 4096),
    "405b": LlamaConfig(16384, 126, 128, 8, 53248, 128256, 8192),
}

TENSOR_PLAN = {
    "tokens": "vocabulary",
    "attention": "block",
    "attention.query": "column",
    "attention.key": "column",
    "attention.value": "column",
    "attention.output": "row",
    "feed_forward": "block",
    "feed_forward.gate": "column",
    "feed_forward.up": "column",
    "feed_forward.down": "row",
    "attention_norm": "sequence",
    "feed_forward_norm": "sequence",
    "norm": "sequence",
    "output": "output",
    "loss": "vocabulary",
}
"""How tensor parallelism splits each module, by the end of its path; `parallel.tensor` defines the words."""


class RMSNorm(nn.Module):
    """Scales by the root of the mean square, computed in f32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class KernelRMSNorm(RMSNorm):
    """The same as one kernel in each direction, as torch runs `nn.RMSNorm` on CUDA since 2025."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _KernelNorm.apply(x, self.weight, self.eps))


class _KernelNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scales = RMS_NORM(x, weight, eps)
        ctx.save_for_backward(x, scales, weight)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        to_x, to_weight = RMS_NORM_BACKWARD(gradients[0], *ctx.saved_tensors)
        return to_x, to_weight, None


class Rotary(nn.Module):
    """The angles by which queries and keys are rotated at each position."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        angles = _angles(config)
        self.register_buffer("cosines", torch.cat([angles.cos(), angles.cos()], -1), persistent=False)
        self.register_buffer("sines", torch.cat([-angles.sin(), angles.sin()], -1), persistent=False)
        self.cosines: Tensor
        self.sines: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """Rotate the halves of each head of `x`, which is [batch, sequence, heads, head_dim]."""
        length, half = x.shape[1], x.shape[-1] // 2
        swapped = x.roll(half, -1)
        turned = x * self.cosines[:length] + swapped * self.sines[:length]
        return turned.to(x.dtype)


class ComplexRotary(nn.Module):
    """The same with complex factors of pairs of neighbouring features, as torchtitan computes it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        factors = torch.polar(torch.ones(()), _angles(config))
        self.register_buffer("factors", factors, persistent=False)
        self.factors: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """Rotate the pairs of each head of `x`, which is [batch, sequence, heads, head_dim]."""
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.factors[: x.shape[1]]).flatten(3).to(x.dtype)


def _angles(config: LlamaConfig) -> Tensor:
    """Angles as [positions, 1, half of a head's turned features]."""
    half = config.rotary_dim // 2
    frequencies = config.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
    return torch.arange(config.sequence, dtype=torch.float32)[:, None, None] * frequencies


class Attention(nn.Module):
    """Causal self-attention; several query heads share a key and a value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.repeat_kv = config.head_dim, config.repeat_kv
        self.query = config.linear(config.dim, config.num_heads * config.head_dim)
        self.key = config.linear(config.dim, config.num_kv_heads * config.head_dim)
        self.value = config.linear(config.dim, config.num_kv_heads * config.head_dim)
        self.output = config.linear(config.num_heads * config.head_dim, config.dim)

    def forward(self, x: Tensor, rotary: Rotary | ComplexRotary) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        queries = rotary.turn(self.query(x).view(heads)).transpose(1, 2)
        keys = rotary.turn(self.key(x).view(heads)).transpose(1, 2)
        values = self.value(x).view(heads).transpose(1, 2)
        if self.repeat_kv:
            keys, values = (_repeat_heads(part, queries.shape[1]) for part in (keys, values))
        shares_heads = queries.shape[1] != keys.shape[1]
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=shares_heads)
        return self.output(mixed.transpose(1, 2).flatten(2))


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Copies of each head of `x`, which is [batch, heads, sequence, head_dim], side by side."""
    copies = num_heads // x.shape[1]
    return x[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: a gated two-layer network."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = config.linear(config.dim, config.ffn_dim)
        self.up = config.linear(config.dim, config.ffn_dim)
        self.down = config.linear(config.ffn_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual around it."""

    recomputation: Recomputation | None = None
    """The part that backward computes again."""

    def __init__(
        self, config: LlamaConfig, feed_forward: nn.Module | None = None, attention: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.attention_norm = config.make_norm()
        self.attention = attention if attention is not None else Attention(config)
        self.feed_forward_norm = config.make_norm()
        self.feed_forward = feed_forward if feed_forward is not None else FeedForward(config)

    def forward(self, x: Tensor, rotary: Rotary | ComplexRotary) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """The decoder with its loss."""

    tensor_plan: ClassVar[Mapping[str, str]] = TENSOR_PLAN

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = TokenEmbedding(config.vocabulary, config.dim)
        self.rotary = (ComplexRotary if config.rotary == "complex" else Rotary)(config)
        self.layers = nn.ModuleList(self.make_block(number) for number in range(config.num_layers))
        for number, block in enumerate(self.layers):
            block.recomputation = recomputation_of(config.checkpoint, number)  # type: ignore[assignment]
        self.norm = config.make_norm()
        head = ChunkedHead if config.loss == "chunked" else nn.Linear
        self.output = head(config.dim, config.vocabulary, bias=False)
        self.loss = OutputLoss(ParallelCrossEntropy if config.loss == "parallel" else None)
        if config.tied:
            self.output.weight = self.tokens.weight
        self._initialise()

    def make_block(self, number: int) -> nn.Module:
        """The layer of this number; models with other layers override it."""
        return Block(self.config)

    def _initialise(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = run_block(layer, x, self.rotary)
        x = self.norm(x)
        if isinstance(self.output, ChunkedHead):
            return self.output(x, targets, self.loss)
        return self.loss(self.output(x), targets)
