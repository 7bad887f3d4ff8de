"""Device: what one rank computes with, as data that anyone can write down.

Everything is optional. A node that the device cannot price takes no time and is listed as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.errors import ClusterError, compose

MATMUL_EFFICIENCY = 0.7
"""Default share of the peak that large products reach. Measured: sixteen 8192^3 bf16 matmuls on each of two ranks took
49.2 ms on one H200 (torch 2.11.0, CUDA 13.0), which is 715 of its 989 TFLOP/s."""

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
    """The share of the peak that large products reach."""
    fuses: bool = True
    """A compiler fuses chains of pointwise operators into one kernel; otherwise each operator is a kernel."""

    def __post_init__(self) -> None:
        rates = [
            (f"its products of {key} run", peak * self.matmul_efficiency, "TFLOP/s") for key, peak in self.peak_tflops
        ]
        rates += [("its memory runs", self.memory_gbps, "GB/s")] if self.memory_gbps is not None else []
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

    def traffic_ns(self, num_bytes: int) -> int | None:
        """The time to move bytes between the device and its memory; None if the bandwidth is unknown."""
        if self.memory_gbps is None:
            return None
        per_ms = round(self.memory_gbps * 1e6)
        return -(-num_bytes * 1_000_000 // per_ms)


UNDESCRIBED = Device()
"""The device of a cluster that does not describe its devices."""
