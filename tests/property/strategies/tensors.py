"""Tensors of values that are seldom drawn, and in every layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.5, -0.5, float("inf"), float("-inf"), float("nan"), 1e-40, 1e30, -1e30, 65504.0)
LAYOUTS = ("contiguous", "columns of a wider one", "turned", "every second", "moved by one")


def special_tensor(seed: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of infinite, signed, tiny, largest and everyday values of a dtype."""
    rng = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        parts = [special_tensor(2 * seed + k, shape, dtype.to_real()) for k in (1, 2)]
        return torch.complex(*parts)
    if not dtype.is_floating_point:
        low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        chosen = torch.tensor([low, high, 0, 1, 2, 3], dtype=torch.int64)
        return chosen[torch.randint(0, len(chosen), tuple(shape), generator=rng)].to(dtype)
    chosen = torch.tensor(SPECIAL, dtype=torch.float64)[torch.randint(0, len(SPECIAL), tuple(shape), generator=rng)]
    usual = 3 * torch.randn(tuple(shape), generator=rng, dtype=torch.float64)
    return torch.where(torch.rand(tuple(shape), generator=rng) < 0.5, chosen, usual).to(dtype)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A matrix with the same elements in another layout of memory."""
    rows, columns = tensor.shape
    match layout:
        case "columns of a wider one":
            return torch.cat([tensor, tensor, tensor], 1)[:, columns : 2 * columns]
        case "turned":
            return tensor.t().contiguous().t()
        case "every second":
            return torch.stack([tensor, tensor], 2).view(rows, 2 * columns)[:, ::2]
        case "moved by one":
            flat = tensor.flatten()
            return torch.cat([flat[:1], flat])[1:].view(rows, columns)
        case _:
            return tensor.contiguous()
