"""Runtimes: named pipelines that turn a captured step into what a training runtime executes.

A captured step gathers and reduces each parameter by itself and waits immediately. No runtime does that. Each name
below stands for the buckets and the order of one runtime, so that a simulation predicts what people run today.

A runtime changes only the collectives that it would issue. A step with FSDP and tensor parallelism that is run as
`fsdp2` therefore keeps the collectives of tensor parallelism synchronous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.fx import GraphModule

from weft.bucketing.units import Root
from weft.cost.cluster import Cluster
from weft.errors import PipelineError, compose, nearest
from weft.graph.collective import collectives
from weft.graph.dag import Dag
from weft.graph.groups import GroupTable, read_groups
from weft.graph.origins import module_paths
from weft.graph.roles import Roles
from weft.passes.pipeline import Pipeline, Rewritten
from weft.quantities import size_text

GATHER_BYTES = 512 << 20
"""Size of a unit's gather in a graph without module names: about one block of an 8b model in bf16."""
SCATTER_BYTES = 2 * GATHER_BYTES
"""The same for its gradients, which are reduced in f32."""


@dataclass(frozen=True)
class Runtime:
    """One training runtime."""

    title: str
    does: str
    """Its effect on the collectives of a captured step, in one sentence."""
    pipeline: str


_REPLICAS = f"bucket-all-reduces{{only=replicas units=split alias-outputs=true max-bytes={SCATTER_BYTES}}}"
_FSDP2 = (
    "dedupe-collectives{units=true},"
    f"bucket-all-gathers{{only=parameters units=split strategy=pack max-bytes={GATHER_BYTES}}},"
    f"bucket-reduce-scatters{{only=gradients units=split strategy=pack alias-outputs=true max-bytes={SCATTER_BYTES}}},"
    f"{_REPLICAS},schedule-fsdp-units,schedule-ddp-buckets"
)
STREAM = "ASYNC-TP"
"""Stands for the passes that stream activations, which depend on the cluster."""
IN_CHUNKS = (
    "fuse-all-gather-matmuls{only=activations chunks=RANKS},fuse-matmul-reduce-scatters{only=activations chunks=RANKS}"
)
"""For ranks that cannot share memory: as many chunks as the group has ranks."""
FUSED = (
    "fuse-all-gather-matmuls{only=activations chunks=RANKS kernel=symmetric-memory},"
    "fuse-matmul-reduce-scatters{only=activations chunks=RANKS kernel=symmetric-memory sums=false}"
)
"""For ranks that share memory: torch's fused operators, which split every collective next to a product into as many
parts as the group has ranks, whether or not that saves time (torch/distributed/_symmetric_memory). Inductor's pass does
not fuse scatters of sums."""

SYNCHRONOUS = "synchronous"
RUNTIMES: dict[str, Runtime] = {
    SYNCHRONOUS: Runtime("the captured order", "each collective is waited for immediately", ""),
    "ddp": Runtime(
        "DDP",
        "gradients are all-reduced in buckets of 25 MiB, the first of 1 MiB, and waited for at the end of backward",
        "fuse-ddp-all-reduces{max-bytes=1048576/26214400},schedule-ddp-buckets",
    ),
    "fsdp2": Runtime(
        "FSDP2",
        "each block is gathered at once, ahead of its use, and its gradients are reduced at once",
        _FSDP2,
    ),
    "simple-fsdp": Runtime(
        "SimpleFSDP, one bucket for each block",
        "as fsdp2, but as one graph: every copy runs, and every buffer is allocated, on the compute stream",
        _FSDP2,
    ),
    "hsdp": Runtime(
        "FSDP2 with replicas",
        "as fsdp2; the gradients of each block are then all-reduced over the replicas, and waited for at the end",
        _FSDP2,
    ),
    "tp": Runtime("tensor parallelism", "each collective is waited for immediately", ""),
    "async-tp": Runtime(
        "FSDP2 with asynchronous tensor parallelism",
        "as fsdp2; activations are gathered and scattered in one part per rank, while the products next to them run",
        f"{STREAM},{_FSDP2}",
    ),
}
"""Every runtime by its name, for `weft simulate --as` and `run_as`."""


def run_as(
    module: GraphModule,
    name: str,
    *,
    root: Root = "split",
    cluster: str | Path | Cluster | None = None,
    groups: Mapping[str, int | Sequence[Sequence[int]]] | None = None,
) -> Rewritten:
    """A captured step as a runtime executes it: its `module`, and the step of every pass.

    `root` is the layout of the parameters outside of blocks: `split` gathers the embedding by itself, and the last norm
    with the head; `one` gathers all of them at the start. `cluster` says whether `async-tp` may use symmetric memory.
    Raises `PipelineError` if there is no such runtime.
    """
    text = find_runtime(name).pipeline.replace("units=split", f"units={root}")
    described = Cluster.load(cluster) if isinstance(cluster, str | Path) else cluster
    if STREAM in text:
        text = text.replace(STREAM, _streams(read_groups(module, groups), module, described))
    return Pipeline.parse(text).rewrite(module, cluster=described, groups=groups)


def _streams(table: GroupTable, module: GraphModule, cluster: Cluster | None) -> str:
    """The passes of asynchronous tensor parallelism; 2 is the least number of chunks."""
    found = [table.group(name) for name in Roles(Dag(module.graph)).tensor_groups(table)]
    can_share = cluster is not None and all(cluster.level_of(group).symmetric is not None for group in found)
    num_ranks = max((group.size for group in found), default=2)
    return (FUSED if can_share else IN_CHUNKS).replace("RANKS", str(num_ranks))


def notes_on(module: GraphModule, name: str) -> list[str]:
    """Notes for the reader of a prediction on how a captured step became the step of a runtime."""
    launches = [each.launch for each in collectives(module.graph)]
    if "units=" not in find_runtime(name).pipeline or not launches or any(map(module_paths, launches)):
        return []
    size = size_text(GATHER_BYTES)
    return [
        f"the graph names no modules, so units are consecutive gathers of up to {size}, not the blocks of the model"
    ]


def find_runtime(name: str) -> Runtime:
    """The runtime of a name."""
    if name not in RUNTIMES:
        do = nearest(name, RUNTIMES) or f"use one of {', '.join(RUNTIMES)}"
        raise PipelineError(compose("runtimes", f"no runtime is called {name!r}", do=do))
    return RUNTIMES[name]
