"""Gathers and scatters streamed through their products, on one GPU with 2 and 4 real NCCL ranks: values, then time.

    PYTHONPATH=src python benchmarks/gpu/tp_fusion.py [--ranks 2 4] [--ring] [--values] [--json FILE]

Every rank claims to be on another host, so that NCCL takes the network path over loopback; MPS, which this script
starts and stops, lets the ranks' kernels run at the same time. The variants are the pair as written, chunks as plain
nodes, torch's fused operators of symmetric memory, its low-contention copies, and with --ring transfers from rank to
rank, which need torch 2.12 and keep their send buffers until the process ends. Checks of values use small whole
numbers, whose sums are exact. Times are medians of steps by CUDA events, variants in turn; the spread is the range of
the middle half.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from buckets import mps  # type: ignore[import-not-found]  # beside this file

import weft
from tests.unit.streaming.streams import cases, gather, scatter

GATHER, SCATTER = "fuse-all-gather-matmuls", "fuse-matmul-reduce-scatters"
SIZES = {
    "balanced": (512, 4096, 65536),
    "more communication": (1024, 8192, 16384),
    "more compute": (512, 4096, 131072),
}
"""Rows on one rank, the width that is communicated, and the other width of the weights."""
CHUNKS = (2, 4, 8)
WARM_UP, STEPS, ROUNDS = 3, 12, 3


def on_device(listing: str) -> str:
    """A listing with one group, moved to the default group and the GPU, with fp8 products as CUDA has them."""
    head, _, body = listing.partition("\n")
    head, body = (text.replace("'tp'", "'0'").replace("out_dtype=f32", "out_dtype=bf16") for text in (head, body))
    return f"{head}\ndevice('cuda:0')\n{body}"


def gather_pair(ranks: int, rows: int, width: int, columns: int) -> str:
    return on_device(
        f"group('tp', size={ranks})\n\ndef graph(x: bf16[{rows}, {width}], b: bf16[{width}, {columns}]):\n"
        f"    ag = all_gather(x, {ranks}, 'tp')\n    w = wait(ag)\n    y = mm(w, b)\n    return [y]\n"
    )


def scatter_pair(ranks: int, rows: int, width: int, inner: int) -> str:
    return on_device(
        f"group('tp', size={ranks})\n\ndef graph(a: bf16[{ranks * rows}, {inner}], b: bf16[{inner}, {width}]):\n"
        f"    y = mm(a, b)\n    rs = reduce_scatter(y, 'sum', {ranks}, 'tp')\n    w = wait(rs)\n    return [w]\n"
    )


def arguments(module: Any, rank: int, *, whole: bool) -> list[torch.Tensor]:
    """Inputs of one rank: small whole numbers, or normal ones; weights and scales are the same on every rank."""
    found: list[torch.Tensor] = []
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    for k, value in enumerate(values):
        generator = torch.Generator().manual_seed(97 * k + (rank if k == 0 else 0))
        numbers = torch.randint(-2, 3, value.shape, generator=generator).float()
        made = numbers if whole else torch.randn(value.shape, generator=generator) * 0.05
        found.append(made.to(value.dtype).cuda())
    return found


def variants(pass_name: str, ring_of: int | None) -> dict[str, str]:
    """Pipelines by variant."""
    chunked = {f"{n} chunks": f"{pass_name}{{chunks={n} kernel=portable}}" for n in CHUNKS}
    fused = {"symmetric memory": f"{pass_name}{{chunks=2 kernel=symmetric-memory}}"}
    copied = {"low contention": f"{pass_name}{{kernel=low-contention}}"}
    ring = {} if ring_of is None else {"ring": f"{pass_name}{{chunks=2 kernel=ring rank={ring_of}}}"}
    return {"as written": "none", **chunked, **fused, **copied, **ring}


def build(listing: str, pass_name: str, ring_of: int | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The modules of all variants, and the reasons for missing ones."""
    before = weft.parse(listing)
    modules: dict[str, Any] = {}
    declined: dict[str, str] = {}
    for name, spec in variants(pass_name, ring_of).items():
        result = weft.optimize(before, pipeline=spec)
        if spec != "none" and not result.report.applied:
            declined[name] = "; ".join(decision.sentence for decision in result.report.declined)
        else:
            modules[name] = result.module
    return modules, declined


