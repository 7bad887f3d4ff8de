"""Measure the cluster that the ranks of one machine form: collectives, products, copies, gaps and slowdowns.

On a GPU everything comes from the traces of all ranks, with the code of `weft calibrate`. Traces of a CPU have no
kernels, so collectives are timed from outside; that is only a stand-in to try the whole flow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from train_predict import Rates, part_of, preset_of
from train_profile import events_of, gap_us, record

from weft.cost.calibration.cluster_writer import cluster_text
from weft.cost.calibration.fit import fit, read_measurements
from weft.cost.calibration.samples import Sample
from weft.cost.device import Device, HostMemory
from weft.graph.ops import Kind

PAYLOADS = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
"""Sizes of the full tensor in bytes."""
REPEATS = 4
NUM_ADDS = 100
NUM_PRODUCTS = 8
TERMS = 8192
"""Rows, columns and terms of the products whose rate is measured."""
COPY_BYTES = 512 << 20
HOST_BYTES, HOST_LIMIT_BYTES = 256 << 20, 16 << 30
"""Size of the copies to host memory that are timed, and the host memory that a rank may use for offloaded values."""
NUM_ROUNDS, LAST_ROUNDS = 20, 5
"""Rounds of products or copies, and how many of the last ones count."""
NUM_BESIDE = 24
"""Collectives that run in a row while products are timed: together they must outlast the products."""
NUM_IN_ROW = 6
"""Collectives whose time is measured during products, one after the other, as in a step."""

BESIDE_BYTES = 32 << 20
"""Full tensor of a collective that runs during products."""
USED = {"ddp": (Kind.ALL_REDUCE,), "ep-fsdp": (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)}
"""The kinds of collectives in a step, over which slowdowns are averaged; other parallelisms gather and scatter."""
MIN_SHARED = 1.5
"""Two groups share a wire if their collectives together take this many times as long as one of them."""


def calibrate(job: dict[str, Any], rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Measure, and let rank 0 write the cluster; returns the findings on rank 0."""
    folder, device, ranks = Path(job["folder"]), job["device"], job["ranks"]
    groups: list[Any] = [mesh.get_group(axis) for axis in mesh.mesh_dim_names or () if mesh[axis].size() > 1]
    payloads = PAYLOADS[:3] if job["tiny"] else PAYLOADS
    path = folder / f"calibrate_{ranks}_rank{rank}.json.gz"
    if device != "cuda":
        return _by_clock(job, rank, groups, payloads)
    work = _work(job, groups, payloads)
    work()
    record(work, path, device=device, shapes=True)
    beside = _slowdowns(groups[0])
    rates = _rates()
    host_memory = _host_memory()
    used = USED.get(job["parallel"], (Kind.ALL_GATHER, Kind.REDUCE_SCATTER))
    slowdown, talk = (round(fmean(beside[kind][of] for kind in used), 4) for of in (0, 1))
    ratio = _wire_ratio(groups, device)
    torch.cuda.empty_cache()
    dist.barrier()
    if rank:
        return {}
    found = read_measurements([folder / f"calibrate_{ranks}_rank{r}.json.gz" for r in range(ranks)])
    preset = preset_of(torch.cuda.get_device_name(0))
    made = part_of(preset, ranks, rates) if preset is not None else _measured(found.compute.device(), rates)
    made = replace(made, overlap_slowdown=slowdown, collective_slowdown=talk, host_memory=host_memory)
    told = _write(job, found.samples, made, list(found.notes), ratio)
    slowdowns = {kind.value: {"products": found[0], "collective": found[1]} for kind, found in beside.items()}
    return {**told, "rates": asdict(rates), "gap_us": gap_us(events_of(path)), "slowdowns": slowdowns}


def _measured(traced: Device | None, rates: Rates) -> Device:
    """The device of a GPU without a preset."""
    peaks = dict(traced.peak_tflops if traced is not None else ()) | {"bf16": rates.tflops}
    return Device("measured", tuple(sorted(peaks.items())), rates.memory_gbps, matmul_efficiency=1.0)


def _write(job: dict[str, Any], samples: Any, device: Device, notes: list[str], wire_ratio: float) -> dict[str, Any]:
    """If the axes of a mesh do not share a wire, each is a level: inside nodes, and between them."""
    is_shared = wire_ratio >= MIN_SHARED
    fitted = fit(samples, name=f"measured-{job['ranks']}", device=device, ranks_per_node=None if is_shared else 2)
    text = cluster_text(fitted, ["the ranks of this run"])
    Path(job["cluster"]).write_text(text)
    return {
        "toml": text,
        "peak_tflops": dict(device.peak_tflops),
        "matmul_efficiency": device.matmul_efficiency,
        "memory_gbps": device.memory_gbps,
        "memory_efficiency": device.memory_efficiency,
        "overlap_slowdown": device.overlap_slowdown,
        "collective_slowdown": device.collective_slowdown,
        "host_memory": asdict(device.host_memory) if device.host_memory else None,
        "lines": [
            {
                "kind": line.kind.value,
                "ranks": line.group.size,
                "us_by_bytes": [list(point) for point in line.table.points],
            }
            for line in fitted.lines
        ],
        "wire_ratio": wire_ratio,
        "notes": [*notes, *fitted.notes],
    }


