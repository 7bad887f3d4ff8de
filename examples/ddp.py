"""Data parallelism by torch's DDP, with its all-reduces inside of the compiled graphs.

torchrun --standalone --nproc-per-node=2 examples/ddp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft


def train(backend: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = weft.ddp(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs, targets = torch.randn(16, 32, generator=generator), torch.randint(0, 8, (16,), generator=generator)

    @torch.compile(backend=backend)  # backward is in the function: compiled autograd is on only inside of it
    def compute_gradients(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    losses: list[float] = []
    for step in range(steps):
        losses.append(compute_gradients(inputs, targets).item())
        optimizer.step()
        optimizer.zero_grad()
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
