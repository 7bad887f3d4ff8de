"""Merged collectives on one GPU with 2 and 4 real NCCL ranks: values first, then time.

    PYTHONPATH=src python benchmarks/gpu/buckets.py [--ranks 2 4] [--json FILE]

Every rank claims to be on another host, so that NCCL takes the network path over loopback. MPS, which this script
starts and stops, lets the ranks' kernels run at the same time. Times are medians of steps of one run, by CUDA events.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import weft

STRATEGIES = ("concat", "coalesced", "pack")
MERGING = ("bucket-all-gathers", "bucket-reduce-scatters", "bucket-all-reduces", "bucket-transfers")
DIM, LAYERS, TOKENS = 2048, 12, 8192
WARM_UP, STEPS = 3, 15


QUEUES = 64
"""Hardware queues that all processes together may ask for; four processes with 32 each ran out of memory on an H200."""


def connections(ranks: int) -> int:
    """Hardware queues of each process (`CUDA_DEVICE_MAX_CONNECTIONS`).

    With the default of 8, streams share queues and wait for each other: `fully_shard` then overlaps little.
    """
    return min(32, QUEUES // ranks)


@contextmanager
def mps(ranks: int) -> Generator[None]:
    """Runs NVIDIA's multi-process service inside a `with` block; the processes of the block inherit its settings."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        print("no nvidia-cuda-mps-control: ranks take turns, and every small collective costs milliseconds")
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections(ranks))
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit -t 5\n", check=False)


def every_kind(ranks: int) -> str:
    """Two or three members of every kind, of several shapes and dtypes."""
    sources = {"a": "f32[8, 6]", "b": "f32[4]", "c": "bf16[12]", "d": "f32[8, 2]", "e": "bf16[4, 3]"}
    lines = [f"group('0', size={ranks})", "", f"def graph({', '.join(f'{n}: {t}' for n, t in sources.items())}):"]
    results: list[str] = []
    for name in sources:
        calls = {
            "g": f"all_gather({name}, {ranks}, '0')",
            "r": f"all_reduce({name}, 'sum', '0')",
            "s": f"reduce_scatter({name}, 'avg', {ranks}, '0')",
            "b": f"broadcast({name}, 1, '0')",
        }
        for kind, call in calls.items():
            lines += [f"    {kind}_{name} = {call}", f"    w{kind}_{name} = wait({kind}_{name})"]
            results.append(f"w{kind}_{name}")
    return "\n".join([*lines, f"    return [{', '.join(results)}]"]) + "\n"