def _collectives(num_bytes: int, group: Any, device: str) -> dict[Kind, Callable[[], Any]]:
    """One collective of each kind with a full tensor of this size."""
    size = dist.get_world_size(group)
    full = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
    part, received = full[: full.numel() // size].clone(), torch.empty_like(full)
    return {
        Kind.ALL_REDUCE: lambda: dist.all_reduce(full, group=group),
        Kind.ALL_GATHER: lambda: dist.all_gather_into_tensor(full, part, group=group),  # pyright: ignore[reportDeprecated]  # the name to torch 2.12
        Kind.REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(part, full, group=group),  # pyright: ignore[reportDeprecated]  # the name to torch 2.12
        Kind.ALL_TO_ALL: lambda: dist.all_to_all_single(received, full, group=group),
    }


def _work(job: dict[str, Any], groups: list[Any], payloads: tuple[int, ...]) -> Callable[[], None]:
    """All measurements, as one function to profile.

    Before each collective there is a product, as in a step: back to back they would find the wire awake, and be faster.
    """
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device=job["device"])

    def work() -> None:
        for group in groups:
            for num_bytes in payloads:
                for run in _collectives(num_bytes, group, job["device"]).values():
                    for _ in range(REPEATS):
                        _ = x @ x
                        run()
        torch.cuda.synchronize()
        dist.barrier()
        _compute(job)

    return work


