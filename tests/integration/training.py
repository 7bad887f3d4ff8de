"""What ranks run: a small model, spread in one way, trained a few steps with one backend of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from weft import zoo
from weft.frontends.session import SESSION
from weft.zoo.parallel.parameters import Precision
from weft.zoo.parallel.strategies import parallelise

SHAPE = {"dim": 32, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 64, "vocabulary": 64, "sequence": 8}


@dataclass
class Trained:
    """How a run went on one rank."""

    losses: list[float]
    weights: dict[str, Any]
    """This rank's part of each parameter after the last step, as arrays."""
    graphs: list[dict[str, Any]] = field(default_factory=list)
    """The entries of the session's report."""
    messages: tuple[str, ...] = ()


def train(
    parallel: str,
    mesh: dict[str, int],
    backend: str,
    options: dict[str, Any] | None = None,
    steps: int = 3,
    layers: int = 1,
    model: str = "llama-debug",
    micro_steps: int = 1,
    batch_size: int = 2,
) -> Trained:
    """Train from a fixed state.

    `parallel` is one of the zoo's; `simple-fsdp`; or torch's `ddp-reducer`, `ddp-default` or `fsdp2`. Of `micro_steps`
    for each step only the last synchronizes, under DDP.
    """
    _start_afresh()
    axes = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    made, batch = _build(parallel, axes, model, layers)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, foreach=False)

    losses: list[float] = []
    scalars = {"capture_scalar_outputs": True} if model.startswith("dropless") else {}
    with torch._dynamo.config.patch(**_dynamo_settings(parallel), **scalars):
        run = _step_function(made, backend, options, backward_inside=parallel == "ddp-reducer")
        for step in range(steps):
            for micro_step in range(micro_steps - 1):
                with made.no_sync():
                    run(*batch(batch_size, seed=100 * step + micro_step))
            losses.append(run(*batch(batch_size, seed=step)).item())
            optimizer.step()
            optimizer.zero_grad()
    report = SESSION.report()
    return Trained(
        losses,
        {name: _array(parameter) for name, parameter in made.named_parameters()},
        [{"phase": e.phase, "role": e.role, "from_cache": e.from_cache, **e.report} for e in report.entries],
        report.messages,
    )


def _step_function(model: nn.Module, backend: str, options: Any, *, backward_inside: bool) -> Callable[..., Tensor]:
    """Forward and backward, compiled; compiled autograd is only on inside of a compiled function."""

    def compiled(function: Any) -> Any:
        return function if backend == "eager" else torch.compile(function, backend=backend, options=options)

    forward = model if backward_inside else compiled(model)

    def step(*inputs: Tensor) -> Tensor:
        loss = forward(*inputs)
        loss.backward()
        return loss

    return compiled(step) if backward_inside else step


def _start_afresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    SESSION.reset()
    torch.manual_seed(0)


def _dynamo_settings(parallel: str) -> dict[str, Any]:
    return {"optimize_ddp": "python_reducer", "compiled_autograd": True} if parallel == "ddp-reducer" else {}


def _build(parallel: str, mesh: DeviceMesh, name: str, layers: int) -> tuple[nn.Module, Any]:
    made, batch = _plain(name, layers)
    if parallel == "simple-fsdp":
        return shard_parameters(made, mesh), batch
    if parallel == "fsdp2":
        return fully_shard(made, mesh=mesh), batch
    if parallel in ("ddp-reducer", "ddp-default"):
        with torch._dynamo.config.patch(**_dynamo_settings(parallel)):  # DDP's constructor looks at it
            return DistributedDataParallel(made), batch
    if name == "mini":
        parallelise(made, parallel, mesh, Precision(torch.float32, torch.float32))
        return made, batch
    return zoo.build(name, parallel, mesh, layers=layers, compute_dtype=torch.float32, **_shape(name))


def _shape(name: str) -> dict[str, int]:
    """What is made smaller of a model of the zoo: small pictures are small already."""
    return {} if name.startswith("vision") else SHAPE


def _plain(name: str, layers: int) -> tuple[nn.Module, Any]:
    """A model for one rank, and what makes batches that differ by rank."""
    if name == "mini":
        return Mini(), lambda size, seed: Mini.batch(size, seed * 1009 + dist.get_rank())
    made, batch = zoo.build(name, layers=layers, compute_dtype=torch.float32, **_shape(name))
    return made, lambda size, seed: batch(size, seed=seed * 1009 + dist.get_rank())


class Mini(nn.Module):
    """Two matmuls and a norm, for Inductor, which makes a C++ file of every loop; the zoo can spread it."""

    config = SimpleNamespace(num_heads=4, num_kv_heads=4, ffn_dim=32, vocabulary=4, sequence=4)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.feed_forward = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False))

    @property
    def tensor_plan(self) -> dict[str, str]:
        return {"norm": "sequence", "feed_forward": "block", "feed_forward.0": "column", "feed_forward.2": "row"}

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.feed_forward(self.norm(x))).square().mean()

    @staticmethod
    def batch(size: int, seed: int) -> tuple[Tensor, ...]:
        return (torch.randn(size, 4, 16, generator=torch.Generator().manual_seed(seed)),)


def _array(parameter: Tensor) -> Any:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach().numpy().copy()


# Fully sharded parameters by DTensor parametrisation, the way SimpleFSDP has them.


class Gathered(nn.Module):
    """The whole of a sharded parameter; its gradient is averaged and scattered."""

    def forward(self, shard: DTensor) -> Tensor:
        whole = shard.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])


def shard_parameters(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Keep a part of each parameter; gather it where it is used."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
            parametrize.register_parametrization(module, name, Gathered(), unsafe=True)
    return model


def same(first: Trained, second: Trained) -> bool:
    """Bitwise."""
    return first.losses == second.losses and all(
        np.array_equal(first.weights[name], second.weights[name]) for name in first.weights
    )


def distance(first: Trained, second: Trained) -> float:
    """The largest difference of a weight."""
    return max(float(np.abs(first.weights[name] - second.weights[name]).max()) for name in first.weights)