def check_values(rank: int, ranks: int, ring: bool) -> dict[str, Any]:
    """Check every dim, every kind of product and all kernels against the pair as written."""
    found = {"checked": 0, "bitwise": 0, "close": 0, "declined": 0, "wrong": list[str]()}
    for case in cases(ranks):
        for pass_name, listing in ((GATHER, gather(case)), (SCATTER, scatter(case))):
            modules, declined = build(on_device(listing), pass_name, rank if ring else None)
            found["declined"] += len(declined)
            inputs = arguments(modules["as written"], rank, whole=True)
            expected = modules.pop("as written")(*inputs)
            for name, module in modules.items():
                found["checked"] += 1
                try:
                    pairs = list(zip(module(*inputs), expected, strict=True))
                    torch.cuda.synchronize()
                except Exception as error:  # all ranks raise alike, so no rank waits for this one
                    reason = (str(error).splitlines() or [type(error).__name__])[0]
                    found["wrong"].append(f"{pass_name}, {case}, {name}: {reason}")
                    continue
                found["bitwise"] += all(torch.equal(a, b) for a, b in pairs)
                close = all(torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-2) for a, b in pairs)
                found["close"] += close
                if not close:
                    found["wrong"].append(f"{pass_name}, {case}, {name}")
    return found


def time_variants(modules: dict[str, Any], inputs: list[torch.Tensor]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in modules}
    for _ in range(ROUNDS):  # in turn, because the machine drifts
        for name, module in modules.items():
            for step in range(WARM_UP + STEPS):
                dist.barrier()
                torch.cuda.synchronize()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                module(*inputs)
                end.record()
                torch.cuda.synchronize()
                if step >= WARM_UP:
                    times[name].append(start.elapsed_time(end))
    return times


def figures(times: list[float]) -> dict[str, float]:
    low, _, high = statistics.quantiles(times, n=4)
    return {"median_ms": statistics.median(times), "spread_ms": high - low, "steps": len(times)}


def measure(rank: int, ranks: int, ring: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for size, numbers in SIZES.items():
        for pass_name, pair in ((GATHER, gather_pair), (SCATTER, scatter_pair)):
            modules, declined = build(pair(ranks, *numbers), pass_name, rank if ring else None)
            inputs = arguments(modules["as written"], rank, whole=False)
            expected = modules["as written"](*inputs)[0].float()
            worst = {
                name: float((module(*inputs)[0].float() - expected).abs().max() / expected.abs().max())
                for name, module in modules.items()
            }
            times = time_variants(modules, inputs)
            rows.append(
                {
                    "pass": pass_name,
                    "size": size,
                    "rows_width_columns": numbers,
                    "variants": {
                        name: figures(found) | {"largest_error": worst[name]} for name, found in times.items()
                    },
                    "declined": declined,
                }
            )
            del inputs, expected, modules
            torch.cuda.empty_cache()
    return rows


def run(rank: int, ranks: int, path: str, ring: bool, is_timed: bool) -> None:
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29800 + ranks)}
    os.environ |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    warnings.simplefilter("ignore", FutureWarning)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda:0"))
    started = time.perf_counter()
    values = check_values(rank, ranks, ring)
    checked = time.perf_counter() - started
    rows = measure(rank, ranks, ring) if is_timed else []
    if rank == 0:
        found = {"ranks": ranks, "values": values, "seconds_of_values": checked, "pairs": rows}
        Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def show(found: dict[str, Any]) -> None:
    values = found["values"]
    print(f"{found['ranks']} ranks: {values['checked']} variants checked, {values['bitwise']} bitwise, ", end="")
    print(f"{values['close']} close, {values['declined']} declined, wrong: {values['wrong'] or 'none'}")
    for row in found["pairs"]:
        print(f"  {row['pass']}, {row['size']} {tuple(row['rows_width_columns'])}")
        for name, numbers in row["variants"].items():
            print(f"    {name:18} {numbers['median_ms']:8.2f} ms  (spread {numbers['spread_ms']:.2f})", flush=True)
        for name, why in row["declined"].items():
            print(f"    {name:18} declined: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--ring", action="store_true", help="add transfers from rank to rank")
    parser.add_argument("--values", action="store_true", help="check values only")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    about = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    runs: list[dict[str, Any]] = []
    with mps(max(options.ranks)), tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            path = f"{folder}/{ranks}.json"
            mp.spawn(run, (ranks, path, options.ring, not options.values), ranks)
            runs.append(json.loads(Path(path).read_text()))
            show(runs[-1])
    if options.json:
        Path(options.json).write_text(json.dumps({**about, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
