"""Roofline time of the compute nodes of a graph.

A product (matrix product, convolution, attention) takes the longer of two times: its flops at the stated share of the
device's peak, and its traffic at the memory bandwidth. Everything else takes the time of its traffic. A fused region
takes the traffic across its border (`traffic.py`), charged to the nodes that cause it. Views, items, inputs, waits and
launches take no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.cost.device import Device
from weft.cost.flops import flops_of, product_dtype
from weft.cost.traffic import Traffic, TrafficKind
from weft.graph.dag import Dag
from weft.graph.operator_effects import profile


@dataclass(frozen=True)
class Compute:
    """Times of compute nodes in whole nanoseconds, by index."""

    ns: tuple[int, ...]
    flops: tuple[int, ...]
    regions: tuple[int, ...]
    """The first node of the kernel that a node belongs to; -1 for nodes without a kernel."""
    unknown: frozenset[int]
    """Nodes whose time is unknown, wholly or in part."""


def compute(dag: Dag, device: Device) -> Compute:
    """Price the compute nodes."""
    traffic = Traffic(dag, device.fuses)
    ns, flops = [0] * len(dag.nodes), [0] * len(dag.nodes)
    unknown: set[int] = set()
    so_far: dict[int, int] = {}
    for i, kind in enumerate(traffic.kinds):
        if kind not in (TrafficKind.FUSED, TrafficKind.END, TrafficKind.KERNEL):
            continue
        region, moved = traffic.regions[i], traffic.num_bytes[i]
        before = so_far.get(region, 0)
        so_far[region] = after = before + (moved or 0)
        # Differences of running sums, so that the times of a region's nodes add up to the region's time exactly.
        ends, starts = device.traffic_ns(after), device.traffic_ns(before)
        if moved is None or traffic.values[i] is None or ends is None or starts is None:
            unknown.add(i)
        else:
            ns[i] = ends - starts
        if kind is TrafficKind.KERNEL:
            product_ns, flops[i] = _product(dag, i, device)
            ns[i] = max(ns[i], product_ns or 0)
            if product_ns is None or profile(dag.nodes[i].target).opaque:
                unknown.add(i)
    kernels = (kind in (TrafficKind.FUSED, TrafficKind.END, TrafficKind.KERNEL) for kind in traffic.kinds)
    regions = (region if kernel else -1 for region, kernel in zip(traffic.regions, kernels, strict=True))
    return Compute(tuple(ns), tuple(flops), tuple(regions), frozenset(unknown))


def _product(dag: Dag, i: int, device: Device) -> tuple[int | None, int]:
    """Time and flops of a product: both 0 for other kernels, no time if the size or the peak is unknown."""
    node = dag.nodes[i]
    flops = flops_of(node)
    if not flops:
        return flops, 0
    dtype = product_dtype(node)
    return (device.product_ns(flops, dtype) if dtype is not None else None), flops
