"""Predictions for `train.py`: the device of a rank that shares a GPU, and the step time of each variant.

Contract: no GPU is needed. The constants of a GPU with a preset are the preset's; each rank has its part of the rates.
The run measures what depends on the ranks: collectives, slowdowns, and the rates of products and copies while all ranks
compute. A product in a step is faster than one among products alone, because the power limit sets the clocks; the
preset's `power_headroom` converts the measured rate to that of a usual step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

import weft
from weft.cost.cluster import Cluster
from weft.cost.cluster_file import presets
from weft.cost.compute import compute
from weft.cost.device import USUAL_SHARE, Device
from weft.cost.kernels import AttentionRate
from weft.frontends.min_cut import Partition
from weft.graph import ops
from weft.graph.collective import collectives
from weft.graph.dag import Dag
from weft.passes.runtimes import run_as

GRAPHS = {
    "graph as captured": "none",
    "graph naive": "remove-dead-code,hoist-launches,sink-waits",
    "graph planned": "schedule-overlap",
    "graph auto": "auto",
}
"""Pipelines of the captured joint graph; `auto` is the preset of the parallelism: streams for tensor parallelism."""
EXECUTIONS = {
    "eager": "eager",
    "torch's own": "eager",
    "weft_eager": "eager",
    "inductor": "compiled",
    "weft": "compiled",
    "inductor cudagraphs": "cuda-graphs",
    "weft cudagraphs": "cuda-graphs",
} | dict.fromkeys(GRAPHS, "eager")
"""How the variants run that can be predicted. Inductor's own overlap is not: its order is not known outside of it."""
RUNTIMES = {"fsdp": "fsdp2", "ddp": "ddp"}
"""What torch's own wrappers execute, by parallelism."""
ATTENTION = "flash2"
"""The attention kernel that `train_rank.py` leaves enabled."""


@dataclass(frozen=True)
class Rates:
    """What one rank reaches while all ranks compute."""

    tflops: float
    """Products of bf16."""
    terms: int
    """Length of the sums of those products."""
    memory_gbps: float
    """Copies."""


def preset_of(machine: str) -> Device | None:
    """The device of the preset for a GPU, by the GPU's name; None if there is none."""
    name = next((name for name in presets() if name.rpartition("-")[0].upper() in machine.upper()), None)
    return Cluster.load(name).device if name is not None else None


def part_of(device: Device, ranks: int, rates: Rates | None = None) -> Device:
    """The part of a device that each of several ranks has; `rates` are measured and take precedence."""
    kernels = [each for each in device.attention if each.name == ATTENTION] or list(device.attention)
    attention = (
        replace(each, forward=_part(each.forward, ranks), backward=_part(each.backward, ranks)) for each in kernels
    )
    part = replace(
        device,
        peak_tflops=tuple((dtype, peak / ranks) for dtype, peak in device.peak_tflops),
        memory_gbps=device.memory_gbps / ranks if device.memory_gbps else None,
        memory_bytes=device.memory_bytes // ranks if device.memory_bytes else None,
        num_multiprocessors=device.num_multiprocessors // ranks,
        attention=tuple(attention),
        attention_kernel="",
    )
    if rates is None:
        return part
    peak = dict(part.peak_tflops)["bf16"]
    large = rates.tflops * (rates.terms + part.product_overhead_terms) / rates.terms
    usual = large / (1 + part.power_headroom * (USUAL_SHARE - 1))  # measured among products alone
    return replace(
        part,
        matmul_efficiency=round(min(usual / peak, 1.0), 4),
        memory_efficiency=round(min(rates.memory_gbps / part.memory_gbps, 1.0), 4) if part.memory_gbps else 1.0,
    )


def _part(rate: AttentionRate, ranks: int) -> AttentionRate:
    return replace(rate, tflops=rate.tflops / ranks)


def executed(name: str, parallel: str, captured: Callable[[Partition], GraphModule]) -> GraphModule | None:
    """The graph that a variant without Weft executes; None if it is not known. `captured` makes the joint graph.

    `train_variants.py` shards the layers and then the whole model, so the parameters outside of layers are one unit.
    """
    if name == "torch's own":
        return run_as(captured("autograd"), RUNTIMES[parallel], root="one").module
    if name not in EXECUTIONS or name.startswith(("weft", "graph")):
        return None
    return captured("autograd" if EXECUTIONS[name] == "eager" else "min-cut")


def predictions(
    modules: GraphModule | Sequence[GraphModule],
    cluster: Cluster,
    execution: str,
    measured: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The simulated step of graphs that run one after the other.

    `predicted_ms` knows the cluster only. `predicted_measured_ms` takes the times of compute nodes from a run of the
    graph as captured, so that only overlap and communication are predicted.
    """
    described = cluster.running(execution)
    found = [weft.simulate(each, described) for each in ([modules] if isinstance(modules, GraphModule) else modules)]
    told: dict[str, Any] = {
        "predicted_ms": sum(each.step_us for each in found) / 1e3,
        "predicted_exposed_ms": sum(each.exposed_us for each in found) / 1e3,
        "predicted_compute_ms": sum(each.compute_us for each in found) / 1e3,
        "predicted_host_ms": sum(each.host_us for each in found) / 1e3,
    }
    if not measured or not isinstance(modules, GraphModule):
        return told
    alone = _compute_ns(modules, described)
    timed = {name: us for name, us in measured.items() if alone.get(name) or (us > 1 and name in alone)}
    second = weft.simulate(modules, described, overrides=timed)
    return told | {
        "predicted_measured_ms": second.step_us / 1e3,
        "predicted_measured_exposed_ms": second.exposed_us / 1e3,
        "measured_nodes": len(measured),
        "unpriced_nodes": len([1 for name in measured if name in alone and not alone[name] and measured[name] > 1]),
    }


def _compute_ns(module: GraphModule, cluster: Cluster) -> dict[str, int]:
    """The priced time of each node that is neither a launch nor a wait."""
    dag = Dag(module.graph)
    launches = {each.launch for each in collectives(module.graph)}
    times = zip(dag.nodes, compute(dag, cluster.device).ns, strict=True)
    return {node.name: ns for node, ns in times if node not in launches and not ops.is_wait(node.target)}
