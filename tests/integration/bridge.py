"""What ranks run: one model under FSDP2's `fully_shard` and under `weft.simple_fsdp`, trained and exchanged."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

import weft
from weft.frontends.session import SESSION
from weft.graph.collective import Kind, collectives

STATES = ("model", "optimizer")


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks, and a head with a first dim that ranks do not divide."""

    def __init__(self, dim: int = 8, num_outputs: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


@dataclass
class Outcome:
    losses: list[float]
    collectives: int
    """In the graphs that Weft saw."""


def _mesh(shape: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))


def made(
    way: str, mesh: DeviceMesh, dtype: torch.dtype | None = None, reshard: bool = True, num_outputs: int = 5
) -> nn.Module:
    torch.manual_seed(0)
    model = Model(num_outputs=num_outputs)
    if way == "simple_fsdp":
        return weft.simple_fsdp(model, mesh, param_dtype=dtype, reduce_dtype=dtype and torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def _batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def losses_of(
    model: nn.Module,
    backend: str,
    steps: int = 10,
    optimizer: torch.optim.Optimizer | None = None,
    num_microbatches: int = 1,
    options: dict[str, Any] | None = None,
) -> list[float]:
    """The losses of the last microbatch of each step. Gradients are reduced after the last one."""
    optimizer = optimizer or _optimizer(model)
    run: Any = model if backend == "eager" else torch.compile(model, backend=backend, options=options)
    switch: Any = model.set_requires_gradient_sync
    found: list[float] = []
    for step in range(steps):
        for number in range(num_microbatches):
            if num_microbatches > 1:
                switch(number == num_microbatches - 1, recurse=True)
            loss = run(_batch(num_microbatches * step + number))
            loss.backward()
            if number == num_microbatches - 1:
                found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def train(
    way: str, shape: dict[str, int], backend: str, dtype: torch.dtype | None = None, num_microbatches: int = 1
) -> Outcome:
    torch._dynamo.reset()
    SESSION.reset()
    losses = losses_of(made(way, _mesh(shape), dtype), backend, num_microbatches=num_microbatches)
    reports = [entry.report for entry in weft.run_report().entries if entry.report]
    return Outcome(losses, sum(report["before"]["num_collectives"] for report in reports))


def parameters_of(way: str, backend: str, pipeline: str = "") -> tuple[list[Any], int]:
    """The parameters after ten steps on a mesh of all ranks, and the number of reductions in Weft's graphs."""
    torch._dynamo.reset()
    SESSION.reset()
    model = made(way, _mesh({"dp": dist.get_world_size()}), num_outputs=8)
    num_reductions = 0
    weave = SESSION.weave

    def counted(module: GraphModule, *args: Any, **keywords: Any) -> bool:
        nonlocal num_reductions
        is_woven = weave(module, *args, **keywords)
        num_reductions += sum(each.kind is Kind.REDUCE_SCATTER for each in collectives(module.graph))
        return is_woven

    with mock.patch.object(SESSION, "weave", counted):
        losses_of(model, backend, options={"weft.pipeline": pipeline} if pipeline else None)
    return [_whole(parameter).tolist() for parameter in model.parameters()], num_reductions


def exchange(shape: dict[str, int]) -> list[str]:
    """Train each model, load its parameters into the other; returns the names of those that then differ."""
    mesh = _mesh(shape)
    theirs, ours = made("fully_shard", mesh), made("simple_fsdp", mesh)
    wrong: list[str] = []
    for source, target in ((theirs, ours), (ours, theirs)):
        losses_of(source, "eager", steps=2)
        target.load_state_dict(source.state_dict())
        pairs = zip(source.state_dict().items(), target.state_dict().items(), strict=True)
        wrong += [name for (name, a), (other, b) in pairs if name != other or not torch.equal(_whole(a), _whole(b))]
    return wrong


def exchange_optimizers(shape: dict[str, int]) -> list[tuple[list[float], list[float]]]:
    """Train each model, load its parameters and its optimizer's state into the other, and train both on."""
    mesh, whole = _mesh(shape), StateDictOptions(full_state_dict=True)
    found: list[tuple[list[float], list[float]]] = []
    for ways in (("fully_shard", "simple_fsdp"), ("simple_fsdp", "fully_shard")):
        source, target = (made(way, mesh) for way in ways)
        theirs, ours = _optimizer(source), _optimizer(target)
        losses_of(source, "eager", 3, theirs)
        state, moments = deepcopy(get_state_dict(source, theirs, options=whole))  # it shares memory with the source
        set_state_dict(target, ours, model_state_dict=state, optim_state_dict=moments, options=whole)
        found.append((losses_of(source, "eager", 3, theirs), losses_of(target, "eager", 3, ours)))
    return found


def exchange_checkpoints(shape: dict[str, int], folder: str) -> list[tuple[list[float], list[float]]]:
    """Train each model, write a sharded checkpoint, read it into the other model, and train both on."""
    mesh = _mesh(shape)
    found: list[tuple[list[float], list[float]]] = []
    for ways in (("fully_shard", "simple_fsdp"), ("simple_fsdp", "fully_shard")):
        source, target = (made(way, mesh) for way in ways)
        theirs, ours = _optimizer(source), _optimizer(target)
        losses_of(source, "eager", 3, theirs)
        path = f"{folder}/{ways[0]}"
        checkpoint.save(dict(zip(STATES, get_state_dict(source, theirs), strict=True)), checkpoint_id=path)
        state = dict(zip(STATES, get_state_dict(target, ours), strict=True))
        checkpoint.load(state, checkpoint_id=path)
        set_state_dict(target, ours, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found.append((losses_of(source, "eager", 3, theirs), losses_of(target, "eager", 3, ours)))
    return found


def _whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
