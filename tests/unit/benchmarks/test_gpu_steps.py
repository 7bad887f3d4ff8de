"""The benchmark of single-GPU steps: what it reads off traces, one row on a CPU, and how it survives failures."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scenarios

GPU = scenarios.HERE / "gpu"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmark, whose files find each other by being in one folder."""
    monkeypatch.syspath_prepend(str(GPU))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return importlib.import_module


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "product"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "product"),
        ("void flash_bwd_kernel<Traits<cutlass::bfloat16_t>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_3", "triton"),
        ("triton_for_fused_0", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>>", "optimizer"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, silu>", "pointwise"),
        ("void cunn_SoftMaxForward<4, float>", "reduction"),
        ("mystery", "other"),
    ],
)
def test_kernels_have_categories(beside: Any, name: str, category: str):
    assert beside("steps_row").category_of(name) == category


def test_idle_time_is_what_no_kernel_or_copy_covers(beside: Any):
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 4, "ph": "X"},
        {"cat": "kernel", "name": "gemm", "ts": 3, "dur": 3, "ph": "X"},
        {"cat": "gpu_memset", "name": "Memset", "ts": 10, "dur": 1, "ph": "X"},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100, "ph": "X"},
    ]
    found = beside("steps_row").kernels_of(events)
    assert (found["num_kernels"], found["window_us"], found["busy_us"], found["idle_us"]) == (3, 11, 7, 4)
    assert found["categories"] == {"copy": {"num": 1, "us": 1}, "product": {"num": 2, "us": 7}}
    assert found["largest"][0] == {"name": "gemm", "num": 2, "us": 7}
    assert beside("steps_row").kernels_of(events[3:]) is None


def test_checkpointed_blocks_run_forward_twice(beside: Any):
    shape = {"dim": 8, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 16, "vocabulary": 32}
    shape |= {"sequence": 4, "batch": 3}
    block = 2 * 12 * 8 * (8 + 8 + 4 + 4 + 48) + 2 * 12 * 4 * 8
    head = 2 * 12 * 8 * 32
    flops_of = beside("steps_row").flops_of
    assert flops_of(shape, False) == {"model_flops": 3 * (2 * block + head), "recomputed_flops": 0}
    assert flops_of(shape, True)["recomputed_flops"] == 2 * block


def test_labels_are_unique_and_every_shape_runs_eager_and_compiled(beside: Any):
    steps = beside("steps")
    rows = steps.all_rows()
    assert len({row.label for row in rows}) == len(rows)
    plain = {(row.shape, row.mode) for row in rows if not row.checkpointed and row.optimizer == "foreach"}
    assert plain >= {(shape, mode) for shape in steps.SHAPES for mode in ("eager", "compiled")}


@pytest.mark.slow
def test_rows_are_measured_and_compared_and_later_runs_skip_them(
    beside: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    steps, path = beside("steps"), tmp_path / "steps.json"
    chosen = ["8b-2l:none:*:foreach"]
    tiny = ["--device", "cpu", "--tiny", "--rows", *chosen]
    steps.main([*tiny, "--json", str(path)])
    rows = {row["mode"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["eager", "compiled", "cudagraphs"]
    assert all("error" not in row and row["stage"] == "the profile" for row in rows.values())
    assert all(row["min_ms"] <= row["step_ms"] <= row["max_ms"] for row in rows.values())
    assert rows["eager"]["host_small_forward_ms"] > 0
    assert rows["compiled"]["graph_breaks"] == 0
    beside("steps_table").main([str(path), "--cluster", "h200-8"])
    table = capsys.readouterr().out
    assert table.count("| 8b-2l | nothing") == 3
    steps.main(["--list", "--rows", *chosen, "--skip", str(path)])
    assert capsys.readouterr().out.strip() == ""


def test_a_row_that_is_stopped_or_not_begun_says_so(beside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps, path = beside("steps"), tmp_path / "steps.json"
    monkeypatch.setitem(steps.LIMIT_S, "eager", 0.01)
    chosen = ["--device", "cpu", "--tiny", "--json", str(path), "--rows", "0.1b:none:eager:foreach"]
    steps.main(chosen)
    (row,) = json.loads(path.read_text())["rows"]
    assert "limit" in row["error"]
    steps.main([*chosen, "--budget-s", "1"])
    (row,) = json.loads(path.read_text())["rows"]
    assert "budget" in row["error"]
