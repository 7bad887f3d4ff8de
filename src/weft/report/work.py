"""Work: the tokens and flops of one step, for tokens per second and the share of the peak (MFU).

The matrix products of the original graph are counted, recomputation included. The device's peak for the dtype with the
most flops is used. A figure is None if a product has an unknown size or the device does not state its peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from weft.cost.device import Device
from weft.cost.flops import flops_of, product_dtype
from weft.errors import ReportError, compose
from weft.graph.about import tokens_per_step


@dataclass(frozen=True)
class Work:
    """The work of one step."""

    num_tokens: int | None = None
    """Tokens that the whole cluster processes in one step."""
    flops_share: float | None = None
    """Flops of the step on one device, divided by the flops per second of the device's peak."""


def check_tokens(num_tokens: int | None) -> None:
    """Refuse a number of tokens below 1."""
    if num_tokens is not None and num_tokens < 1:
        what = f"tokens_per_step is {num_tokens}, expected 1 or more"
        raise ReportError(compose("report", what, do="leave it out if it is not known"))


def work_of(module: GraphModule, device: Device, num_tokens: int | None = None) -> Work:
    """The work of a graph on each device, with the given number of tokens, or the one that the module states."""
    tokens = num_tokens if num_tokens is not None else tokens_per_step(module)
    return Work(tokens, flops_share(module.graph.nodes, device))


def flops_share(nodes: Iterable[Node], device: Device) -> float | None:
    """Seconds that all products take at the device's peak."""
    flops: Counter[torch.dtype] = Counter()
    for node in nodes:
        found = flops_of(node)
        dtype = product_dtype(node) if found else None
        if found is None or (found and dtype is None):
            return None
        if found and dtype is not None:
            flops[dtype] += found
    if not flops:
        return None
    peak = device.peak_of(flops.most_common(1)[0][0])
    return None if peak is None else flops.total() / (peak * 1e12)