def training_step(ranks: int) -> str:
    """Forward and backward of a chain of products whose weights are sharded, each in eight pieces of unequal size."""
    widths = [DIM // 4, DIM // 4, DIM // 8, DIM // 8, DIM // 16, DIM // 16, DIM // 16, DIM // 16]
    shards = [(f"p{i}_{k}", width // ranks) for i in range(LAYERS) for k, width in enumerate(widths)]
    inputs = ", ".join(f"{name}: f32[{rows}, {DIM}]" for name, rows in shards)
    lines = [f"group('0', size={ranks})", "", f"def graph(x0: bf16[{TOKENS}, {DIM}], {inputs}):"]
    for i in range(LAYERS):
        lines += _weights(f"{i}", i, widths, ranks)
        lines += [f"    y{i} = mm(x{i}, w{i})", f"    x{i + 1} = relu(y{i})"]
    lines.append(f"    g{LAYERS} = neg(x{LAYERS})")
    scattered: list[str] = []
    for i in reversed(range(LAYERS)):
        lines += _weights(f"{i}b", i, widths, ranks)
        lines += [f"    t{i} = t(x{i})", f"    dw{i} = mm(t{i}, g{i + 1})", f"    df{i} = _to_copy(dw{i}, dtype=f32)"]
        lines += [f"    sp{i} = split_with_sizes(df{i}, {widths})"]
        for k in range(len(widths)):
            name = f"s{i}_{k}"
            lines += [f"    q{i}_{k} = sp{i}[{k}]", f"    r{i}_{k} = reduce_scatter(q{i}_{k}, 'avg', {ranks}, '0')"]
            lines.append(f"    {name} = wait(r{i}_{k})")
            scattered.append(name)
        lines += [f"    wt{i} = t(w{i}b)", f"    g{i} = mm(g{i + 1}, wt{i})"]
    return "\n".join([*lines, f"    return [g0, {', '.join(scattered)}]"]) + "\n"


def _weights(name: str, layer: int, widths: list[int], ranks: int) -> list[str]:
    lines: list[str] = []
    for k in range(len(widths)):
        lines += [
            f"    c{name}_{k} = _to_copy(p{layer}_{k}, dtype=bf16)",
            f"    a{name}_{k} = all_gather(c{name}_{k}, {ranks}, '0')",
            f"    v{name}_{k} = wait(a{name}_{k})",
        ]
    return [*lines, f"    w{name} = cat([{', '.join(f'v{name}_{k}' for k in range(len(widths)))}])"]


def arguments(module: Any, rank: int) -> list[torch.Tensor]:
    torch.manual_seed(1000 + rank)
    found = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    return [(torch.randn(v.shape, device="cuda") * 0.05).to(v.dtype) for v in found]


def check_values(rank: int, ranks: int) -> dict[str, bool]:
    before = weft.parse(every_kind(ranks))
    inputs = arguments(before, rank)
    expected = before(*inputs)
    found: dict[str, bool] = {}
    for strategy in STRATEGIES:
        spec = ",".join(f"{name}{{strategy={strategy}}}" for name in MERGING)
        after = weft.optimize(before, pipeline=spec).module
        results = after(*inputs)
        pairs = list(zip(results, expected, strict=True))
        bitwise = all(torch.equal(a, b) for a, b in pairs)
        close = all(torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-3) for a, b in pairs)
        found[strategy] = bitwise if ranks == 2 else close
    return found


def time_step(module: Any, inputs: list[torch.Tensor]) -> list[float]:
    times: list[float] = []
    for step in range(WARM_UP + STEPS):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        module(*inputs)
        end.record()
        torch.cuda.synchronize()
        if step >= WARM_UP:
            times.append(start.elapsed_time(end))
    return times


def run(rank: int, ranks: int, path: str) -> None:
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29700 + ranks)}
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda:0"))
    values = check_values(rank, ranks)
    before = weft.parse(training_step(ranks))
    inputs = arguments(before, rank)
    moved = "remove-dead-code,dedupe-collectives,hoist-launches,sink-waits"
    merged = "bucket-all-gathers{max-bytes=16777216},bucket-reduce-scatters{max-bytes=16777216},"
    variants = {"as written": "none", "moved": moved, "merged": merged.rstrip(","), "merged and moved": merged + moved}
    modules = {name: weft.optimize(before, pipeline=spec).module for name, spec in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in modules}
    for _ in range(2):  # interleaved, because the machine drifts
        for name, module in modules.items():
            times[name] += time_step(module, inputs)
    expected, found = before(*inputs), modules["merged and moved"](*inputs)
    same = all(torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-3) for a, b in zip(found, expected, strict=True))
    if rank == 0:
        rows = {name: {"median_ms": statistics.median(t), "spread_ms": max(t) - min(t)} for name, t in times.items()}
        with open(path, "w") as file:
            json.dump({"ranks": ranks, "values": values, "step_values": same, "steps": rows}, file)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    with mps(max(options.ranks)), tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            path = f"{folder}/{ranks}.json"
            mp.spawn(run, (ranks, path), ranks)
            with open(path) as file:
                found.append(json.load(file))
            row = found[-1]
            print(f"{ranks} ranks: values {row['values']}, of the step {row['step_values']}")
            for name, figures in row["steps"].items():
                print(f"  {name:18} {figures['median_ms']:8.1f} ms  (spread {figures['spread_ms']:.1f})", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
