"""Several forms of one captured graph on real ranks, run in turn: values against eager, times and kernels of each.

Contract: every rank calls the same functions with the same graphs. A graph that raises gives a row with its error, and
so does a job whose processes fail or take too long.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from buckets import mps
from torch.fx import GraphModule
from train_profile import communication_of, events_of, host_copies_of, record
from train_rank import Rank, figures, local
from train_variants import Variant

WARM_UP, ROUNDS = 1, 3
LIMIT_S = 240
"""Time limit of a job; a job that fails or takes longer is recorded with its error."""
SHOWN_KERNELS = 40
Job = dict[str, Any]
Run = Callable[[int, Job, str], None]
"""Runs a job on one rank; rank 0 writes the figures to a path."""


def command_line(description: str | None) -> argparse.ArgumentParser:
    """The options that all of these scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a decoder of few small layers")
    parser.add_argument("--json", help="write the figures to this file")
    return parser


def job_of(options: argparse.Namespace, parallel: str, ranks: int, batch: int, steps: int, **more: Any) -> Job:
    """One decoder under one parallelism; `more` has its shape, and the model if it is not a Llama."""
    return {
        "parallel": parallel,
        "ranks": ranks,
        "device": options.device,
        "batch": batch,
        "reduce": "f32",
        "steps": 2 if options.tiny else steps,
        "tiny": options.tiny,
        **more,
    }


def run_jobs(options: argparse.Namespace, run: Run, jobs: Sequence[Job], show: Callable[[Job], None]) -> None:
    """Run the jobs one after the other, show each as it ends, and write all of them to the file of `--json`."""
    about = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    found: list[Job] = []
    shared = mps(max(job["ranks"] for job in jobs)) if options.device == "cuda" else nullcontext()
    with shared, tempfile.TemporaryDirectory() as folder:
        for number, job in enumerate(jobs):
            path = Path(folder) / f"job{number}.json"
            error = spawned(run, {**job, "folder": folder, "cluster": f"{folder}/cluster.toml"}, str(path))
            told = {key: job[key] for key in ("parallel", "ranks", "shape", "batch")}
            if path.exists():
                told |= json.loads(path.read_text())
                show(told)
            if error:
                told["error"] = error
                print(f"{job['parallel']}, {job['ranks']} ranks: {error}", flush=True)
            found.append(told)
            if options.json:
                Path(options.json).write_text(json.dumps({**about, "jobs": found}, indent=1))


def join(rank: int, job: dict[str, Any], port: int) -> None:
    """Enter the job's world: NCCL over loopback on a share of the GPU, or gloo."""
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_NCCL_HIGH_PRIORITY": "1"}
    os.environ |= {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // job["ranks"])}
    warnings.simplefilter("ignore")
    is_cuda = job["device"] == "cuda"
    if is_cuda:
        torch.cuda.set_device(0)
    device = {"device_id": torch.device("cuda:0")} if is_cuda else {}
    dist.init_process_group("nccl" if is_cuda else "gloo", rank=rank, world_size=job["ranks"], **device)


def inputs_of(held: Rank) -> list[torch.Tensor]:
    """The arguments of a graph that was captured from the rank's model and batch."""
    state = {**dict(held.model.named_parameters()), **dict(held.model.named_buffers())}
    return [*(local(each).detach() for each in state.values()), *held.batch]


def measure(
    held: Rank, modules: Mapping[str, GraphModule], about: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row for each graph: time, spread, values, peak memory, kernels and the given remarks."""
    inputs = inputs_of(held)

    def made(module: GraphModule) -> Variant:
        def run() -> list[torch.Tensor]:
            with torch.no_grad():
                return list(module(*inputs))

        return Variant(run)

    variants = {name: made(module) for name, module in modules.items()}
    values: dict[str, dict[str, Any]] = {}
    for name, variant in list(variants.items()):
        try:
            values[name] = held.check(variant) | _peak(held, variant, inputs)
        except RuntimeError as error:  # all ranks run the same graph, so all of them raise
            values[name] = {"error": str(error)[:400]}
            del variants[name]
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):  # in turn, because the machine drifts
        for name, variant in variants.items():
            times[name] += held.time(variant, WARM_UP)
    profiles = {name: kernels_of(held, variant) for name, variant in variants.items()}
    failed = [{"variant": name, **values[name], **about[name]} for name in modules if name not in variants]
    measured = [
        {"variant": name, **figures(times[name]), **values[name], **about[name], **profiles[name]} for name in variants
    ]
    return measured + failed


def _peak(held: Rank, variant: Variant, inputs: list[torch.Tensor]) -> dict[str, float]:
    """The largest allocation during a step, inputs included, on the rank that needs most."""
    if held.device.type != "cuda":
        return {}
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = variant.run()
    torch.cuda.synchronize()
    del results
    used = torch.cuda.max_memory_allocated() - before + sum(each.nbytes for each in inputs)
    return {"peak_gib": held.max([used / 2**30])[0]}


def kernels_of(held: Rank, variant: Variant) -> dict[str, Any]:
    """Communication, exposed communication and the longest kernels of one profiled step of this rank."""
    if held.device.type != "cuda":
        return {}
    dist.barrier()
    path = record(variant.run, Path(held.job["folder"]) / f"profile{held.rank}.json", device="cuda")
    events = events_of(path)
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            spent[event["name"][:70]] += event["dur"]
            count[event["name"][:70]] += 1
    kernels = {name: (count[name], round(us)) for name, us in spent.most_common(SHOWN_KERNELS)}
    return {**(communication_of(events) or {}), **host_copies_of(events), "kernels": kernels}


def spawned(run: Run, job: Job, path: str) -> str:
    """Run a job in its own processes; return the error, empty if none."""
    ranks = mp.spawn(run, (job, path), job["ranks"], join=False)
    until = time.monotonic() + LIMIT_S
    try:
        while not ranks.join(timeout=1):
            if time.monotonic() > until:
                return f"not finished after {LIMIT_S} s"
    except Exception as error:
        return str(error)[-2000:]
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.kill()
    return ""
