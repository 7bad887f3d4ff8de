"""Device: what one rank computes with, as data that anyone can write down.

Everything is optional. A node that the device cannot price takes no time and is listed as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from weft.cost.kernels import AttentionKernel, AttentionShape, HostTimes, ProductShape
from weft.errors import ClusterError, compose

MATMUL_EFFICIENCY = 0.7
"""Default share of the peak that large products reach. Measured: sixteen 8192^3 bf16 matmuls on each of two ranks took
49.2 ms on one H200 (torch 2.11.0, CUDA 13.0), which is 715 of its 989 TFLOP/s."""

USUAL_SHARE = 0.7
"""Share of the compute time that products take in a usual step; there, clocks need no correction."""

SLOWEST, FASTEST = 5.1e-7, 1e12
"""Accepted rates in TFLOP/s or GB/s. Outside, flops per microsecond or bytes per millisecond are not whole numbers."""

DTYPES: dict[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2fnuz: "fp8",
}
"""The key of the peak for each dtype. Products of f32 run at `f32`: torch uses TF32 only on request."""


@dataclass(frozen=True)
class HostMemory:
    """Host memory that values of a rank can be copied to, and the link to it."""

    bandwidth_gbps: float
    """Bandwidth of copies in each direction; copies in opposite directions do not slow each other."""
    latency_us: float
    """Time of a copy without any bytes."""
    limit_bytes: int
    """Pinned memory that one rank may use."""

    def copy_ns(self, num_bytes: int) -> int:
        """The time of one copy."""
        return ceil(self.latency_us * 1000 + num_bytes / self.bandwidth_gbps)


@dataclass(frozen=True)
class Device:
    """Peaks and overheads of one device."""

    name: str = ""
    peak_tflops: tuple[tuple[str, float], ...] = ()
    """Dense peak by dtype: bf16, f16, f32, tf32, f64, fp8, int8, sorted by name."""
    memory_gbps: float | None = None
    memory_bytes: int | None = None
    launch_gap_us: float = 0.0
    """Time between two kernels on the compute stream."""
    overlap_slowdown: float = 0.0
    """The share by which compute slows while a collective runs."""
    collective_slowdown: float = 0.0
    """The share by which a collective slows while compute runs."""
    matmul_efficiency: float = MATMUL_EFFICIENCY
    """The share of the peak that large products reach in a step that spends `USUAL_SHARE` of its time in them."""
    fuses: bool = True
    """A compiler fuses chains of pointwise operators into one kernel; otherwise each operator is a kernel."""
    memory_efficiency: float = 1.0
    """The share of the memory bandwidth that long kernels reach."""
    kernel_us: float = 0.0
    """Time that each kernel takes to start and to finish, in addition to its work."""
    product_overhead_terms: int = 0
    """A product of k terms takes as long as k plus this many at the full rate."""
    num_multiprocessors: int = 0
    """0: unknown; small products then occupy the whole device."""
    attention: tuple[AttentionKernel, ...] = ()
    """Rates of attention kernels; the first is the default. Without any, attention is priced as a product."""
    attention_kernel: str = ""
    """The attention kernel in use; empty: the default."""
    power_headroom: float = 0.0
    """How much faster products run for each share of the time that other kernels take, since the power limit sets the
    clocks: 0.4 means 4 % faster if a tenth more of the time goes to other kernels. Used only with an execution."""
    host: HostTimes | None = None
    """The times that the host takes to issue work; used only with an execution."""
    host_memory: HostMemory | None = None
    """None: nothing can be offloaded."""
    execution: str = ""
    """How the graph is run (`execution.py`); empty: compiled if `fuses`, and the host is never in the way."""

    def __post_init__(self) -> None:
        rates = [
            (f"its products of {key} run", peak * self.matmul_efficiency, "TFLOP/s") for key, peak in self.peak_tflops
        ]
        if self.memory_gbps is not None:
            rates.append(("its memory runs", self.memory_gbps * self.memory_efficiency, "GB/s"))
        for what, rate, unit in rates:
            if not SLOWEST <= rate <= FASTEST:  # also catches NaN
                found = f"{what} at {rate:g} {unit}, expected {SLOWEST:g} to {FASTEST:g}"
                raise ClusterError(compose(f"device {self.name!r}", found, do="check the units"))

    def peak_of(self, dtype: torch.dtype) -> float | None:
        """The peak for products of a dtype in TFLOP/s; None if the device states none."""
        key = DTYPES.get(dtype)
        return next((peak for name, peak in self.peak_tflops if name == key), None)

    def product_ns(self, flops: int, dtype: torch.dtype) -> int | None:
        """The time of a compute-bound product; None if the peak is unknown."""
        peak = self.peak_of(dtype)
        if peak is None:
            return None
        per_us = round(peak * self.matmul_efficiency * 1e6)  # flops per microsecond; whole numbers add up exactly
        return -(-flops * 1000 // per_us)

    def shaped_product_ns(self, shape: ProductShape, dtype: torch.dtype) -> int | None:
        """The time of a product by its shape, without the time to start; None if the peak is unknown."""
        if shape.terms == 0 or shape.flops == 0:
            return 0
        flops = shape.occupied_flops(self.num_multiprocessors)
        ns = self.product_ns(flops * (shape.terms + self.product_overhead_terms) // shape.terms, dtype)
        share = shape.share_of_processors(self.num_multiprocessors)
        return ns if ns is None or share == 1.0 else round(ns / share)

    def attention_ns(self, shape: AttentionShape, dtype: torch.dtype) -> int | None:
        """The time of an attention, without the time to start; None if its rate is unknown."""
        by_name = {kernel.name: kernel for kernel in self.attention}
        kernel = by_name.get(self.attention_kernel) or next(iter(self.attention), None)
        if kernel is None or dtype not in (torch.bfloat16, torch.float16):
            return self.product_ns(shape.flops, dtype)
        return (kernel.backward if shape.is_backward else kernel.forward).ns(shape)

    @property
    def kernel_ns(self) -> int:
        return round(self.kernel_us * 1000)

    def traffic_ns(self, num_bytes: int) -> int | None:
        """The time to move bytes between the device and its memory; None if the bandwidth is unknown."""
        if self.memory_gbps is None:
            return None
        per_ms = round(self.memory_gbps * self.memory_efficiency * 1e6)
        return -(-num_bytes * 1_000_000 // per_ms)


UNDESCRIBED = Device()
"""The device of a cluster that does not describe its devices."""
