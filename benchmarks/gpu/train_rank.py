"""One rank of one job of `train.py`: builds the model, checks values against eager, times and profiles each variant.

    python benchmarks/gpu/train_rank.py JOB.json RANK

Contract: a job names a parallelism, a number of ranks and variants. Rank 0 appends a row to the job's file as soon as a
variant is measured; a later row of a variant replaces an earlier one. A variant that raises gives a row with the error.
The first row, `calibrate`, is the cluster, measured by the same processes on the groups that the variants use.
A step is the loss and all gradients; the optimizer is the same for all variants and is left out.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from train_calibrate import calibrate
from train_profile import communication_of, events_of, record
from train_stuck import tell_if_stuck
from train_variants import INSTEAD, Variant, make_variant

from weft import zoo
from weft.zoo.catalog import ENTRIES
from weft.zoo.parallel.strategies import strategy_of

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
MAX_LOSS_ERROR, MAX_GRADIENT_ERROR = 1e-2, 5e-2
"""Largest relative error of the loss and of the gradients' norm against eager: bf16 has eight bits."""
SHOWN = 400
ROUNDS = 2


class Rank:
    """The state of one rank for a job."""

    def __init__(self, job: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
        self.job, self.rank = job, rank
        self.device = torch.device("cuda:0" if job["device"] == "cuda" else "cpu")
        self.mesh = mesh
        self.model, self.batch = self.build()
        self.reference = self._eager()
        self.captured: dict[str, GraphModule] = {}
        """Captured joint graphs, by partition."""
        self.measured: dict[str, float] | None = None
        """Node times of the captured graph, for the variants that follow."""

    def build(self, *, plain: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The model from a fixed state, and this rank's batch; a plain one is whole and in f32."""
        job = self.job
        torch.manual_seed(0)
        with self.device:
            if plain:
                entry = ENTRIES["llama-debug"]
                model = entry.make(replace(entry.config, **job["shape"]))
            else:
                reduce = DTYPES[job["reduce"]]
                name = job.get("model", "llama-debug")
                model, _ = zoo.build(name, job["parallel"], self.mesh, reduce_dtype=reduce, **job["shape"])
        config: Any = model.config
        number = 0
        for axis in strategy_of(job["parallel"]).data_axes:
            number = number * self.mesh[axis].size() + self.mesh.get_local_rank(axis)
        generator = torch.Generator().manual_seed(1000 + number)
        tokens = torch.randint(0, config.vocabulary, (job["batch"], config.sequence + 1), generator=generator)
        batch = tuple(part.contiguous().to(self.device) for part in (tokens[:, :-1], tokens[:, 1:]))
        return model, batch

    def _eager(self) -> list[Tensor]:
        loss = self.model(*self.batch)
        loss.backward()
        found = [loss.detach(), *(local(p.grad).clone() for p in self.model.parameters() if p.grad is not None)]
        self.model.zero_grad(set_to_none=True)
        return found

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # Values, time and communication of one variant.

    def check(self, variant: Variant) -> dict[str, Any]:
        """How far the loss and the gradients are from eager, on the worst rank."""
        found = variant.run()
        if len(found) != len(self.reference):
            raise RuntimeError(f"{len(found)} results, eager has {len(self.reference)}")
        pairs = list(zip(found, self.reference, strict=True))
        loss = float((pairs[0][0] - pairs[0][1]).abs() / pairs[0][1].abs())
        off = sum(float((a.float() - b.float()).square().sum()) for a, b in pairs[1:])
        norm = sum(float(b.float().square().sum()) for _, b in pairs[1:])
        worst = self.max([loss, (off / norm) ** 0.5])
        close = worst[0] <= MAX_LOSS_ERROR and worst[1] <= MAX_GRADIENT_ERROR
        errors = [error if isfinite(error) else None for error in worst]
        return {"loss_error": errors[0], "gradient_error": errors[1], "values_agree": close}

    def max(self, numbers: list[float]) -> list[float]:
        """The largest over the ranks."""
        found = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.tolist()

    def time(self, variant: Variant, warm_up: int) -> list[float]:
        """Milliseconds of each step on the slowest rank."""
        times: list[float] = []
        for step in range(warm_up + self.job["steps"]):
            dist.barrier()
            self.synchronize()
            ms = self._step(variant)
            if step >= warm_up:
                times.append(ms)
        return self.max(times)

    def _step(self, variant: Variant) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            variant.run()
            return (time.perf_counter() - started) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        variant.run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def profile(self, variant: Variant, name: str) -> dict[str, Any]:
        """Profiled communication of a step, on the rank that exposes most."""
        path = Path(self.job["folder"]) / f"step_rank{self.rank}.json.gz"
        dist.barrier()
        record(variant.run, path, device=self.device.type)
        if self.job.get("traces") and self.rank == 0:
            label = "_".join((self.job["parallel"], str(self.job["ranks"]), *name.replace("'", "").split()))
            shutil.copy(path, Path(self.job["traces"]) / f"{label}.json.gz")
        found = communication_of(events_of(path)) or {}
        names = ("communication_us", "exposed_us", "compute_us")
        told = dict(zip(names, self.max([found.get(name, -1.0) for name in names]), strict=True))
        return {name.replace("_us", "_ms"): us / 1e3 if us >= 0 else None for name, us in told.items()}


def mesh_of(job: dict[str, Any]) -> DeviceMesh:
    """The mesh of a job's parallelism."""
    axes = strategy_of(job["parallel"]).axes
    sizes = (job["ranks"],) if len(axes) == 1 else (job["ranks"] // 2, 2)
    return init_device_mesh(job["device"], sizes, mesh_dim_names=axes)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def figures(times: list[float]) -> dict[str, Any]:
    """The median, and the range of the middle half."""
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return {"step_ms": middle, "spread_ms": high - low, "steps": len(times)}


def run_variants(job: dict[str, Any], rank: int, mesh: DeviceMesh, write: Callable[[dict[str, Any]], None]) -> None:
    """Check, time and profile every variant; several of them a second time in turn, since the machine drifts."""
    held = Rank(job, rank, mesh)
    ready: dict[str, tuple[Variant, dict[str, Any], list[float]]] = {}
    names = list(job["variants"])
    for name in names:
        try:
            row = _first(held, name, ready)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:SHOWN]}
            traceback.print_exc()
            names += [INSTEAD[name]] if name in INSTEAD else []
        write({"variant": name, **row})
        gc.collect()
        if held.device.type == "cuda":
            torch.cuda.empty_cache()
    for _ in range(ROUNDS - 1 if len(ready) > 1 else 0):
        for name, (variant, row, times) in ready.items():
            times += held.time(variant, warm_up=1)
            write({"variant": name, **row, **figures(times)})


def _first(held: Rank, name: str, ready: dict[str, tuple[Variant, dict[str, Any], list[float]]]) -> dict[str, Any]:
    started = time.perf_counter()
    if held.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    variant = make_variant(held, name)
    row: dict[str, Any] = held.check(variant)
    row["preparation_s"] = round(time.perf_counter() - started, 2)
    times = held.time(variant, held.job["warm_up"])
    row |= figures(times)
    if held.device.type == "cuda":
        row["peak_gib"] = held.max([torch.cuda.max_memory_allocated() / 2**30])[0]
    row |= held.profile(variant, name)
    row |= variant.about()
    ready[name] = (variant, row, times)
    return row


def start(job: dict[str, Any], rank: int) -> None:
    """Join the world of the job."""
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
    if job["device"] == "cuda":
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        os.environ["TORCH_NCCL_HIGH_PRIORITY"] = "1"  # else a collective waits for the other ranks' products
        torch._dynamo.config.recompile_limit = 32  # one function, compiled in many ways
        torch.cuda.set_device(0)
        torch.backends.cuda.enable_cudnn_sdp(False)  # one kernel of attention for all variants
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        dist.init_process_group("nccl", rank=rank, world_size=job["ranks"], device_id=torch.device("cuda:0"))
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=job["ranks"])


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    start(job, rank)
    tell_if_stuck(job["limit_s"] - 10)

    def write(row: dict[str, Any]) -> None:
        if rank == 0:
            with Path(job["rows"]).open("a") as file:
                file.write(json.dumps(row) + "\n")

    mesh = mesh_of(job)
    write({"variant": "calibrate", **calibrate(job, rank, mesh)})
    dist.barrier()  # the other ranks read the cluster that rank 0 has written
    run_variants(job, rank, mesh, write)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
