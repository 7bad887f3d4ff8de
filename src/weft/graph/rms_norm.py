"""`weft::rms_norm` and its backward: the RMS norm as the one kernel that torch runs for it on CUDA since 2025.

    weft::rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)
    weft::rms_norm_backward(Tensor gradient, Tensor x, Tensor scales, Tensor weight) -> (Tensor, Tensor)

The first returns the scaled rows and, in f32, the factor of each row before the weight. The second returns the
gradients of `x` and of the weight. torch has such kernels (`aten::_fused_rms_norm`) for GPUs only: traced on a CPU, its
norm falls apart into single operators. These operators run on every device, and compute in f32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("weft", "FRAGMENT")


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scales = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scales * weight.float()).to(x.dtype), scales


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _rms_norm_backward(gradient: Tensor, x: Tensor, scales: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide, normed = gradient.float(), x.float() * scales
    scaled = wide * weight.float()
    to_x = scales * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return to_x.to(x.dtype), (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)


def _rms_norm_backward_fake(gradient: Tensor, x: Tensor, scales: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


for _schema, _kernel, _fake in (
    ("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _rms_norm, _rms_norm_fake),
    (
        "rms_norm_backward(Tensor gradient, Tensor x, Tensor scales, Tensor weight) -> (Tensor, Tensor)",
        _rms_norm_backward,
        _rms_norm_backward_fake,
    ),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{_name}", _fake, lib=_LIBRARY)

RMS_NORM: Any = torch.ops.weft.rms_norm.default
RMS_NORM_BACKWARD: Any = torch.ops.weft.rms_norm_backward.default
