"""Matrix products in 8-bit floats with one dynamic scale for each tensor, forward and backward.

Contract: `Fp8Linear` computes like `nn.Linear` up to the rounding of its operands. Each operand is scaled by its own
largest magnitude, which is found just before. Forward keeps the operands in their own dtype, and backward casts them
again, as torchao does. Products take the second operand by columns, so backward copies what it has by rows.

    largest = max(abs(x)); cast(x * 448 / largest) -> _scaled_mm(x, weight)
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.compat import scaled_product

__tracebackhide__ = True  # errors should show a line of the model

PRODUCTS = ("compute", "fp8")
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""Gradients need the wider range."""
SMALLEST = 1e-12
"""Least magnitude that a scale is computed from, so that a tensor of zeros gets a finite one."""


class Fp8Linear(nn.Linear):
    """A linear layer without a bias whose products take 8-bit floats."""

    def forward(self, input: Tensor) -> Tensor:
        rows = cast(Tensor, Fp8Product.apply(input.flatten(0, -2), self.weight))
        return rows.view(*input.shape[:-1], -1)


class Fp8Product(torch.autograd.Function):
    """The product of rows [n, in] with a weight [out, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(_scaled(x, FORWARD), _scaled(weight, FORWARD), x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = _scaled(gradients[0], BACKWARD)
        to_x = _product(gradient, _turned(_scaled(weight, FORWARD)), x.dtype)
        to_weight = _product(_turned(gradient), _turned(_scaled(x, FORWARD)), weight.dtype)
        return to_x, to_weight


Scaled = tuple[Tensor, Tensor]
"""A tensor in an 8-bit dtype, and the factor that gives its values back."""


def _scaled(x: Tensor, dtype: torch.dtype) -> Scaled:
    largest = x.abs().max().float().clamp(min=SMALLEST)
    scale = torch.finfo(dtype).max / largest
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype), scale.reciprocal()


def _turned(x: Scaled) -> Scaled:
    return x[0].t().contiguous(), x[1]


def _product(rows: Scaled, columns: Scaled, dtype: torch.dtype) -> Tensor:
    """Rows [n, k] times the transpose of columns [m, k]; both are contiguous."""
    return scaled_product(rows[0], columns[0].t(), rows[1], columns[1], dtype)
