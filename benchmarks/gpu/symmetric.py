"""Tensor parallelism through symmetric memory on one GPU with 2 and 4 real ranks: Weft beside Inductor's own pass.

    PYTHONPATH=src python benchmarks/gpu/symmetric.py --json symmetric.json [--ranks 2 4] [--parallel tp fsdp-tp]
    PYTHONPATH=src python benchmarks/gpu/symmetric.py --device cpu --ranks 2 --parallel tp --tiny   # without a GPU

The ranks of a job first measure the cluster that they form, as `train.py` does, and their copies through symmetric
memory: a barrier, and copies from a peer of several sizes. Then the variants run on one captured graph, in
turn: as captured, planned without streaming, with chunks as plain nodes, with `auto` while symmetric memory is enabled,
with fused operators wherever they can run, and Inductor's micro-pipeline pass. Each row has the median step, the range
of the middle half, the largest error of the loss and of the gradients against eager, the number of fused operators, and
the simulated step. Ranks share one GPU, so this shows neither NVLink nor its bandwidth.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from dataclasses import replace
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
from weft.cost.cluster import Cluster
from weft.cost.levels import Link, Transport
from weft.graph.edit import copy_module, recompile

SHAPE = {"num_layers": 6, "dim": 2048, "ffn_dim": 5632, "num_heads": 16, "sequence": 4096, "vocabulary": 8192}
TINY = {"num_layers": 1, "dim": 64, "ffn_dim": 128, "num_heads": 4, "sequence": 64, "vocabulary": 256}
BATCH, STEPS = 4, 5
CLEAN = "clean,algebra,communication"
STREAM = "fuse-all-gather-matmuls{{only=activations{0}}},fuse-matmul-reduce-scatters{{only=activations{0}}}"
PIPELINES = {
    "as captured": "none",
    "weft planned": f"{CLEAN},plan",
    "weft chunks": f"{CLEAN},{STREAM.format(' kernel=portable')},plan",
    "weft auto": f"{CLEAN},{STREAM.format('')},plan",
    "weft fused everywhere": f"{CLEAN},{STREAM.format(' chunks=2 kernel=symmetric-memory')},plan",
}
PEER = "inductor micro-pipeline"
COPIED_BYTES = (1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
aten = torch.ops.aten


def measured_transport(group: str, rank: int, ranks: int) -> tuple[Transport, dict[str, float]]:
    """The barrier and the copies of a group: the fit of a line through the medians, in microseconds and GB/s."""
    from torch.distributed import _symmetric_memory as symmetric

    largest = max(COPIED_BYTES)
    workspace = symmetric.get_symm_mem_workspace(group, largest)
    here = torch.empty(largest, dtype=torch.uint8, device="cuda:0")
    peer = workspace.get_buffer((rank + 1) % ranks, (largest,), torch.uint8)
    found = {"barrier": _median_us(workspace.barrier)}
    for size in COPIED_BYTES:
        found[str(size)] = _median_us(lambda size=size: here[:size].copy_(peer[:size]))
    slope = (found[str(largest)] - found[str(COPIED_BYTES[1])]) / (largest - COPIED_BYTES[1])
    numbers = [found["barrier"], found[str(COPIED_BYTES[0])], 1e-3 / slope]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, numbers)  # one transport for all ranks: plans must not differ
    barrier, copy, gbps = (sorted(column)[len(column) // 2] for column in zip(*told, strict=True))
    return Transport(Link(barrier, copy, gbps)), found


def _median_us(work: Any, count: int = 50) -> float:
    times: list[float] = []
    for _ in range(count):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[count // 2]


def peer_module(before: GraphModule) -> GraphModule:
    """The graph after Inductor's pass, whose operators need reshapes instead of views."""
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.virtualized import V

    from weft.graph import metadata

    made = copy_module(before)
    for node in made.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    with V.set_fake_mode(metadata.mode_of(made.graph.nodes)):
        micro_pipeline_tp_pass(made.graph)
    recompile(made)
    return made


