"""Roofline time of the compute nodes of a graph.

A product (matrix product, convolution, attention) takes the longer of two times: its flops at the stated share of the
device's peak, and its traffic at the memory bandwidth. Everything else takes the time of its traffic. A fused region
takes the traffic across its border (`traffic.py`), charged to the nodes that cause it. Views, items, inputs, waits and
launches take no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from weft.cost.access import PLAIN, extra_bytes, percent_of, relative_rate
from weft.cost.device import USUAL_SHARE, Device
from weft.cost.execution import compiled_nodes, host_ns
from weft.cost.flops import flops_of, product_dtype, shape_of
from weft.cost.kernels import ProductShape
from weft.cost.traffic import Traffic, TrafficKind
from weft.graph.dag import Dag
from weft.graph.operator_effects import profile

NUM_ROUNDS = 8
"""Rounds until the share of products and their speed agree to a millionth."""
KERNELS = (TrafficKind.FUSED, TrafficKind.END, TrafficKind.KERNEL)


@dataclass(frozen=True)
class Compute:
    """Times of compute nodes in whole nanoseconds, by index."""

    ns: tuple[int, ...]
    flops: tuple[int, ...]
    regions: tuple[int, ...]
    """The first node of the kernel that a node belongs to; -1 for nodes without a kernel."""
    unknown: frozenset[int]
    """Nodes whose time is unknown, wholly or in part."""
    host_ns: tuple[int, ...] = ()
    """Time that the host takes to issue each node; empty: none."""
    inner: frozenset[int] = frozenset()
    """Nodes whose result exists only inside a fused kernel, so that it takes no memory; used only with an execution."""


def compute(dag: Dag, device: Device) -> Compute:
    """Price the compute nodes."""
    compiled = compiled_nodes(dag, device)
    traffic = Traffic(dag, compiled, thorough=device.execution != "")
    ns, flops = [0] * len(dag.nodes), [0] * len(dag.nodes)
    unknown: set[int] = set()
    so_far: dict[int, int] = {}
    rate = relative_rate(device)
    for i, kind in enumerate(traffic.kinds):
        if kind not in KERNELS:
            continue
        region, moved = traffic.regions[i], traffic.num_bytes[i]
        if (
            moved is not None and device.memory_efficiency != 1.0
        ):  # a device without that constant has plain rooflines only
            moved = _cost_bytes(dag.nodes[i], moved, compiled[i], rate)
        before = so_far.get(region, 0)
        so_far[region] = after = before + (moved or 0)
        # Differences of running sums, so that the times of a region's nodes add up to the region's time exactly.
        ends, starts = device.traffic_ns(after), device.traffic_ns(before)
        if moved is None or traffic.values[i] is None or ends is None or starts is None:
            unknown.add(i)
        else:
            ns[i] = ends - starts
        if kind is TrafficKind.KERNEL:
            product_ns, flops[i] = _product(dag.nodes[i], device)
            ns[i] = max(ns[i], product_ns or 0)
            if product_ns is None or (not flops[i] and profile(dag.nodes[i].target).opaque):
                unknown.add(i)
    if device.power_headroom and device.execution:
        _set_clocks(ns, flops, device.power_headroom)
    _add_starts(ns, traffic, device.kernel_ns)
    regions = [region if kind in KERNELS else -1 for region, kind in zip(traffic.regions, traffic.kinds, strict=True)]
    host = host_ns(dag, device, traffic.kinds, traffic.regions)
    inner = frozenset(i for i, is_inner in enumerate(traffic.is_inner) if is_inner and device.execution != "")
    return Compute(tuple(ns), tuple(flops), tuple(regions), frozenset(unknown), host, inner)


def _cost_bytes(node: Node, moved: int, is_compiled: bool, rate: float) -> int:
    """The bytes that a plain copy moves in the time in which the node moves its own."""
    extra = extra_bytes(node) if is_compiled else 0
    return moved * percent_of(node, is_compiled, rate) // PLAIN + extra


def _set_clocks(ns: list[int], flops: list[int], headroom: float) -> None:
    """Scale the times of products: the power limit lets them run faster in a step with less of them."""
    products = [i for i, count in enumerate(flops) if count]
    work, rest = sum(ns[i] for i in products), sum(ns) - sum(ns[i] for i in products)
    if not work:
        return
    time = float(work)
    for _ in range(NUM_ROUNDS):  # the share depends on the speed, and the speed on the share
        time = work / (1 + headroom * (USUAL_SHARE - time / (time + rest)))
    scale_ppm = round(time / work * 1_000_000)
    for i in products:
        ns[i] = ns[i] * scale_ppm // 1_000_000


def _add_starts(ns: list[int], traffic: Traffic, kernel_ns: int) -> None:
    """Charge the start of each kernel that takes time to its first node that takes time."""
    started: set[int] = set()
    for i, kind in enumerate(traffic.kinds):
        region = traffic.regions[i]
        if ns[i] and kind in KERNELS and region not in started:
            started.add(region)
            ns[i] += kernel_ns


def _product(node: Node, device: Device) -> tuple[int | None, int]:
    """Time and flops of a product: both 0 for other kernels, no time if the size or the peak is unknown."""
    flops = flops_of(node)
    if not flops:
        return flops, 0
    dtype, shape = product_dtype(node), shape_of(node)
    if dtype is None:
        return None, flops
    if shape is None:
        return device.product_ns(flops, dtype), flops
    if isinstance(shape, ProductShape):
        return device.shaped_product_ns(shape, dtype), flops
    return device.attention_ns(shape, dtype), flops
