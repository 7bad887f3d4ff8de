"""Layouts: the meshes, resharding and checkpointing that are worth a look for a model on a cluster.

Contract: the list depends on the model and the shape of the cluster alone, and its order is fixed. Layouts that use
all ranks are listed:

    ddp        one axis
    fsdp       one axis
    hsdp       shards over one, two, four ... nodes, replicas over the rest
    fsdp-tp    tensor parallelism with sequence parallelism inside a node, FSDP across
    hsdp-tp    the same with copies of the state: as many as possible, or two
    tp         tensor parallelism over all ranks, if they are one node
    ep-fsdp    experts over a power of two of ranks; everything is sharded over all ranks

Where parameters are sharded, backward gathers all weights again (`always`) or none (`never`). Blocks are checkpointed
by `none`, `selective` or `full` (`weft.zoo.checkpointing`), if the model offers it.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.advice.layout import TrainingLayout
from weft.advice.models import TrainedModel
from weft.cost.cluster import Cluster
from weft.zoo.parallel.strategies import strategy_of

RESHARDS = ("always", "never")


def layouts_of(model: TrainedModel, cluster: Cluster) -> list[TrainingLayout]:
    """All layouts of a model on a cluster."""
    found: list[TrainingLayout] = []
    for parallel, sizes in _meshes(model, cluster):
        strategy = strategy_of(parallel)
        mesh = tuple(zip(strategy.axes, sizes, strict=True))
        reshards = RESHARDS if strategy.shard else RESHARDS[:1]
        found += [
            TrainingLayout(parallel, mesh, reshard, checkpoint)
            for reshard in reshards
            for checkpoint in model.checkpoints
        ]
    return found


def _meshes(model: TrainedModel, cluster: Cluster) -> Iterator[tuple[str, tuple[int, ...]]]:
    num_ranks, per_node = cluster.num_ranks, cluster.ranks_per_node
    if num_ranks == 1:
        return
    yield "ddp", (num_ranks,)
    yield "fsdp", (num_ranks,)
    for num_shards in (each for each in _doublings(per_node, num_ranks) if num_ranks % each == 0):
        yield "hsdp", (num_ranks // num_shards, num_shards)
    for degree in (each for each in _doublings(2, per_node + 1) if per_node % each == 0 and model.splits_over(each)):
        if degree == num_ranks:
            yield "tp", (degree,)
        else:
            yield "fsdp-tp", (num_ranks // degree, degree)
            sizes = [each for each in _doublings(per_node, num_ranks) if num_ranks % each == 0 and each > degree]
            for size in dict.fromkeys(sizes[:1] + sizes[-1:]):  # all would double the search
                yield "hsdp-tp", (num_ranks // size, size // degree, degree)
    for degree in _doublings(2, min(model.num_experts, num_ranks - 1) + 1):
        if model.num_experts % degree == 0 and num_ranks % degree == 0:
            yield "ep-fsdp", (num_ranks // degree, degree)


def _doublings(first: int, end: int) -> Iterator[int]:
    """first, 2 first, 4 first ... below `end`."""
    while first < end:
        yield first
        first *= 2