def _compute(job: dict[str, Any]) -> None:
    """Products of the model's shapes in both directions, large copies and additions, kernel by kernel."""
    shape, tokens = job["shape"], job["batch"] * job["shape"]["sequence"]
    split = job["ranks"] if job["parallel"] == "tp" else 1
    for inner, outer in (
        (shape["dim"], shape["dim"]),
        (shape["dim"], shape["ffn_dim"]),
        (shape["ffn_dim"], shape["dim"]),
    ):
        x = torch.randn(tokens, inner, dtype=torch.bfloat16, device=job["device"])
        w = torch.randn(inner, max(outer // split, 1), dtype=torch.bfloat16, device=job["device"])
        for _ in range(3):
            y = x @ w
            _ = x.t() @ y
    a = torch.randn(tokens, shape["dim"], device=job["device"])
    b = torch.empty_like(a)
    for _ in range(3):
        b.copy_(a)
        _ = a + b
        _ = a * b
    tiny = torch.ones(16, device=job["device"])
    _ = a @ a.t()[:, :1024]  # queue work first, so that the device never waits for the host
    for _ in range(NUM_ADDS):
        tiny = tiny + tiny


def _slowdowns(group: Any) -> dict[Kind, tuple[float, float]]:
    """For each kind of collective: the shares by which products slow beside it, and by which it slows beside them."""
    x = torch.randn(TERMS, TERMS, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    found: dict[Kind, tuple[float, float]] = {}
    for kind, run in _collectives(BESIDE_BYTES, group, "cuda").items():

        def products(is_beside: bool, run: Callable[[], Any] = run) -> float:
            with torch.cuda.stream(side):  # the collectives that this stream waits for do not hold up the products
                for _ in range(NUM_BESIDE if is_beside else 0):
                    run()
            return _products_ms(x)

        def collective(is_beside: bool, run: Callable[[], Any] = run) -> float:
            with torch.cuda.stream(side):
                for _ in range(4 * NUM_PRODUCTS if is_beside else 0):
                    _ = x @ x
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(NUM_IN_ROW):
                run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end)

        found[kind] = (_slowdown(products), _slowdown(collective))
    return found


def _slowdown(measure: Callable[[bool], float]) -> float:
    """By which share a measured time is longer beside other work, on the slowest rank."""

    def median(is_beside: bool) -> float:
        times: list[float] = []
        for _ in range(5):
            dist.barrier()
            torch.cuda.synchronize()
            times.append(measure(is_beside))
            torch.cuda.synchronize()
        return sorted(times)[2]

    times = {is_beside: median(is_beside) for is_beside in (False, True, False, True)}
    return round(max(0.0, _largest(times[True] / times[False]) - 1), 4)


def _wire_ratio(groups: list[Any], device: str) -> float:
    """Time of the collectives of both axes of a mesh at once, over that of one of them; 2: they share a wire."""
    if len(groups) < 2:
        return 2.0
    tensors = [torch.ones(BESIDE_BYTES // 2, dtype=torch.bfloat16, device=device) for _ in groups]

    def seconds(chosen: slice) -> float:
        dist.barrier()
        started = time.perf_counter()
        pairs = list(zip(tensors, groups, strict=True))[chosen]
        for pending in [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in pairs]:
            if pending is not None:
                pending.wait()
        _ = [tensor[0].item() for tensor, _ in pairs]  # the host waits for the device
        return time.perf_counter() - started

    seconds(slice(None))
    alone, both = (sorted(seconds(chosen) for _ in range(5))[2] for chosen in (slice(1), slice(None)))
    ratio = torch.tensor(both / alone, device=device)
    dist.all_reduce(ratio, op=dist.ReduceOp.MAX)
    return ratio.item()


def _rates() -> Rates:
    """Rates of products and of copies while all ranks run them, on the slowest rank: the ranks share the GPU.

    Products run for long enough to reach the power limit.
    """
    x = torch.randn(TERMS, TERMS, dtype=torch.bfloat16, device="cuda")
    dist.barrier()
    torch.cuda.synchronize()
    product_ms = sorted([_products_ms(x) for _ in range(NUM_ROUNDS)][-LAST_ROUNDS:])[LAST_ROUNDS // 2]
    tflops = NUM_PRODUCTS * 2 * TERMS**3 / (product_ms * 1e9)
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    dist.barrier()
    torch.cuda.synchronize()
    copy_ms = sorted([_copies_ms(source, target) for _ in range(NUM_ROUNDS)][-LAST_ROUNDS:])[LAST_ROUNDS // 2]
    gbps = NUM_PRODUCTS * 2 * COPY_BYTES / (copy_ms * 1e6)
    return Rates(-_largest(-tflops), TERMS, -_largest(-gbps))


def _host_memory() -> HostMemory:
    """The link to pinned host memory while all ranks copy in both directions, on the slowest rank."""
    large_us, small_us = (_largest(_host_copies_us(num_bytes)) for num_bytes in (HOST_BYTES, 4096))
    gbps = HOST_BYTES / (large_us - small_us) / 1e3
    return HostMemory(round(gbps, 2), round(small_us, 1), HOST_LIMIT_BYTES)


def _host_copies_us(num_bytes: int) -> float:
    """The time of one copy, of several in each direction at once."""
    on_device, on_host = (
        torch.empty(2, num_bytes, dtype=torch.uint8, device="cuda"),
        torch.empty(2, num_bytes, dtype=torch.uint8, pin_memory=True),
    )
    streams = [torch.cuda.Stream() for _ in range(2)]
    pairs = ((on_host[0], on_device[0]), (on_device[1], on_host[1]))

    def run() -> float:
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for stream, (target, source) in zip(streams, pairs, strict=True):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                for _ in range(NUM_PRODUCTS):
                    target.copy_(source, non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / NUM_PRODUCTS

    return sorted(run() for _ in range(5))[2]


def _copies_ms(source: Tensor, target: Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(NUM_PRODUCTS):
        target.copy_(source)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _products_ms(x: Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(NUM_PRODUCTS):
        _ = x @ x
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _largest(number: float) -> float:
    found = torch.tensor(number, device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def _by_clock(job: dict[str, Any], rank: int, groups: list[Any], payloads: tuple[int, ...]) -> dict[str, Any]:
    samples: list[Sample] = []
    for group in groups:
        for num_bytes in payloads:
            for kind, run in _collectives(num_bytes, group, "cpu").items():
                run()
                for _ in range(REPEATS):
                    dist.barrier()
                    started = time.perf_counter()
                    run()
                    us = (time.perf_counter() - started) * 1e6
                    members = tuple(dist.get_process_group_ranks(group))
                    samples.append(Sample(kind, len(members), num_bytes, us, members))
    x = torch.randn(512, 512, dtype=torch.bfloat16)
    started = time.perf_counter()
    _ = x @ x
    product_s = time.perf_counter() - started
    y = torch.randn(1 << 20)
    started = time.perf_counter()
    _ = y.clone()
    copy_s = time.perf_counter() - started
    peak = (("bf16", 2 * 512**3 / product_s / 1e12), ("f32", 2 * 512**3 / product_s / 1e12))
    device = Device("measured", peak, 2 * y.numel() * 4 / copy_s / 1e9, matmul_efficiency=1.0)
    ratio = _wire_ratio(groups, "cpu")
    return _write(job, samples, device, [], ratio) if rank == 0 else {}
