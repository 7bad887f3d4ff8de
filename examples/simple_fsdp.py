"""Fully sharded data parallelism by DTensor parametrisation, as SimpleFSDP has it.

torchrun --standalone --nproc-per-node=2 examples/simple_fsdp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

import weft
from weft import zoo


class Gathered(nn.Module):
    """The whole of a sharded parameter; its gradient is averaged and scattered."""

    def forward(self, shard: DTensor) -> Tensor:
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def shard_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
            parametrize.register_parametrization(module, name, Gathered(), unsafe=True)


def train(backend: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    model, make_batch = zoo.build("llama-debug", layers=1, compute_dtype=torch.float32)  # any model will do
    shard_parameters(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = make_batch(2, seed=dist.get_rank())

    losses: list[float] = []
    for step in range(steps):
        loss = compiled(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step}  loss {losses[-1]:.6f}", flush=True)
    if dist.get_rank() == 0:
        reports = [entry.report for entry in weft.run_report().entries if entry.report]
        collectives = sum(report["before"]["num_collectives"] for report in reports)
        changes = sum(len(report["applied"]) for report in reports)
        print(f"weft: {len(reports)} graphs, {collectives} collectives, {changes} changes", flush=True)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="weft_eager", help="weft_eager, weft, aot_eager or eager")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.backend, args.steps)
    dist.destroy_process_group()
