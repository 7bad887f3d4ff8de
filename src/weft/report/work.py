"""Work: what one step gets done, for tokens per second and the share of the peak (MFU).

The flops are those of the products of the graph as it was: what it computes twice counts twice. Their dtype is the one
that most of them have. What is not known is None: a product of unknown size, a peak that the device does not state.
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
    """What one step gets done."""

    num_tokens: int | None = None
    """Of the whole cluster."""
    flops_share: float | None = None
    """Floating-point operations of the model on one device over those that the device does in a second at its peak."""


def check_tokens(num_tokens: int | None) -> None:
    """Refuse what is no number of tokens."""
    if num_tokens is not None and num_tokens < 1:
        what = f"tokens_per_step is {num_tokens}, expected 1 or more"
        raise ReportError(compose("report", what, do="leave it out where it is not known"))


def work_of(module: GraphModule, device: Device, num_tokens: int | None = None) -> Work:
    """What a graph gets done on each device; tokens as given, else as the module says."""
    tokens = num_tokens if num_tokens is not None else tokens_per_step(module)
    return Work(tokens, flops_share(module.graph.nodes, device))


def flops_share(nodes: Iterable[Node], device: Device) -> float | None:
    """How many seconds all products take at the device's peak."""
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
