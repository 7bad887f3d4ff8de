"""Memory decisions on one GPU with 2 real ranks: planned peaks and steps against the allocator's and the clock's.

    PYTHONPATH=src python benchmarks/gpu/memory.py --json memory.json
    PYTHONPATH=src python benchmarks/gpu/memory.py --device cpu --tiny       # without a GPU

The ranks measure the cluster that they form, as `train.py` does. One decoder under FSDP is captured as it is, with full
checkpointing by block, and as torch's min-cut partitions it. Each graph is planned without a limit. Then Weft plans the
graph without recomputation within the planned peaks of the two others. All graphs run in turn. A row has the median
step, the range of the middle half, the planned and the allocated peak, and the errors of loss and gradients against
eager.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from graphs_in_turn import command_line, job_of, join, measure, run_jobs  # type: ignore[import-not-found]  # beside this file
from train_calibrate import calibrate  # type: ignore[import-not-found]
from train_rank import Rank, mesh_of  # type: ignore[import-not-found]

import weft
from weft import zoo
from weft.cost.cluster import Cluster
from weft.errors import MemoryLimitError
from weft.graph.host_copies import OFFLOAD

SHAPE = {"num_layers": 6, "dim": 2048, "ffn_dim": 5632, "num_heads": 16, "sequence": 2048, "vocabulary": 8192}
TINY = {"num_layers": 2, "dim": 64, "ffn_dim": 128, "num_heads": 4, "sequence": 64, "vocabulary": 256}
BATCH, STEPS = 16, 5
OFFLOADING = "clean,algebra,communication,sums,decide-memory{offload=true},schedule-overlap"


def captured(held: Rank, checkpoint: str, partition: Any = "autograd") -> GraphModule:
    """The joint graph of the rank's model under a way of checkpointing."""
    torch.manual_seed(0)
    with held.device:
        shape = {**held.job["shape"], "checkpoint": checkpoint}
        model, _ = zoo.build("llama-debug", "fsdp", held.mesh, reduce_dtype=torch.float32, **shape)
    return weft.capture(weft.TrainingStep(model), held.batch, held.mesh, "joint", partition=partition)


def modules_of(held: Rank, cluster: Cluster) -> tuple[dict[str, GraphModule], dict[str, dict[str, Any]]]:
    """The graph of each form, and remarks on it."""
    modules: dict[str, GraphModule] = {}
    about: dict[str, dict[str, Any]] = {}

    def plan(name: str, before: GraphModule, limit_bytes: int | None = None, pipeline: str = "auto") -> int | None:
        started = time.perf_counter()
        try:
            result = weft.optimize(before, cluster.running("eager"), pipeline=pipeline, memory_limit_bytes=limit_bytes)
        except MemoryLimitError as error:
            about[name] = {"error": str(error)[:300]}
            return None
        evidence = result.plan.evidence
        if evidence is None:
            raise RuntimeError("a plan with a cluster has figures")
        modules[name] = result.module
        about[name] = {
            "pass_s": round(time.perf_counter() - started, 2),
            "predicted_ms": evidence.step_ns / 1e6,
            "predicted_gib": evidence.peak_bytes / 2**30,
            "limit_gib": None if limit_bytes is None else limit_bytes / 2**30,
            "num_offloaded": sum(1 for node in result.module.graph.nodes if node.target is OFFLOAD),
        }
        return evidence.peak_bytes

    whole = captured(held, "none")
    plan("nothing recomputed", whole)
    full = plan("full checkpointing", captured(held, "full"))
    plan("Weft within full checkpointing's peak", whole, full)
    plan("Weft, with offloading, within full checkpointing's peak", whole, full, OFFLOADING)
    cut = plan("min-cut", captured(held, "none", "min-cut"))
    plan("Weft within min-cut's peak", whole, cut)
    plan("Weft, with offloading, within min-cut's peak", whole, cut, OFFLOADING)
    return modules, about


def run(rank: int, job: dict[str, Any], path: str) -> None:
    join(rank, job, 29500 + job["ranks"])
    held = Rank(job, rank, mesh_of(job))
    measured = calibrate(job, rank, held.mesh)
    dist.barrier()
    modules, about = modules_of(held, Cluster.load(job["cluster"]))
    rows = measure(held, modules, about)
    rows += [{"variant": name, **told} for name, told in about.items() if name not in modules]
    if rank == 0:
        Path(path).write_text(json.dumps({"cluster": measured.get("toml"), "rows": rows}, default=str))
    dist.barrier()
    dist.destroy_process_group()


def show(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        if "step_ms" not in row:
            print(f"  {row['variant']:54} {row['error']}", flush=True)
            continue
        peak = f"{row['peak_gib']:.2f}" if "peak_gib" in row else "?"
        print(f"  {row['variant']:54} {row['step_ms']:8.1f} ms (spread {row['spread_ms']:.1f})", end="")
        print(f" predicted {row['predicted_ms']:.1f}, peak {peak} GiB, predicted {row['predicted_gib']:.2f}", end="")
        if row.get("num_offloaded"):
            print(f", {row['num_offloaded']} values offloaded", end="")
        if row.get("host_copies_us"):
            beside = row["host_copies_beside_us"] / row["host_copies_us"]
            print(f", copies {row['host_copies_us'] / 1e3:.1f} ms, {beside:.0%} of them beside kernels", end="")
        print(f", values agree: {row['values_agree']}", flush=True)


def main() -> None:
    options = command_line(__doc__).parse_args()
    run_jobs(options, run, [job_of(options, "fsdp", 2, BATCH, STEPS, shape=TINY if options.tiny else SHAPE)], show)


if __name__ == "__main__":
    main()
