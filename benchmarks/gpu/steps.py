"""Single-GPU training steps of the zoo's decoders: time, memory, kernels, host time and clocks of each.

    PYTHONPATH=src:carried python benchmarks/gpu/steps.py --budget-s 500 --json steps.json [--rows '8b*:compiled:*' ...]
    PYTHONPATH=src python benchmarks/gpu/steps.py --list                        # the rows, in their order
    PYTHONPATH=src python benchmarks/gpu/steps.py --device cpu --tiny           # the whole flow, without a GPU

`--budget-s` is for the whole run. `--skip FILE...` leaves out the rows that earlier results already hold, so that
several runs complete one set. `steps_table.py` compares the files with predictions.

Each row is one process with a time limit. The next process imports torch while the current one measures, and touches
the GPU only when the current one has ended. The file is written after every row, the most informative rows come first,
and a failure or an out-of-memory error is recorded in its row.

A machine that has torch but cannot install Weft's dependencies needs them in a folder; for Python 3.12 on Linux:

    pip download -d wheels --python-version 3.12 --platform manylinux_2_17_x86_64 --only-binary=:all: --no-deps \
        pydantic pydantic_core typing_extensions annotated_types typing_inspection
    for wheel in wheels/*.whl; do unzip -q -o $wheel -d carried; done
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
LEAST_S = {"eager": 12.0, "compiled": 35.0, "cudagraphs": 35.0}
"""Minimum remaining seconds to start a row, by mode; a later row that needs less may still run."""
LIMIT_S = {"eager": 60.0, "compiled": 110.0, "cudagraphs": 110.0}
"""Time limit of a row, by mode."""
STEADY_S = 20.0
"""Length of a steady row: clocks drop within seconds of full load."""


@dataclass(frozen=True)
class Shape:
    """A decoder and its batch."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocabulary: int
    sequence: int
    batch: int


SHAPES = {
    "0.1b": Shape(768, 12, 12, 12, 2048, 32768, 2048, 8),
    "0.1b-large-batch": Shape(768, 12, 12, 12, 2048, 32768, 2048, 48),
    "0.3b": Shape(1024, 16, 16, 16, 2816, 50304, 2048, 16),
    "0.6b": Shape(1536, 12, 12, 4, 4096, 65536, 4096, 6),
    "odd": Shape(1600, 6, 25, 5, 4400, 50304, 2048, 11),
    "1b": Shape(2048, 16, 32, 8, 8192, 131072, 4096, 4),
    "2b-4l": Shape(2560, 4, 20, 4, 10240, 65536, 8192, 3),
    "3b-4l": Shape(3072, 4, 24, 8, 8192, 131072, 4096, 4),
    "8b-1l": Shape(4096, 1, 32, 8, 14336, 32768, 8192, 4),
    "8b-2l": Shape(4096, 2, 32, 8, 14336, 131072, 8192, 2),
    "8b-4l": Shape(4096, 4, 32, 8, 14336, 32768, 4096, 8),
    "8b-4l-large-vocabulary": Shape(4096, 4, 32, 8, 14336, 131072, 4096, 8),
    "13b-3l": Shape(5120, 3, 40, 40, 13824, 32768, 4096, 6),
    "70b-1l": Shape(8192, 1, 64, 8, 28672, 32768, 8192, 3),
    "70b-2l": Shape(8192, 2, 64, 8, 28672, 32768, 4096, 4),
    "70b-1l-large-vocabulary": Shape(8192, 1, 64, 8, 28672, 131072, 8192, 2),
    "70b-3l": Shape(8192, 3, 64, 8, 28672, 32768, 2048, 10),
}
TINY = Shape(64, 2, 4, 2, 128, 256, 32, 2)


@dataclass(frozen=True)
class Row:
    """One training step and how it runs."""

    shape: str
    mode: str = "eager"
    """eager; compiled (`torch.compile` of forward and loss); or cudagraphs (the same with `reduce-overhead`)."""
    optimizer: str = "foreach"
    """The AdamW: foreach (the zoo's, capturable), plain (foreach, not capturable), fused, or compiled (the zoo's)."""
    checkpointed: bool = False
    """Whether every block is recomputed in backward."""
    steady: bool = False
    """Whether to run on for `STEADY_S` seconds."""

    @property
    def label(self) -> str:
        extra = "full" if self.checkpointed else "none"
        return ":".join([self.shape, extra, self.mode, self.optimizer, *(["steady"] if self.steady else [])])


