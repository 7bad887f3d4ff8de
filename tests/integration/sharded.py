"""One model on all ranks of a mesh: what each rank feeds its captured step, and what one process computes of it."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from weft import zoo
from weft.frontends.fake_world import fake_world
from weft.graph.groups import read_groups
from weft.verification.rank import RankResult
from weft.verification.virtual.cluster import VirtualCluster
from weft.zoo.parallel.parameters import Precision
from weft.zoo.parallel.strategies import parallelise

F32 = torch.float32
Mesh = Mapping[str, int]


class ShardedModel:
    """A zoo model in f32, built alike everywhere."""

    def __init__(self, name: str, parallel: str, mesh: Mesh, **shape: Any) -> None:
        self.name, self.parallel, self.mesh, self.shape = name, parallel, dict(mesh), shape
        self.num_ranks = prod(mesh.values())
        self.whole = self._build()

    def capture(self, **options: Any) -> GraphModule:
        return zoo.load(self.name, self.parallel, mesh=self.mesh, compute_dtype=F32, **self.shape, **options)

    def _build(self) -> nn.Module:
        torch.manual_seed(0)
        return zoo.build(self.name, compute_dtype=F32, **self.shape)[0]

    def parts(self, tensors: list[Tensor] | None = None) -> list[list[Tensor]]:
        """For each rank its parts of the parameters, or of tensors like them, and its buffers."""
        found: list[list[Tensor]] = []
        for rank in range(self.num_ranks):
            with fake_world(self.mesh, rank=rank) as mesh:
                model = self._build()
                if tensors is not None:
                    with torch.no_grad():
                        for parameter, tensor in zip(model.parameters(), tensors, strict=True):
                            parameter.copy_(tensor)
                parallelise(model, self.parallel, mesh, Precision(F32, F32))
                values = [*model.parameters()] if tensors is not None else [*model.parameters(), *model.buffers()]
                found.append([local(value.detach()) for value in values])
        return found

    def batches(self, size: int) -> list[tuple[Tensor, ...]]:
        """The batch of each rank."""
        found: list[tuple[Tensor, ...]] = []
        for rank in range(self.num_ranks):
            with fake_world(self.mesh, rank=rank) as mesh:
                found.append(zoo.build(self.name, self.parallel, mesh, compute_dtype=F32, **self.shape)[1](size, 1))
        return found

    def loss(self, batches: list[tuple[Tensor, ...]]) -> Tensor:
        """The mean loss of one process on the batches of all ranks, each taken once."""
        distinct = list({tuple(batch[0].flatten().tolist()): batch for batch in batches}.values())
        if self.name.startswith("vision"):  # its norms see the whole batch
            return self.whole(*(torch.cat(tensors) for tensors in zip(*distinct, strict=True)))
        return torch.stack([self.whole(*batch) for batch in distinct]).mean()

    def run(self, module: GraphModule, inputs: list[list[Any]]) -> list[RankResult]:
        return VirtualCluster(self.num_ranks).run(module, inputs, read_groups(module))


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor, in memory of its own."""
    held = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.detach().clone()


def worst_difference(wanted: list[list[Tensor]], found: list[list[Tensor]]) -> float:
    """The largest difference on any rank, relative to the largest magnitude in its tensor."""
    largest = 0.0
    for wanted_by_rank, found_by_rank in zip(wanted, found, strict=True):
        for first, second in zip(wanted_by_rank, found_by_rank, strict=True):
            scale = max(float(first.abs().max()), 1e-12)
            largest = max(largest, float((first - second).abs().max()) / scale)
    return largest
