"""The traffic that fused nodes cannot avoid, in any graph that makes values again or no longer does so.

Contract: such a graph has the same nodes, some of them several times; which of them a compiler fuses may differ. But a
kernel of its own never joins a region, so a fused value that it reads is written, and what it made is read by each
region that needs it. A node that ends a region always writes its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.cost.device import Device
from weft.cost.execution import compiled_nodes
from weft.cost.traffic import Traffic, TrafficKind
from weft.graph.dag import Dag


@dataclass(frozen=True)
class LeastTraffic:
    """Times in nanoseconds, by node."""

    is_fused: tuple[bool, ...]
    """Whether a node's own time depends on what it is fused with."""
    result_ns: tuple[int, ...]
    """Time of the result that a fused node writes each time it runs."""
    read_ns: tuple[int, ...]
    """Time of the tensors that a fused node reads at least once, and that no other fused node reads."""
    written_ns: dict[int, tuple[int, int]]
    """For fused nodes, a reader outside of all regions, and the time in which the value is written for it."""


def least_traffic(dag: Dag, device: Device, original: Sequence[int]) -> LeastTraffic:
    """The unavoidable traffic of the nodes of which the others are repetitions: `original` names one for each node."""
    fuses = compiled_nodes(dag, device)
    traffic = Traffic(dag, fuses, thorough=device.execution != "")
    closed = (TrafficKind.FUSED, TrafficKind.END)
    is_fused = [fuses[i] and kind in closed for i, kind in enumerate(traffic.kinds)]
    result, read = [0] * len(dag.nodes), [0] * len(dag.nodes)
    written: dict[int, tuple[int, int]] = {}
    readers: dict[int, dict[int, int]] = {}
    for i, kind in enumerate(traffic.kinds):
        is_view = kind in (TrafficKind.FREE, TrafficKind.VIEW) and dag.nodes[i].op != "output"
        if original[i] != i or is_view:
            continue
        for p in traffic.read(i) if is_fused[i] else traffic.inputs[i]:
            source = original[traffic.roots[p]]
            source_kind = traffic.kinds[source]
            if not is_fused[i] and source_kind is TrafficKind.FUSED and is_fused[source]:
                written.setdefault(source, (i, _ns(device, traffic.values[source])))
            elif is_fused[i] and source_kind is not TrafficKind.FUSED:
                found = readers.setdefault(source, {})
                found[i] = max(found.get(i, 0), min(traffic.values[p] or 0, traffic.values[source] or 0))
        if is_fused[i] and kind is TrafficKind.END:
            result[i] = _ns(device, traffic.values[i])
    for found in readers.values():
        if len(found) == 1:
            ((i, num_bytes),) = found.items()
            read[i] += _ns(device, num_bytes)
    return LeastTraffic(tuple(is_fused), tuple(result), tuple(read), written)


def _ns(device: Device, num_bytes: int | None) -> int:
    """The time of some bytes, rounded down: several of them in one kernel are rounded up together."""
    return max(0, (device.traffic_ns(num_bytes or 0) or 0) - 1)