def all_rows() -> list[Row]:
    """All rows, most informative first: pairs of eager and compiled, checkpointing, optimizers, CUDA graphs, clocks."""
    first = ["8b-2l", "70b-1l", "0.1b", "3b-4l", "8b-4l", "2b-4l", "70b-2l"]
    others = [name for name in SHAPES if name not in first]
    deep = ["1b", "0.3b", "0.6b", "0.1b-large-batch"]  # long compilations
    both = ("eager", "compiled")
    rows = [Row(name, mode) for name in first for mode in both]
    rows += [Row(name, mode, checkpointed=True) for name in ("8b-4l", "70b-2l") for mode in both]
    rows += [Row("0.1b", "cudagraphs"), Row("8b-2l", "eager", "fused"), Row("70b-1l", "compiled", steady=True)]
    rows += [Row(name, mode) for name in others if name not in deep for mode in both]
    rows += [Row(name) for name in deep]
    rows += [Row(name, checkpointed=True) for name in ("0.1b", "1b", "3b-4l", "8b-2l", "70b-1l")]
    rows += [Row("3b-4l", "compiled", checkpointed=True), Row("8b-2l", "compiled", "compiled")]
    rows += [Row("0.1b", "eager", "plain"), Row("8b-2l", "eager", "plain"), Row("0.1b", "eager", "fused")]
    rows += [Row(name, "compiled") for name in deep]
    rows += [Row("3b-4l", "cudagraphs", "fused"), Row("8b-2l", "cudagraphs"), Row("70b-1l", "compiled", "fused")]
    rows += [Row("8b-4l", steady=True), Row("0.1b", "compiled", "compiled", checkpointed=True)]
    rows += [Row("8b-2l", "compiled", checkpointed=True), Row("70b-1l", "compiled", checkpointed=True)]
    rows += [Row("1b", "compiled", checkpointed=True)]
    return rows


class Process:
    """One row in a process of its own, which waits for `go` before it touches the GPU."""

    def __init__(self, row: Row, number: int, options: argparse.Namespace, folder: Path) -> None:
        self.row = row
        self.result, self.log = folder / f"row{number}.result", folder / f"row{number}.log"
        shape = asdict(TINY if options.tiny else SHAPES[row.shape])
        spec = {
            **asdict(row),
            "shape": shape,
            "name": row.shape,
            "device": options.device,
            "num_steps": 2 if options.tiny else options.steps,
            "steady_s": (0.2 if options.tiny else STEADY_S) if row.steady else 0.0,
            "result": str(self.result),
            "trace": str(folder / "trace.json"),
        }
        path = folder / f"row{number}.json"
        path.write_text(json.dumps(spec))
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "steps_row.py"), str(path)],
            stdin=subprocess.PIPE,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=os.environ | cache,
            start_new_session=True,
        )

    def go(self, limit_s: float) -> dict[str, Any]:
        """Let it measure; the row with what it wrote until it ended, and the error if it failed."""
        began = time.monotonic()
        error = ""
        try:
            self.process.communicate(b"go\n", timeout=limit_s)
        except subprocess.TimeoutExpired:
            error = f"stopped after its limit of {limit_s:.0f} s"
        self.end()
        found: dict[str, Any] = json.loads(self.result.read_text()) if self.result.exists() else {}
        if not error and self.process.returncode:
            error = f"ended with {self.process.returncode}"
        if error and "error" not in found:
            said = self.log.read_text(errors="replace").strip().splitlines() or ["no output"]
            found["error"] = f"{error} after {found.get('stage', 'its start')}: {said[-1][:300]}"
        return {"label": self.row.label, **asdict(self.row), **found, "row_s": time.monotonic() - began}

    def end(self) -> None:
        """End the process and its compile workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Runner:
    """Runs rows one after the other within a time budget, and keeps their results."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.ends = time.monotonic() + options.budget_s
        self.rows: list[dict[str, Any]] = []
        self.ahead: Process | None = None

    def run(self, rows: list[Row]) -> None:
        try:
            for number, row in enumerate(rows):
                self._row(row, number, rows[number + 1 :])
        finally:
            if self.ahead is not None:
                self.ahead.end()

    def _row(self, row: Row, number: int, later: list[Row]) -> None:
        if not self._is_worth_starting(row):
            found = {"label": row.label, **asdict(row), "error": "not run: the budget is spent"}
        else:
            current = self.ahead if self.ahead is not None and self.ahead.row == row else None
            if current is None:
                if self.ahead is not None:
                    self.ahead.end()
                current = Process(row, number, self.options, self.folder)
            following = next((each for each in later if self._is_worth_starting(each)), None)
            self.ahead = None
            if following is not None:
                place = number + 1 + later.index(following)
                self.ahead = Process(following, place, self.options, self.folder)
            left = self.ends - time.monotonic()
            limit_s = min(LIMIT_S[row.mode] + (STEADY_S if row.steady else 0.0), left)
            found = current.go(limit_s)
            if "error" in found:
                self._keep_log(current)
        self.rows.append(found)
        self.write()
        print(line_of(found), flush=True)

    def _is_worth_starting(self, row: Row) -> bool:
        least = 5.0 if self.options.tiny else LEAST_S[row.mode] + (STEADY_S if row.steady else 0.0)
        return self.ends - time.monotonic() >= least

    def _keep_log(self, process: Process) -> None:
        """Append the end of a failed row's output to a log next to the results."""
        if self.options.json:
            with Path(self.options.json).with_suffix(".log").open("a") as file:
                file.write(f"==== {process.row.label}\n{process.log.read_text(errors='replace')[-6000:]}\n")

    def write(self) -> None:
        """Write all results, if a file was given."""
        if self.options.json:
            path = Path(self.options.json)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**about(self.options), "rows": self.rows}, indent=1))


