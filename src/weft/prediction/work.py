"""Flops of a step: those of the model, and those that the hardware executes.

Hardware flops are all products of the graph. Model flops leave out recomputation: a product that equals an earlier one
by construction counts once, whether a checkpoint or a partitioner repeats it, and attention's backward counts without
the scores that it computes again. Causal attention counts the half that its kernels compute, in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from weft.cost.device import Device
from weft.cost.flops import flops_of, product_dtype
from weft.graph.dag import collector_paused

BACKWARD_PRODUCTS, RECOMPUTED_PRODUCTS = 5, 1
"""Products of attention's backward, and how many of them recompute forward (`weft.cost.flops`)."""


@dataclass(frozen=True)
class Flops:
    """Flops of one rank in one step."""

    model: int
    hardware: int
    dtype: torch.dtype
    """The dtype of most of them."""

    def share_of_peak(self, flops: int, device: Device, step_us: float) -> float | None:
        """The share of the device's peak that these flops reach; None if the peak is unknown."""
        peak = device.peak_of(self.dtype)
        return None if peak is None or not step_us else flops / (peak * 1e6 * step_us)


def flops_of_step(modules: Sequence[GraphModule]) -> Flops | None:
    """The flops of graphs that run one after the other; None if a size is unknown or the graphs have no product."""
    numbers = _Numbers()
    model = 0
    by_dtype: Counter[torch.dtype] = Counter()
    with collector_paused():
        for module in modules:
            for node in module.graph.nodes:
                is_new = numbers.add(node)
                flops = flops_of(node)
                dtype = product_dtype(node) if flops else None
                if flops is None or (flops and dtype is None):
                    return None
                if flops and dtype is not None:
                    by_dtype[dtype] += flops
                    model += _needed(node, flops) if is_new else 0
    if not by_dtype:
        return None
    return Flops(model, by_dtype.total(), by_dtype.most_common(1)[0][0])


def _needed(node: Node, flops: int) -> int:
    is_backward = "attention" in str(node.target) and "backward" in str(node.target)
    return flops * (BACKWARD_PRODUCTS - RECOMPUTED_PRODUCTS) // BACKWARD_PRODUCTS if is_backward else flops


class _Numbers:
    """Numbers of values: equal ones are computed by the same operators from the same inputs."""

    def __init__(self) -> None:
        self.of: dict[Node, int] = {}
        self.by_name: dict[str, int] = {}
        self.known: dict[Hashable, int] = {}

    def add(self, node: Node) -> bool:
        """Number a node; whether its value is new."""
        if node.op == "placeholder":
            number = self.by_name.get(node.name, len(self.known))
            self.known.setdefault(("input", node.name), number)
            is_new = True
        else:
            key = (node.op, node.target, self._frozen(node))
            is_new = key not in self.known
            number = self.known.setdefault(key, len(self.known))
        self.of[node] = self.by_name[node.name] = number
        return is_new

    def _frozen(self, node: Node) -> Hashable:
        def leaf(value: Any) -> Any:
            return ("value", self.of[value]) if isinstance(value, Node) else value

        return repr(map_aggregate([node.args, list(node.kwargs.items())], leaf))
