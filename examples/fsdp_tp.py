"""Fully sharded data parallelism outside, tensor and sequence parallelism inside, on a 2-D mesh.

torchrun --standalone --nproc-per-node=4 examples/fsdp_tp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft import zoo


def train(backend: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    # Weights and the sums of gradients are f32; everything else is computed in bf16.
    model, make_batch = zoo.build("llama-debug", "fsdp-tp", mesh, layers=1)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = make_batch(2)  # ranks of one `tp` group are given the same batch

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
