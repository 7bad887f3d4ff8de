"""The training benchmark of real ranks: what it reads off traces, how it survives failures, and one job on gloo."""

from __future__ import annotations

import gzip
import importlib
import json
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from benchmarks import scenarios
from weft.cost.calibration.cluster_writer import cluster_text
from weft.cost.calibration.fit import Fit
from weft.cost.cluster import Cluster
from weft.cost.device import Device
from weft.cost.kernels import AttentionShape, ProductShape
from weft.prediction.error_bars import StepKind, read_residuals

GPU = scenarios.HERE / "gpu"
STEP = """
group('dp', size=2)

def graph(x: bf16[64, 64], p: bf16[32, 64]):
    g: bf16[64, 64] = all_gather(p, 2, 'dp')
    w: bf16[64, 64] = wait(g)
    a: bf16[64, 64] = mm(x, w)
    b: bf16[64, 64] = relu(a)
    return [b]
"""


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmark, whose files find each other by being in one folder."""
    monkeypatch.syspath_prepend(str(GPU))
    return importlib.import_module


def kernel(name: str, start: float, us: float, stream: int = 7, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": us, "tid": stream}


def test_exposed_is_what_no_kernel_copy_or_fill_covers(beside: Any) -> None:
    found = beside("train_profile").communication_of(
        [
            kernel("ncclDevKernel_AllGather", 0, 10, stream=9),
            kernel("ncclDevKernel_AllReduce", 20, 10, stream=9),
            kernel("gemm", 4, 2),
            kernel("gemm", 5, 2),
            kernel("Memcpy DtoD", 28, 4, cat="gpu_memcpy"),
            kernel("aten::mm", 0, 100, cat="cpu_op"),
        ]
    )
    assert found == {"communication_us": 20, "exposed_us": 15, "compute_us": 7}


def test_a_trace_without_kernels_tells_nothing_of_communication(beside: Any) -> None:
    module = beside("train_profile")
    events = [kernel("aten::mm", 0, 100, cat="cpu_op")]
    assert module.communication_of(events) is None
    assert module.gap_us(events) is None


def test_gaps_are_those_of_one_stream_and_no_waits(beside: Any) -> None:
    events = [
        kernel("a", 0, 5),
        kernel("b", 7, 3),
        kernel("c", 12, 1),
        kernel("d", 900, 1),
        kernel("e", 3, 1, stream=8),
    ]
    assert beside("train_profile").gap_us(events) == 2


def test_times_of_nodes_are_read_off_the_compute_stream(beside: Any) -> None:
    annotation = "gpu_user_annotation"
    events = [
        kernel("ncclDevKernel_AllGather", 0, 10, stream=9),
        kernel("node:g", 0, 10, stream=9, cat=annotation),
        kernel("node:a", 10, 6, cat=annotation),
        kernel("gemm", 10, 2),
        kernel("Memset (Device)", 15, 1, cat="gpu_memset"),
        kernel("else", 17, 1, cat=annotation),
        kernel("add", 17, 1),
        kernel("node:a", 20, 1, cat=annotation),
        kernel("gemm", 20, 1),
        kernel("node:b", 26, 3, cat=annotation),
        kernel("gemm", 26, 3),
        kernel("gemm", 27, 3, stream=8),
    ]
    # Between 12 and 15 another rank had the device; what has no mark, or is on another lane, is of no node.
    assert beside("train_profile").marked(events, "cuda") == {"a": 4, "b": 3}
    assert beside("train_profile").marked([kernel("node:a", 0, 5, cat="user_annotation")], "cpu") == {"a": 5}


def test_traces_may_be_packed(beside: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [kernel("a", 0, 1), {"ph": "M"}]}).encode()))
    assert [event["name"] for event in beside("train_profile").events_of(path)] == ["a"]


def test_measured_nodes_come_before_the_prices_of_the_cluster(beside: Any) -> None:
    predictions = beside("train_predict").predictions
    module, cluster = (
        weft.parse(STEP),
        replace(Cluster.load("h100-8"), device=Device("plain", (("bf16", 900.0),), 3000.0)),
    )
    plain = predictions(module, cluster, "eager", {"w": 1e6})  # a wait takes no time of its own
    assert plain["predicted_measured_ms"] == plain["predicted_ms"] > 0
    longer = predictions(module, cluster, "eager", {"a": 5000.0, "b": 3000.0})
    gather_ms = plain["predicted_ms"] - plain["predicted_compute_ms"]
    assert longer["predicted_measured_ms"] == pytest.approx(8.0 + gather_ms, rel=1e-2)


def test_each_rank_has_its_part_of_the_gpu(beside: Any) -> None:
    module = beside("train_predict")
    preset = module.preset_of("NVIDIA H200")
    part = module.part_of(preset, 2)
    shape = AttentionShape(10**12, 16, 2048, 128, False)
    kernel = next(each for each in preset.attention if each.name == "flash2")
    assert part.attention_ns(shape, torch.bfloat16) == pytest.approx(2 * kernel.forward.ns(shape), rel=1e-6)
    assert part.traffic_ns(10**9) == pytest.approx(2 * preset.traffic_ns(10**9), rel=1e-6)
    large = ProductShape(1, 8192, 8192, 8192)
    assert part.shaped_product_ns(large, torch.bfloat16) == pytest.approx(
        2 * preset.shaped_product_ns(large, torch.bfloat16), rel=1e-6
    )
    assert module.preset_of("AMD EPYC") is None


def test_measured_rates_are_neither_raised_nor_lowered_twice(beside: Any) -> None:
    """The products that were measured, and nothing else, take the time that they took."""
    module = beside("train_predict")
    part = module.part_of(module.preset_of("NVIDIA H200"), 2, module.Rates(300.0, 8192, 2000.0))
    products = weft.parse("def graph(a: bf16[8192, 8192], b: bf16[8192, 8192]):\n    y = mm(a, b)\n    return [y]\n")
    cluster = replace(Cluster.load("h200-8"), device=replace(part, memory_gbps=None, host=None))
    expected_us = 2 * 8192**3 / 300e6 + part.kernel_us
    assert weft.simulate(products, cluster.running("eager")).step_us == pytest.approx(expected_us, rel=1e-3)
    assert part.traffic_ns(2 * 10**9) == pytest.approx(1e6, rel=1e-3)


@pytest.mark.slow
def test_rows_of_a_file_are_predicted_again(beside: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster.load("h200-2")
    shape = {"num_layers": 1, "dim": 64, "ffn_dim": 128, "num_heads": 4, "tokens": 128}
    rows = [
        {"parallel": "ddp", "ranks": 2, "variant": name, "step_ms": 1.0}
        for name in ("graph planned", "eager", "torch's own", "inductor", "weft", "inductor overlap")
    ]
    found = {"machine": "a GPU", "reduce": "f32", "shapes": {"all": shape}, "sequence": 32, "vocabulary": 256}
    found |= {"rows": rows, "clusters": {"ddp:2:step": {"ranks": 2, "toml": cluster_text(Fit((), cluster))}}}
    beside("train_again").predict_again(found, ["*"])
    lines = capsys.readouterr().out.splitlines()
    assert ["not predicted" in line for line in lines] == [False] * 5 + [True]
    assert [row.get("again_ms", 0) > 0 for row in rows] == [True] * 5 + [False]


def test_jobs_that_tell_most_come_first_and_are_chosen_by_pattern(
    beside: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    train = beside("train")
    labels = [job.label for job in train.all_jobs([2, 4])]
    assert labels[:4] == ["fsdp:2:graph", "ddp:2:graph", "tp:2:graph", "fsdp:2:step"]
    assert labels.index("fsdp:2:step") < labels.index("fsdp-tp:4:graph")
    assert len(set(labels)) == len(labels)
    train.main(["--list", "--jobs", "tp:2:*"])
    assert capsys.readouterr().out.splitlines()[0].split(maxsplit=1)[0] == "tp:2:graph"


def test_a_rank_that_fails_or_hangs_ends_the_others(beside: Any) -> None:
    train = beside("train")

    def start(code: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

    sleeper = "import time; time.sleep(60)"
    began = time.monotonic()
    assert train._wait([start(sleeper), start("raise SystemExit(3)")], began + 50) == "a rank ended with 3"
    assert train._wait([start(sleeper)], time.monotonic() + 0.5) == "the time limit was reached"
    assert time.monotonic() - began < 20


def test_failures_stand_below_the_table_and_pages_are_filled_between_marks(beside: Any, tmp_path: Path) -> None:
    rows = [
        {"parallel": "fsdp", "ranks": 2, "variant": "graph naive", "step_ms": 50.0, "spread_ms": 1.0}
        | {"predicted_ms": 45.0, "collectives": [8, 4], "values_agree": False, "gradient_error": 0.25},
        {"parallel": "tp", "ranks": 2, "variant": "weft", "error": "RuntimeError:\n out of | memory"},
    ]
    found = {"machine": "a GPU", "torch": "2.11", "date": "2026-01-01", "rows": rows}
    found |= {"clusters": {"2": {"ranks": 2, "error": "no trace"}}}
    results, page = tmp_path / "results.json", tmp_path / "gpu.md"
    results.write_text(json.dumps(found))
    module = beside("train_table")
    listed = f"{module.LISTED_BEGIN}\n{module.LISTED_END}"
    page.write_text(f"before\n{module.BEGIN}\nold\n{module.END}\n{listed}\nafter\n")
    module.fill([results], page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| -10 % " in text
    assert "8 to 4" in text
    assert "DIFFER" in text
    assert "- tp, 2 ranks, weft: RuntimeError: out of / memory" in text
    assert "- results, 2: the cluster was not measured: no trace" in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no marks"):
        module.fill([results], page)


def test_the_table_holds_the_latest_run_of_each_job_that_ran(beside: Any) -> None:
    def row(parallel: str, variant: str, **figures: Any) -> dict[str, Any]:
        told = {"spread_ms": 1.0, "values_agree": True, "gradient_error": 0.0} if "step_ms" in figures else {}
        return {"parallel": parallel, "ranks": 2, "variant": variant, **told, **figures}

    cluster = {"ranks": 2, "peak_tflops": {"bf16": 300.0}, "memory_gbps": 3000.0}
    cluster |= {"overlap_slowdown": 0.1, "collective_slowdown": 0.2}
    about = {"machine": "a GPU", "torch": "2.11"}
    later = about | {
        "rows": [row("fsdp", "weft", step_ms=40.0), row("tp", "weft", error="it hangs")],
        "clusters": {"fsdp:2:step": {**cluster, "connections": 32}, "tp:2:step": cluster},
    }
    earlier = about | {
        "rows": [
            *(row("fsdp", name, step_ms=50.0) for name in ("graph naive", "weft", "weft cudagraphs")),
            *(row("tp", name, step_ms=70.0) for name in ("eager", "weft")),
        ],
        "clusters": {"2, graphs": cluster, "2, steps": cluster, "4": cluster},
    }
    lines = beside("train_table").document([("later", later), ("earlier", earlier)]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    assert [(cell[0], cell[2], cell[3]) for cell in cells] == [
        ("fsdp", "graph naive", "50.0"),
        ("fsdp", "weft", "40.0"),
        ("fsdp", "weft cudagraphs", "50.0"),
        ("tp", "eager", "70.0"),
        ("tp", "weft", "70.0"),
    ]
    told = [line.split(": each")[0] for line in lines if line.startswith("- ")]
    assert told == ["- later, fsdp:2:step", "- earlier, 2, graphs", "- earlier, 2, steps"]
    assert lines[-3].endswith("; 32 hardware queues")


def test_predictions_of_all_runs_are_listed_the_worst_first(beside: Any) -> None:
    rows = [
        {"parallel": "tp", "ranks": 2, "variant": name, "step_ms": 100.0, "again_ms": again, "again_exposed_ms": 1.0}
        for name, again in (("weft", 98.0), ("eager", 60.0), ("inductor", 120.0))
    ]
    rows[0]["predicted_ms"] = 90.0
    first = {"rows": [rows[0], rows[1], {"parallel": "tp", "ranks": 2, "variant": "weft", "error": "none"}]}
    listed = beside("train_table").listed([("one", first), ("two", {"rows": rows[2:]})]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in listed[2:]]
    assert [[cell[k] for k in (0, 3, 6, 10)] for cell in cells] == [
        ["one", "eager", "-40 %", ""],
        ["two", "inductor", "+20 %", ""],
        ["one", "weft", "-2 %", "-10 %"],
    ]


def test_errors_of_ranks_on_one_gpu_are_recorded_for_error_bars(beside: Any, tmp_path: Path) -> None:
    path = tmp_path / "residuals.toml"
    path.write_text('# head\n\n[[residuals]]\nset = "other"\ndevice = "d"\nparallel = "tp"\nexecution = "eager"\n')
    row = {"parallel": "tp", "ranks": 2, "step_ms": 100.0, "again_exposed_ms": 1.0}
    rows = [
        row | {"variant": "weft", "again_ms": 90.0, "again_host_ms": 10.0},
        row | {"variant": "eager", "again_ms": 90.0, "again_host_ms": 80.0},
        row | {"variant": "inductor overlap"},
    ]
    beside("train_again").record([("run", {"machine": "NVIDIA H200", "rows": rows})], path)
    other, compiled, eager = read_residuals(tomllib.loads(path.read_text()))
    assert other.kind.device == "d"
    assert (compiled.kind, compiled.step) == (StepKind("H200 SXM", "tp", "compiled"), -0.1)
    assert eager.kind == StepKind("H200 SXM", "tp", "eager", is_host_bound=True)


def test_values_are_compared_with_eager_and_a_wrong_gradient_is_told(beside: Any, monkeypatch: Any) -> None:
    module = beside("train_rank")
    held = object.__new__(module.Rank)
    held.reference = [torch.tensor(2.0), torch.ones(4)]
    monkeypatch.setattr(module.Rank, "max", lambda self, numbers: numbers)
    variant = beside("train_variants").Variant
    assert held.check(variant(lambda: [torch.tensor(2.0), torch.ones(4)]))["values_agree"]
    wrong = held.check(variant(lambda: [torch.tensor(2.0), 1.1 * torch.ones(4)]))
    assert not wrong["values_agree"]
    assert wrong["gradient_error"] == pytest.approx(0.1)
    with pytest.raises(RuntimeError, match="1 results, eager has 2"):
        held.check(variant(lambda: [torch.tensor(2.0)]))


@pytest.mark.long
def test_the_whole_flow_runs_on_gloo(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, str(GPU / "train.py"), "--device", "cpu", "--ranks", "2", "--tiny"]
    subprocess.run([*command, "--jobs", "ddp:2:graph", "--json", str(results)], check=True, timeout=200)
    found = json.loads(results.read_text())
    assert [row["variant"] for row in found["rows"]] == ["graph as captured", "graph naive", "graph planned"]
    for row in found["rows"]:
        assert row["values_agree"]
        assert row["step_ms"] > 0
        assert row["predicted_ms"] > 0
    launches = [row["collectives"][1] for row in found["rows"]]
    assert launches[2] <= launches[0]  # fewer where merging pays by what was measured; on a busy machine it may not
