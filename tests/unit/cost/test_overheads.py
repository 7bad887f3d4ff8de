"""Gaps between kernels, the host's time per kernel, and the slowdown of products beside collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.cost.measured import write_trace
from tests.unit.cost.step_events import collective, issue, kernel
from weft.cost.calibration.chrome_trace import read_chrome_trace
from weft.cost.calibration.compute_trace import merge_compute
from weft.cost.calibration.overheads import MIN_SAMPLES, Overheads

MANY = MIN_SAMPLES + 1


def overheads(folder: Path, *events: Any) -> Overheads:
    return read_chrome_trace(write_trace(folder / "trace.json", events)).compute.overheads


def train(gap_us: float, *, lead_us: float, count: int = MANY) -> list[Any]:
    """Kernels of 10 us with gaps; the host issues each some time before it starts."""
    period = 10 + gap_us
    starts = [1000 + i * period for i in range(count)]
    issues = [issue(start - lead_us, i) for i, start in enumerate(starts, 1)]
    return [*issues, *(kernel(start, 10, correlation=i) for i, start in enumerate(starts, 1))]


def test_the_gap_between_kernels_that_the_host_has_issued_in_time_is_the_launch_gap(tmp_path: Path):
    found = overheads(tmp_path, collective("all_gather", 64, 0, 5), *train(1.5, lead_us=500))
    assert found.launch_gap_us == 1.5
    assert found.host_kernel_us is None


def test_gaps_in_which_the_host_is_late_give_its_time_per_kernel(tmp_path: Path):
    found = overheads(tmp_path, collective("all_gather", 64, 0, 5), *train(20, lead_us=4))
    assert found.host_kernel_us == 30
    assert found.launch_gap_us is None


def test_a_gap_in_which_a_collective_ends_may_be_a_wait_and_does_not_count(tmp_path: Path):
    waits = [collective("all_gather", 64, 1000 + i * 40 + 5, 25) for i in range(MANY)]
    assert overheads(tmp_path, *waits, *train(30, lead_us=500)).gaps_us == ()


def test_few_gaps_give_no_figure(tmp_path: Path):
    found = overheads(tmp_path, collective("all_gather", 64, 0, 5), *train(1.5, lead_us=500, count=MIN_SAMPLES))
    assert len(found.gaps_us) == MIN_SAMPLES - 1
    assert found.launch_gap_us is None


def test_without_calls_of_the_host_gaps_are_unknown(tmp_path: Path):
    kernels = [each for each in train(1.5, lead_us=500) if each["cat"] == "kernel"]
    assert overheads(tmp_path, collective("all_gather", 64, 0, 5), *kernels).gaps_us == ()


def products(count: int, start: float, us: float, first: int) -> list[Any]:
    """Products of one shape, one after the other."""
    events: list[Any] = []
    for i in range(count):
        args = {"External id": first + i, "Input Dims": [[1024, 1024]] * 2, "Input type": ["c10::BFloat16"] * 2}
        events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1.0, "args": args})
        run = kernel(start + i * us, us)
        run["args"]["External id"] = first + i
        events.append(run)
    return events


def test_products_beside_a_collective_against_products_alone_are_the_slowdown(tmp_path: Path):
    beside = products(5, 1000, 12, 1)
    alone = products(5, 2000, 10, 10)
    found = overheads(tmp_path, collective("all_gather", 64, 990, 200), *beside, *alone)
    assert abs((found.overlap_slowdown or 0) - 0.2) < 1e-9


def test_a_product_partly_beside_a_collective_does_not_count(tmp_path: Path):
    events = [collective("all_gather", 64, 1006, 6), *products(1, 1000, 12, 1), *products(5, 2000, 10, 10)]
    assert overheads(tmp_path, *events).slowdowns == ()


def test_the_device_has_the_overheads_of_all_ranks(tmp_path: Path):
    beside, alone = products(5, 1000, 12, 1), products(5, 2000, 10, 10)
    events = [collective("all_gather", 64, 990, 200), *beside, *alone, *train(2, lead_us=500, count=15)]
    traces = [read_chrome_trace(write_trace(tmp_path / f"rank{rank}.json", events, rank)) for rank in (0, 1)]
    assert traces[0].compute.overheads.launch_gap_us is None  # 14 gaps are too few
    device = merge_compute(trace.compute for trace in traces).device()
    assert device is not None
    assert device.launch_gap_us == 2
    assert abs(device.overlap_slowdown - 0.2) < 1e-9
