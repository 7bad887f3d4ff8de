"""Notes: what a cluster leaves out, and what its times therefore lack."""

from __future__ import annotations

from weft.cost.cluster import Cluster


def notes_on(cluster: Cluster) -> list[str]:
    """One sentence for all that takes no time, or too little; none where compute is described."""
    has_peak, has_memory = bool(cluster.device.peak_tflops), cluster.device.memory_gbps is not None
    if has_peak and has_memory:
        return []
    if has_peak:
        return [f"cluster {cluster.name} has no memory_gbps in [device]: compute other than products takes no time"]
    if has_memory:
        return [f"cluster {cluster.name} has no peak_tflops in [device]: products take the time of their bytes alone"]
    return [f"cluster {cluster.name} has no peak_tflops and no memory_gbps in [device]: compute takes no time"]
