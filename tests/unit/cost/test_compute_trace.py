"""Compute in a trace: time by kernel, and the device that products and copies tell."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from weft.cost.calibration.attention_trace import fitted_attention
from weft.cost.calibration.chrome_trace import read_chrome_trace
from weft.cost.calibration.cluster_writer import cluster_text
from weft.cost.calibration.compute_trace import NO_COMPUTE, KernelTime, KernelWork
from weft.cost.calibration.fit import fit, read_measurements
from weft.cost.calibration.over_base import read_base, text_over_base
from weft.cost.cluster import Cluster
from weft.cost.kernels import AttentionShape
from weft.errors import ClusterError
from weft.graph.ops import Kind

BF16 = "c10::BFloat16"


def collective(num_bytes: int, us: float) -> dict[str, Any]:
    args = {"Collective name": "allreduce", "In msg nelems": num_bytes, "Out msg nelems": num_bytes, "Group size": 2}
    return {"ph": "X", "cat": "kernel", "name": "nccl", "ts": 0, "dur": us, "args": {**args, "dtype": "Byte"}}


def operator(number: object, name: str, shapes: Any, types: Any) -> dict[str, Any]:
    args = {"External id": number, "Input Dims": shapes, "Input type": types}
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": 0, "dur": 1.0, "args": args}


def kernel(number: object, us: object, name: object = "gemm") -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": 0, "dur": us, "args": {"External id": number}}


def product(number: int, m: int, k: int, n: int, us: float, dtype: str = BF16) -> list[dict[str, Any]]:
    return [operator(number, "aten::mm", [[m, k], [k, n]], [dtype, dtype]), kernel(number, us)]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def made(*events: dict[str, Any], name: str = "rank0.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps([collective(1 << 20, 100.0), collective(1 << 24, 1000.0), *events]))
        return path

    return made


def test_products_tell_the_flops_of_their_dtype_and_copies_the_bandwidth_of_memory(write: Any):
    # 2 * 1000^3 flops in 4 us are 500 TFLOP/s; of f32 in 40 us 50. A copy of 64 MiB reads and writes it: 134 217 728
    # bytes in 100 us are 1342 GB/s. The second run of a shape was slower, and does not count.
    copy = operator(4, "aten::copy_", [[1 << 25], [1 << 25], []], [BF16, BF16, "Scalar"])
    path = write(
        *product(1, 1000, 1000, 1000, 4.0),
        *product(2, 1000, 1000, 1000, 9.0),
        *product(3, 1000, 1000, 1000, 40.0, "float"),
        kernel(4, 100.0, "copy"),
        copy,
    )
    found = read_chrome_trace(path).compute
    assert found.work == (
        KernelWork("bf16", 2 * 10**9, 4.0, 1000),
        KernelWork("f32", 2 * 10**9, 40.0, 1000),
        KernelWork("memory", 1 << 27, 100.0),
    )
    assert found.kernels == (KernelTime("copy", 1, 100.0), KernelTime("gemm", 3, 53.0))
    device = found.device()
    assert device is not None
    assert dict(device.peak_tflops) == pytest.approx({"bf16": 500.0, "f32": 50.0})
    assert device.memory_gbps == pytest.approx((1 << 27) / 100e-6 / 1e9)


def test_the_device_stands_in_the_file_and_prices_what_was_measured(write: Any, tmp_path: Path):
    measured = read_measurements([write(*product(1, 2048, 4096, 1024, 30.0))])
    device = measured.compute.device()
    assert device is not None
    path = tmp_path / "mine.toml"
    path.write_text(cluster_text(fit(measured.samples, device=device)))
    loaded = Cluster.load(path).device
    assert loaded.peak_tflops[0][0] == "bf16"
    assert loaded.peak_tflops[0][1] * loaded.matmul_efficiency == pytest.approx(2 * 2048 * 4096 * 1024 / 30e-6 / 1e12)


def test_the_median_over_shapes_counts_and_several_kernels_of_an_operator_add_up(write: Any):
    path = write(
        *product(1, 1000, 1000, 1000, 10.0),  # 200 TFLOP/s
        *product(2, 1000, 1000, 2000, 10.0),  # 400
        *product(3, 1000, 1000, 3000, 5.0),  # in 5 + 5 us: 600
        kernel(3, 5.0, "split"),
    )
    device = read_chrome_trace(path).compute.device()
    assert device is not None
    assert dict(device.peak_tflops) == pytest.approx({"bf16": 400.0})


def test_ranks_are_one_device(write: Any):
    paths = [write(*product(1, 1000, 1000, 1000, us), name=f"rank{us}.json") for us in (8.0, 4.0)]
    found = [read_chrome_trace(path).compute for path in paths]
    assert [each.work[0].us for each in found] == [8.0, 4.0]
    assert read_measurements([paths[1]]).compute.work == (KernelWork("bf16", 2 * 10**9, 4.0, 1000),)


def test_what_is_small_or_has_no_shapes_tells_nothing_but_its_time(write: Any):
    path = write(
        *product(1, 10, 10, 10, 4.0),
        operator(2, "aten::mm", [], []),
        kernel(2, 4.0),
        operator(3, "aten::copy_", [[8], [8]], [BF16, BF16]),
        kernel(3, 1.0),
        kernel(9, 2.0),
    )
    found = read_chrome_trace(path).compute
    assert found.device() is None
    assert found.kernels == (KernelTime("gemm", 4, 11.0),)
    assert "Without [device], compute takes no time" in cluster_text(fit(read_measurements([path]).samples))


def test_a_copy_of_what_is_expanded_tells_nothing(write: Any):
    event = operator(1, "aten::copy_", [[1 << 13, 1 << 13]] * 2, [BF16, BF16])
    event["args"]["Input Strides"] = [[1 << 13, 1], [0, 1]]
    assert read_chrome_trace(write(event, kernel(1, 100.0))).compute.work == ()
    event["args"]["Input Strides"] = [[1 << 13, 1], [1 << 13, 1]]
    assert read_chrome_trace(write(event, kernel(1, 100.0), name="other.json")).compute.work != ()


def test_nonsense_tells_nothing_and_stops_nothing(write: Any):
    rng = Random(0)
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        1.5,
        "x",
        [],
        {},
        [[]],
        [[0, -1]],
        [["a"]],
        [[4096, 4096]],
        [BF16],
        [BF16, 3],
    ]
    events = [
        event
        for number in range(300)
        for event in (
            operator(
                rng.choice([number, *values]),
                rng.choice(["aten::mm", "aten::add"]),
                rng.choice(values),
                rng.choice(values),
            ),
            kernel(rng.choice([number, *values]), rng.choice([4.0, *values]), rng.choice(["k", *values])),
        )
    ]
    assert read_chrome_trace(write(*events)).compute.device() is None


def copied(num_bytes: object, us: float, name: str = "Memcpy PtoP (Device -> Device)") -> dict[str, Any]:
    return {"ph": "X", "cat": "gpu_memcpy", "name": name, "ts": 0, "dur": us, "args": {"bytes": num_bytes}}


def test_copies_between_gpus_and_barriers_become_the_transport_of_a_node(write: Any):
    # 7 us and 250 GB/s: 1 MB takes 11 us, 100 MB 407. Of four barriers three wait for a late peer.
    barrier = "void c10d::symmetric_memory::barrier_kernel(unsigned int**, int)"
    within = copied(1 << 20, 1.0, "Memcpy DtoD (Device -> Device)")
    faults = [copied("many", 5.0), copied(1 << 20, -1.0)]
    events = [copied(size, 7 + size / 250e3) for size in (1_000_000, 10_000_000, 100_000_000)]
    path = write(*events, within, *faults, *(kernel(k, us, barrier) for k, us in enumerate((90.0, 3.0, 40.0, 70.0))))
    found = read_measurements([path])
    symmetric = found.compute.peer_copies.transport()
    assert symmetric is not None
    fitted = Cluster.read("test", cluster_text(fit(found.samples, symmetric=symmetric)).encode())
    assert fitted.levels[0].symmetric is not None
    link = fitted.levels[0].symmetric.link
    assert (round(link.latency_us, 3), round(link.hop_us, 3), round(link.bandwidth_gbps, 1)) == (3.0, 7.0, 250.0)


def test_copies_of_one_size_are_no_transport(write: Any):
    path = write(copied(1 << 20, 5.0), copied(1 << 20, 6.0))
    assert read_measurements([path]).compute.peer_copies.transport() is None


def test_measured_values_stand_over_a_preset_and_the_rest_stays(write: Any, tmp_path: Path):
    base = Cluster.load("h100-2x8")
    rate = 600e12
    us = 2 * 4096**3 * (1 + base.device.product_overhead_terms / 4096) / rate * 1e6 + base.device.kernel_us
    copy = operator(9, "aten::copy_", [[1 << 27], [1 << 27], []], [BF16, BF16, "Scalar"])
    path = write(*product(1, 4096, 4096, 4096, us), copy, kernel(9, 200.0, "copy"))
    measured = read_measurements([path])
    fitted = fit(measured.samples, base.ranks_per_node, "ours", base=base.name)
    text = text_over_base(fitted, base, measured.compute, ["rank0.json"])
    found = Cluster.read("ours", text.encode())
    assert (found.name, found.num_ranks, found.nccl) == ("ours", 16, base.nccl)
    device = found.device
    assert device.peak_tflops == base.device.peak_tflops  # MFU keeps its meaning
    assert device.matmul_efficiency * 989.5e12 == pytest.approx(rate)
    moved = (1 << 29) / (200.0 - base.device.kernel_us) * 1e6
    assert device.memory_efficiency * device.memory_gbps * 1e9 == pytest.approx(moved)  # type: ignore[operator]
    kept = replace(device, matmul_efficiency=base.device.matmul_efficiency)
    assert replace(kept, memory_efficiency=base.device.memory_efficiency) == base.device
    assert found.levels[1] == base.levels[1]
    assert found.levels[0].name == base.levels[0].name
    assert found.levels[0].link == fitted.cluster.levels[0].link
    assert [(table.kind, table.level) for table in found.tables] == [(Kind.ALL_REDUCE, base.levels[0].name)]


def test_a_base_must_be_a_preset_of_such_nodes_and_large_enough(write: Any, tmp_path: Path):
    for name, ranks_per_node in (("./mine.toml", None), ("h100-2x8", 4)):
        with pytest.raises(ClusterError):
            read_base(name, ranks_per_node)
    base = read_base("h100-1x8", 8)
    samples = read_measurements([write()]).samples
    wide = [replace(sample, num_ranks=16) for sample in samples]
    with pytest.raises(ClusterError):
        text_over_base(fit(wide, 8, base=base.name), base, NO_COMPUTE)


def attention(number: int, name: str, us: float, positions: int = 4096, is_causal: bool = True) -> list[dict[str, Any]]:
    """Eight heads of width 128."""
    op = getattr(torch.ops.aten, name).default
    args = [argument.name for argument in op._schema.arguments]
    shape = [1, 8, positions, 128]
    shapes = [shape if each in ("query", "key", "value") else [] for each in args]
    types = [BF16 if shape else "" for shape in shapes]
    made = operator(number, f"aten::{name}", shapes, types)
    made["args"]["Concrete Inputs"] = [str(is_causal) if each == "is_causal" else "" for each in args]
    return [made, kernel(number, us, "attention")]


FLASH = "_scaled_dot_product_flash_attention"


def test_attention_gives_the_rates_of_its_kernel_over_what_the_preset_knows(write: Any):
    base = Cluster.load("h200-1x8")
    known = {kernel.name: kernel for kernel in base.device.attention}["flash2"]
    half = replace(known.forward, tflops=known.forward.tflops / 2)
    shapes = [AttentionShape(2 * 8 * n * n * 256 // 2, 8, n, 128, False) for n in (2048, 4096, 8192)]
    runs = [attention(k, FLASH, half.ns(shape) / 1000, shape.num_positions) for k, shape in enumerate(shapes)]
    other = attention(9, FLASH, half.ns(shapes[1]._replace(flops=2 * shapes[1].flops)) / 1000, is_causal=False)
    measured = read_measurements([write(*(event for run in [*runs, other] for event in run))])
    text = text_over_base(fit(measured.samples, 8, base=base.name), base, measured.compute)
    device = Cluster.read("ours", text.encode()).device
    found = {kernel.name: kernel for kernel in device.attention}
    assert found["flash2"].forward.tflops == pytest.approx(half.tflops, rel=1e-4)
    assert replace(found["flash2"], forward=known.forward) == known  # only forward was measured
    assert found["cudnn"] == {kernel.name: kernel for kernel in base.device.attention}["cudnn"]
    chosen = replace(device, attention_kernel="flash2")
    assert chosen.attention_ns(shapes[0], torch.bfloat16) == pytest.approx(half.ns(shapes[0]), rel=1e-4)


def test_without_a_preset_a_kernel_needs_both_directions(write: Any):
    forward = attention(1, FLASH, 100.0)
    backward = attention(2, f"{FLASH}_backward", 250.0)
    assert fitted_attention(read_chrome_trace(write(*forward)).compute.attention) == ()
    (found,) = fitted_attention(read_chrome_trace(write(*forward, *backward)).compute.attention)
    flops = 2 * 8 * 4096**2 * 256 / 2
    assert found.forward.tflops == pytest.approx(flops / 100e-6 / 1e12)
    assert found.backward.tflops == pytest.approx(2.5 * flops / 250e-6 / 1e12)


def test_small_copies_show_what_every_kernel_takes(write: Any):
    small = [operator(k, "aten::add", [[64, 64], [64, 64]], [BF16, BF16]) for k in range(30)]
    large = [operator(99, "aten::add", [[1 << 25], [1 << 25]], [BF16, BF16]), kernel(99, 100.0)]
    times = [kernel(k, 1.25 if k % 3 else 2.0) for k in range(30)]
    assert read_chrome_trace(write(*small, *times, *large)).compute.kernel_us == 1.25
    assert read_chrome_trace(write(*small[:5], *times[:5])).compute.kernel_us is None


def test_the_host_takes_from_one_operator_to_the_next_of_its_thread(write: Any, tmp_path: Path):
    def called(number: int, name: str, ts: float, us: float, tid: int = 1, shapes: Any = None) -> dict[str, Any]:
        made = operator(number, name, [] if shapes is None else shapes, [])
        return made | {"ts": ts, "dur": us, "tid": tid}

    events: list[dict[str, Any]] = []
    for k in range(25):
        ts = 100.0 * k
        events += [
            called(10 * k, "aten::linear", ts, 8.0),
            called(10 * k + 1, "aten::addmm", ts + 1, 6.0),  # inside; its kernel makes both one operator
            kernel(10 * k + 1, 50.0),
            called(10 * k + 2, "aten::view", ts + 12, 1.0),
            called(10 * k + 3, "_c10d_functional::wait_tensor", ts + 15, 5.0),
            called(10 * k + 4, "aten::_foreach_add_", ts + 45, 9.0, shapes=[[[4], [4], [4]], []]),
            kernel(10 * k + 4, 5.0),
            called(10 * k + 5, "aten::empty", ts + 57, 1.0),
            called(10 * k + 6, "aten::relu", ts + 3, 2.0, tid=2),  # another thread has its own order
            kernel(10 * k + 6, 5.0),
        ]
    measured = read_measurements([write(*events)])
    times = {"operator_us": 12.0, "view_us": 3.0, "collective_us": 30.0, "optimizer_us": 4.0}
    # Of 25 + 24 samples, 24 are those of the second thread, 100 us apart.
    assert measured.compute.host.medians == times
    base = Cluster.load("h200-1x8")
    assert base.device.host is not None
    text = text_over_base(fit(measured.samples, 8, base=base.name), base, measured.compute)
    assert Cluster.read("ours", text.encode()).device.host == replace(base.device.host, **times)


def test_the_launches_of_compiled_kernels_are_those_that_follow_each_other(write: Any):
    def launched(k: int, ts: float, name: str) -> list[dict[str, Any]]:
        issue = {"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernel", "ts": ts, "dur": 1.0}
        made = kernel(None, 5.0, name)
        made["args"] = {"correlation": k}
        return [issue | {"args": {"correlation": k}}, made]

    compiled = [event for k in range(30) for event in launched(k, 7.0 * k, "triton_poi_fused_0")]
    other = launched(99, 7.0 * 29.5, "gemm")
    assert read_chrome_trace(write(*compiled, *other)).compute.host.medians == {"launch_us": 7.0}
    apart = [event for k in range(60) for event in launched(k, 7.0 * k, "gemm" if k % 2 else "triton_poi_fused_0")]
    assert read_chrome_trace(write(*apart)).compute.host.medians == {}