def line_of(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    if "step_ms" not in row:
        return f"{row['label']:44} {' '.join(str(row.get('error', 'nothing was measured')).split())[:160]}"
    parts = [f"{row['label']:44} {row['step_ms']:9.2f} ms", f"issue {row['issue_ms']:8.2f}"]
    if row.get("peak_allocated_bytes"):
        parts.append(f"{row['peak_allocated_bytes'] / 2**30:6.1f} GiB")
    if row.get("kernels"):
        parts.append(f"idle {row['kernels']['idle_us'] / 1e3:7.2f}")
    parts += [f"({row['row_s']:.0f} s)", *([str(row["error"])[:80]] if "error" in row else [])]
    return "  ".join(parts)


def about(options: argparse.Namespace) -> dict[str, Any]:
    """The machine, the versions and the date."""
    is_gpu = options.device == "cuda"
    return {
        "machine": _smi("name") if is_gpu else platform.processor() or platform.machine(),
        "power_limit": _smi("power.limit") if is_gpu else None,
        "max_clock": _smi("clocks.max.sm") if is_gpu else None,
        "driver": _smi("driver_version") if is_gpu else None,
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(sys.argv),
    }


def _smi(field: str) -> str | None:
    """A field of nvidia-smi; this process must not take memory of the GPU."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "-i", "0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", nargs="*", default=["*"], help="patterns such as '8b*:compiled:*'; --list shows all")
    parser.add_argument("--skip", nargs="*", default=[], metavar="FILE", help="skip rows measured in these results")
    parser.add_argument("--list", action="store_true", help="list the rows in their order")
    parser.add_argument("--budget-s", type=float, default=500.0, help="seconds for the whole run")
    parser.add_argument("--steps", type=int, default=10, help="minimum number of timed steps")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and two steps, to try the flow")
    parser.add_argument("--json", help="write everything to this file, after every row")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    measured = [row for file in options.skip for row in json.loads(Path(file).read_text())["rows"]]
    known = {row["label"] for row in measured if "kernels" in row or "out of memory" in row.get("error", "")}
    rows = [row for row in all_rows() if any(fnmatch.fnmatch(row.label, each) for each in options.rows)]
    rows = [row for row in rows if row.label not in known]
    if options.list:
        print("\n".join(row.label for row in rows))
        return
    print(", ".join(f"{key} {value}" for key, value in about(options).items()), flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Runner(options, Path(folder)).run(rows)


if __name__ == "__main__":
    main()
