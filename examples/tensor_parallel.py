"""Tensor and sequence parallelism by torch's parallelize_module.

torchrun --standalone --nproc-per-node=2 examples/tensor_parallel.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import weft


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def split(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Embedding, blocks, head: matmuls hold a part of the features, everything between them a part of the sequence."""
    plan = {"0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
    for index in range(1, len(model) - 1):
        plan[f"{index}.norm"] = SequenceParallel()
        plan[f"{index}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"{index}.down"] = RowwiseParallel(output_layouts=Shard(1))
    plan[str(len(model) - 1)] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, plan)


def train(backend: str, steps: int) -> list[float]:
    torch.manual_seed(0)  # all ranks see the same batch
    model = nn.Sequential(nn.Embedding(64, 32), Block(32), Block(32), nn.Linear(32, 64))
    split(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, targets = torch.randint(0, 64, (2, 4, 16))

    losses: list[float] = []
    for step in range(steps):
        loss = nn.functional.cross_entropy(compiled(tokens).flatten(0, 1), targets.flatten())
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