def modules_of(held: Rank, cluster: Cluster) -> tuple[dict[str, GraphModule], dict[str, dict[str, Any]]]:
    """The graph of each variant, and remarks on it."""
    before = weft.capture(weft.TrainingStep(held.model), held.batch, held.mesh, "joint")
    modules: dict[str, GraphModule] = {}
    about: dict[str, dict[str, Any]] = {}
    for name, pipeline in PIPELINES.items():
        if name not in held.job["variants"]:
            continue
        started = time.perf_counter()
        result = weft.optimize(before, cluster.running("eager"), pipeline=pipeline)
        modules[name] = result.module
        told = Counter(f"{d.reason.value}: {d.sentence}" for d in result.report.declined if d.pass_name[:4] == "fuse")
        step_ms = result.plan.evidence.step_ns / 1e6 if result.plan.evidence else None
        about[name] = {"pass_s": round(time.perf_counter() - started, 2), "predicted_ms": step_ms, "declined": told}
    if held.device.type == "cuda" and PEER in held.job["variants"]:
        modules[PEER], about[PEER] = peer_module(before), {}
    for name, module in modules.items():
        about[name]["fused"] = Counter(
            str(node.target).split(".")[1]
            for node in module.graph.nodes
            if "symm_mem" in str(node.target) or "weft.copy" in str(node.target)
        )
    return modules, about


def run(rank: int, job: dict[str, Any], path: str) -> None:
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)
    join(rank, job, 29700 + job["ranks"])
    on_gpu = job["device"] == "cuda"
    held = Rank(job, rank, mesh_of(job))
    cluster = Cluster.load(f"loopback-1x{job['ranks']}")
    copies: dict[str, float] = {}
    measured: dict[str, Any] = {}
    if on_gpu:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        measured = calibrate(job, rank, held.mesh)
        dist.barrier()
        cluster = Cluster.load(job["cluster"])
        group = held.mesh["tp"].get_group()
        enable_symm_mem_for_group(group.group_name)
        transport, copies = measured_transport(group.group_name, dist.get_rank(group), group.size())
        cluster = replace(cluster, levels=tuple(replace(level, symmetric=transport) for level in cluster.levels))
    started = time.perf_counter()
    rows = measure(held, *modules_of(held, cluster))
    if rank == 0:
        link = cluster.levels[0].symmetric
        seconds = round(time.perf_counter() - started)
        told = {"copies_us": copies, "transport": str(link), "cluster": measured.get("toml"), "seconds": seconds}
        told["rows"] = rows
        Path(path).write_text(json.dumps({**{k: job[k] for k in ("parallel", "ranks")}, **told}, default=str))
    dist.barrier()
    dist.destroy_process_group()


def show(found: dict[str, Any]) -> None:
    print(f"{found['parallel']}, {found['ranks']} ranks; copies {found['copies_us']}; {found['transport']}")
    peer = next((row.get("step_ms") for row in found["rows"] if row["variant"] == PEER), None)
    for row in found["rows"]:
        if "step_ms" not in row:
            print(f"  {row['variant']:24} {row['error']}", flush=True)
            continue
        share = f", {row['step_ms'] / peer:.2f} of Inductor's" if peer else ""
        predicted = f"predicted {row['predicted_ms']:.1f}" if row.get("predicted_ms") else ""
        print(
            f"  {row['variant']:24} {row['step_ms']:8.1f} ms (spread {row['spread_ms']:.1f}{share}) {predicted}", end=""
        )
        print(f" fused {row['fused']}, values agree: {row['values_agree']}", flush=True)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--parallel", nargs="*", default=["tp", "fsdp-tp"])
    parser.add_argument("--variants", nargs="*", default=[*PIPELINES, PEER], help="the variants to run, by name")
    options = parser.parse_args()
    given = {"shape": TINY if options.tiny else SHAPE, "variants": options.variants}
    jobs = [
        job_of(options, parallel, ranks, BATCH, STEPS, **given)
        for ranks in options.ranks
        for parallel in options.parallel
        if parallel == "tp" or ranks > 2  # two ranks are one group of tensor parallelism, and nothing to shard over
    ]
    run_jobs(options, run, jobs, show)


if __name__ == "__main__":
    main()
