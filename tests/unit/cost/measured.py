"""Traces and tables as profilers and nccl-tests write them, made from known latencies and bandwidths."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HEADER = (
    "#                                                              out-of-place                       in-place\n"
    "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw"
    "  #wrong\n"
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)\n"
)
KB, MB = 1 << 10, 1 << 20

# Milliseconds by what one rank passes, of NCCL ranks that share one H200 (torch 2.11.0, NCCL 2.28.9).
LOOPBACK = {
    4 * KB: (0.085, 0.051, 0.051, 0.182, 0.087, 0.072),
    256 * KB: (0.217, 0.179, 0.138, 0.467, 0.636, 0.279),
    4 * MB: (1.40, 1.62, 0.81, 2.44, 4.45, 1.26),
    64 * MB: (20.9, 20.7, 10.7, 33.2, 66.2, 17.0),
    256 * MB: (88.5, 89.4, 43.2, 131.9, 266.8, 70.7),
}
LOOPBACK_COLUMNS = [(kind, n) for n in (2, 4) for kind in ("all_reduce", "all_gather", "reduce_scatter")]

NAMES = {"all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base", "all_reduce": "allreduce"}


def event(
    kind: str, shard: int, ranks: Sequence[int], us: float, *, seq: int | None = None, ts: float = 0.0, **args: Any
) -> dict[str, Any]:
    """A kernel of bf16; `shard` are the elements of an all-reduce, or of one rank's part of the full tensor."""
    n = len(ranks)
    told: dict[str, Any] = {
        "Collective name": NAMES.get(kind, kind),
        "In msg nelems": shard * n if kind == "reduce_scatter" else shard,
        "Out msg nelems": shard * n if kind == "all_gather" else shard,
        "Group size": n,
        "dtype": "BFloat16",
        "Process Group Name": "0",
        "Process Group Ranks": json.dumps(list(ranks)),
    }
    told |= {} if seq is None else {"Seq": seq}
    name = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": us, "args": told | args}


def write_trace(path: Path, events: Iterable[Any], rank: int | None = 0, **beside: Any) -> Path:
    told = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank}, "traceEvents": list(events)}
    text = json.dumps(told | beside, indent=1).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def wire_bytes(kind: str, num_bytes: int, n: int) -> float:
    """What one rank sends of a full tensor around a ring."""
    return num_bytes * (n - 1) / n * (2 if kind == "all_reduce" else 1)


def noisy_us(kind: str, num_bytes: int, n: int, latency_us: float, gbps: float, rng: random.Random) -> float:
    return (latency_us + wire_bytes(kind, num_bytes, n) / gbps / 1e3) * rng.lognormvariate(0, 0.03)


def nccl_table(
    test: str, num_ranks: int, rows: Iterable[tuple[int, float]], *, hosts: int = 1, named: bool = True
) -> str:
    """The output of one test, by full bytes and microseconds."""
    lines = [f"# Collective test starting: {test}_perf"] if named else []
    lines += ["# nThread 1 nGpus 1 minBytes 8 maxBytes 268435456 step: 2(factor) warmup iters: 1 iters: 20", "#"]
    lines += ["# Using devices"]
    for rank in range(num_ranks):
        host = f"node-{rank * hosts // num_ranks}"
        lines.append(f"#  Rank {rank:2} Group  0 Pid   7774 on {host} device {rank:2} [0000:8f:00] NVIDIA H200")
    lines += ["NCCL version 2.28.9+cuda13.0", "#", HEADER.rstrip()]
    for size, us in rows:
        speed = f"{size / us / 1e3:8.2f} {size / us / 1e3:8.2f}"
        lines.append(f"{size:12} {size // 4:13} {'float':>9} {'sum':>7} {-1:7} {us:9.2f} {speed} 0 {us:9.2f} {speed} 0")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 19.5 ", "#"]) + "\n"


def loopback_tables(sizes: Iterable[int]) -> str:
    """The measurements of ranks that share a GPU, for some sizes, as nccl-tests would print them."""
    sizes = list(sizes)
    texts: list[str] = []
    for column, (kind, n) in enumerate(LOOPBACK_COLUMNS):
        times = n if kind == "all_gather" else 1
        texts.append(nccl_table(kind, n, ((size * times, LOOPBACK[size][column] * 1000) for size in sizes)))
    return "".join(texts)
