"""Experts on one GPU with 2 and 4 real ranks: a dropless mixture as captured, planned, and with its batch split.

    PYTHONPATH=src python benchmarks/gpu/experts.py --json experts.json [--ranks 2 4]
    PYTHONPATH=src python benchmarks/gpu/experts.py --device cpu --ranks 2 --tiny       # without a GPU

The ranks of a job first measure the cluster that they form, as `train.py` does. Then the forms of one captured graph
run in turn: as captured, planned, and with the batch split in two and in three. Inductor compiles the same model with
its own overlap passes. Each row has the median step, the range of the middle half, the errors of loss and gradients
against eager, the profiled communication and the simulated step. Ranks share one GPU: NVLink is not shown.
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

from graphs_in_turn import command_line, job_of, join, kernels_of, measure, run_jobs  # type: ignore[import-not-found]  # beside this file
from train_calibrate import calibrate  # type: ignore[import-not-found]
from train_rank import Rank, figures, mesh_of  # type: ignore[import-not-found]
from train_variants import make_variant  # type: ignore[import-not-found]

import weft
from weft.cost.cluster import Cluster

SHAPE = {
    "num_layers": 2,
    "dim": 2048,
    "ffn_dim": 16384,
    "num_heads": 16,
    "num_kv_heads": 16,
    "sequence": 2048,
    "vocabulary": 8192,
    "num_experts": 4,
    "num_chosen": 2,
    "num_shared": 0,
}
"""Wide experts, so that compute takes about as long as the exchanges over loopback."""
TINY = {"num_layers": 1, "dim": 64, "ffn_dim": 96, "num_heads": 4, "sequence": 32, "vocabulary": 256}
BATCH, STEPS = 6, 5
BEFORE = "clean,algebra,communication,sums"
PIPELINES = {
    "as captured": "none",
    "planned": f"{BEFORE},schedule-overlap",
    "split in 2": f"{BEFORE},split-batch{{chunks=2}},schedule-overlap",
    "split in 3": f"{BEFORE},split-batch{{chunks=3}},schedule-overlap",
}
PEERS = ("inductor", "inductor overlap")


def modules_of(held: Rank, cluster: Cluster) -> tuple[dict[str, GraphModule], dict[str, dict[str, Any]]]:
    """The graph of each form, and remarks on it."""
    before = weft.capture(weft.TrainingStep(held.model), held.batch, held.mesh, "joint")
    modules: dict[str, GraphModule] = {}
    about: dict[str, dict[str, Any]] = {}
    for name, pipeline in PIPELINES.items():
        started = time.perf_counter()
        result = weft.optimize(before, cluster.running("eager"), pipeline=pipeline, sizes="balanced")
        step_ms = result.plan.evidence.step_ns / 1e6 if result.plan.evidence else None
        modules[name] = result.module
        why = [d.sentence for d in result.report.declined if d.pass_name == "split-batch"]
        seconds = round(time.perf_counter() - started, 2)
        about[name] = {"pass_s": seconds, "predicted_ms": step_ms, "not_split": why}
    return modules, about


def peers(held: Rank) -> list[dict[str, Any]]:
    """Rows of Inductor, which compiles the module; an error is a row too."""
    torch._dynamo.config.capture_scalar_outputs = True
    rows: list[dict[str, Any]] = []
    for name in PEERS:
        try:
            variant = make_variant(held, name)
            row = {"variant": name, **held.check(variant)}
            rows.append(row | figures(held.time(variant, 2)) | kernels_of(held, variant))
        except Exception as error:  # all ranks compile the same model
            rows.append({"variant": name, "error": str(error).strip()[:400]})
    return rows


def run(rank: int, job: dict[str, Any], path: str) -> None:
    join(rank, job, 29600 + job["ranks"])
    held = Rank(job, rank, mesh_of(job))
    measured = calibrate(job, rank, held.mesh)
    dist.barrier()
    rows = measure(held, *modules_of(held, Cluster.load(job["cluster"])))

    def write() -> None:
        if rank == 0:
            told = {"parallel": job["parallel"], "ranks": job["ranks"], "cluster": measured.get("toml"), "rows": rows}
            Path(path).write_text(json.dumps(told, default=str))

    write()
    rows += peers(held) if job["device"] == "cuda" else []
    write()
    dist.barrier()
    dist.destroy_process_group()


def show(found: dict[str, Any]) -> None:
    print(f"{found['parallel']}, {found['ranks']} ranks")
    for row in found["rows"]:
        if "step_ms" not in row:
            print(f"  {row['variant']:18} {row['error']}", flush=True)
            continue
        predicted = f"predicted {row['predicted_ms']:.1f}" if row.get("predicted_ms") else ""
        exposed = f"exposed {row['exposed_us'] / 1e3:.1f} ms" if "exposed_us" in row else ""
        print(f"  {row['variant']:18} {row['step_ms']:8.1f} ms (spread {row['spread_ms']:.1f}) {exposed}", end="")
        print(f" {predicted}, values agree: {row['values_agree']}", flush=True)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    options = parser.parse_args()
    model = {"model": "dropless-debug", "shape": TINY if options.tiny else SHAPE}
    run_jobs(options, run, [job_of(options, "ep-fsdp", ranks, BATCH, STEPS, **model) for ranks in options.ranks], show)


if __name__ == "__main__":
    main()
