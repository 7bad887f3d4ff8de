"""Training steps on one GPU with 2 and 4 real NCCL ranks: Weft compared with eager, torch's own wrappers and Inductor.

    PYTHONPATH=src python benchmarks/gpu/train.py --budget-s 560 --json results.json [--jobs 'fsdp:2:*' ...]
    PYTHONPATH=src python benchmarks/gpu/train.py --device cpu --ranks 2 --tiny      # the whole flow, without a GPU
    PYTHONPATH=src python benchmarks/gpu/train.py --again results.json [--store]     # predict stored rows anew, no GPU
    PYTHONPATH=src python benchmarks/gpu/train.py --docs results.json [more.json]    # the tables into docs/gpu.md
    PYTHONPATH=src python benchmarks/gpu/train.py --record results.json [more.json]  # the errors for error bars

`--store` keeps the new predictions in the file, next to those of the run; `--docs` and `--record` read them there.

Every job (parallelism:ranks:what) runs in its own processes with a time limit, the most informative jobs first. Its
ranks first measure the cluster that they form. Then come the variants: values against eager, step times by CUDA events,
communication by the profiler, and the simulator's prediction on the measured cluster. The file is written after every
job. MPS, which this script starts anew for each job, lets the ranks' kernels run at the same time.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl
from buckets import connections, mps
from train_again import model_shape, predict_again, record
from train_table import fill, table

HERE = Path(__file__).parent
WORK = {
    "graph": ["graph as captured", "graph naive", "graph planned", "graph auto"],
    "step": ["eager", "torch's own", "inductor", "inductor overlap", "weft_eager", "weft"],
    "cudagraphs": ["inductor cudagraphs", "weft cudagraphs"],
}
"""Variants that run in turn in one group of processes, so that they see the same machine."""
SHAPES = {
    "fsdp": {"num_layers": 6, "dim": 2048, "ffn_dim": 5632, "num_heads": 16, "tokens": 65536},
    "ddp": {"num_layers": 6, "dim": 2048, "ffn_dim": 5632, "num_heads": 16, "tokens": 65536},
    "tp": {"num_layers": 2, "dim": 8192, "ffn_dim": 22016, "num_heads": 64, "tokens": 8192},
    "fsdp-tp": {"num_layers": 3, "dim": 4096, "ffn_dim": 11008, "num_heads": 32, "tokens": 16384},
}
"""Decoders in which communication takes about as long as compute; `tokens` is the total over all ranks."""
TINY = {"num_layers": 1, "dim": 64, "ffn_dim": 128, "num_heads": 4, "tokens": 128}
SEQUENCE, VOCABULARY = 2048, 8192
LOGGED = 6000
"""Characters kept of each rank's output if a job fails."""
LEAST_S = 25
"""Minimum remaining seconds to start a job."""


@dataclass(frozen=True)
class Job:
    """The work of one group of processes."""

    parallel: str
    ranks: int
    what: str
    limit_s: int = 240

    @property
    def label(self) -> str:
        return f"{self.parallel}:{self.ranks}:{self.what}"

    @property
    def all_variants(self) -> list[str]:
        has_own = self.parallel in ("ddp", "fsdp")  # torch's own wrappers; there `auto` is the planner alone
        return [name for name in WORK[self.what] if name != ("graph auto" if has_own else "torch's own")]


def all_jobs(ranks: list[int]) -> list[Job]:
    """All jobs, most informative first: orders of one graph, whole steps, CUDA graphs, then more ranks."""
    found: list[Job] = []
    if 2 in ranks:
        found += [Job(parallel, 2, what) for what in ("graph", "step") for parallel in ("fsdp", "ddp", "tp")]
        found += [Job(parallel, 2, "cudagraphs") for parallel in ("fsdp", "ddp", "tp")]
    if 4 in ranks:
        in_turn = ("fsdp-tp", "fsdp", "ddp", "tp")
        found += [Job(parallel, 4, what) for parallel in in_turn for what in ("graph", "step")]
    return found


class Runner:
    """Runs jobs one after the other within a time budget, and keeps their results."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.ends = time.monotonic() + options.budget_s
        self.rows: list[dict[str, Any]] = []
        self.clusters: dict[str, dict[str, Any]] = {}

    def run(self, jobs: list[Job]) -> None:
        for job in jobs:
            # anew for each job, because a killed process may leave it unusable
            with mps(job.ranks) if self.options.device == "cuda" else nullcontext():
                found = self._processes(job)
            self._finish(job, *found)

    def _finish(self, job: Job, found: list[dict[str, Any]], error: str) -> None:
        by_name = {row["variant"]: row for row in found}
        told = by_name.pop("calibrate", None) or {"error": error or "nothing was written"}
        queues = {"connections": connections(job.ranks)} if self.options.device == "cuda" else {}
        measured = {key: told[key] for key in told if key != "variant"}
        self.clusters[job.label] = {"ranks": job.ranks, **queues, **measured}
        print(f"{job.label}: {told.get('error') or _of_cluster(told)}", flush=True)
        for name in dict.fromkeys([*self._variants(job), *by_name]):
            row = by_name.get(name) or {"variant": name, "error": error or "nothing was written"}
            self.rows.append({"parallel": job.parallel, "ranks": job.ranks, **row})
        self.write()
        if error or any("error" in row for row in found):
            self._keep_logs(job)
        print(f"-- {job.label}{': ' + error.splitlines()[-1][:200] if error else ''}", flush=True)
        print(
            table([row for row in self.rows if (row["parallel"], row["ranks"]) == (job.parallel, job.ranks)]),
            flush=True,
        )

    def _keep_logs(self, job: Job) -> None:
        """Append the ends of the ranks' output to a log next to the results."""
        if not self.options.json:
            return
        with Path(self.options.json).with_suffix(".log").open("a") as file:
            for rank in range(job.ranks):
                log = self.folder / f"{job.label.replace(':', '_')}_rank{rank}.log"
                said = log.read_text(errors="replace")[-LOGGED:] if log.exists() else "not begun"
                file.write(f"==== {job.label} rank {rank}\n{said}\n")

    def _processes(self, job: Job) -> tuple[list[dict[str, Any]], str]:
        """The rows that a job wrote, and why some are missing (empty if none is)."""
        left = self.ends - time.monotonic()
        if left < (5 if self.options.tiny else LEAST_S):
            return [], "not run: the budget is spent"
        limit = min(job.limit_s, left)
        spec = self._spec(job, limit)
        path = self.folder / f"{job.label.replace(':', '_')}.json"
        path.write_text(json.dumps(spec))
        logs = [self.folder / f"{path.stem}_rank{rank}.log" for rank in range(job.ranks)]
        command = [sys.executable, str(HERE / "train_rank.py"), str(path)]
        part = str(
            100 // job.ranks
        )  # share of the GPU for each rank: kernels that take all of it would wait for each other
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": part}
        started = [
            subprocess.Popen(
                [*command, str(rank)],
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
                env=environment | {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / f"inductor{rank}")},
                start_new_session=True,
            )
            for rank, log in enumerate(logs)
        ]
        error = _wait(started, time.monotonic() + limit)
        if error:
            error = f"{error}: {_last_line(logs)}"
        rows = Path(spec["rows"])
        return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else [], error

    def _spec(self, job: Job, limit_s: float) -> dict[str, Any]:
        options = self.options
        shape = dict(TINY if options.tiny else SHAPES[job.parallel])
        shape |= {key: value for key in shape if (value := getattr(options, key, None)) is not None}
        vocabulary = 256 if options.tiny else VOCABULARY
        shape = model_shape(job.parallel, job.ranks, shape, 32 if options.tiny else SEQUENCE, vocabulary)
        return {
            "parallel": job.parallel,
            "ranks": job.ranks,
            "variants": self._variants(job),
            "traces": options.traces,
            "device": options.device,
            "tiny": options.tiny,
            "batch": shape.pop("batch"),
            "shape": shape,
            "reduce": options.reduce,
            "steps": options.steps,
            "warm_up": 1 if options.tiny else 3,
            "folder": str(self.folder),
            "cluster": str(self.folder / f"{job.label.replace(':', '_')}.toml"),
            "rows": str(self.folder / f"{job.label.replace(':', '_')}.rows"),
            "port": _free_port(),
            "limit_s": limit_s,
        }

    def _variants(self, job: Job) -> list[str]:
        return [name for name in job.all_variants if any(fnmatch.fnmatch(name, each) for each in self.options.variants)]

    def write(self) -> None:
        """Write all results, if a file was given."""
        if self.options.json:
            found = {**about(self.options), "clusters": self.clusters, "rows": self.rows}
            Path(self.options.json).parent.mkdir(parents=True, exist_ok=True)
            Path(self.options.json).write_text(json.dumps(found, indent=1))


def about(options: argparse.Namespace) -> dict[str, Any]:
    """The machine, the versions and the date."""
    is_gpu = options.device == "cuda"
    return {
        "machine": torch.cuda.get_device_name(0) if is_gpu else platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_gpu else None,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "mps": is_gpu and shutil.which("nvidia-cuda-mps-control") is not None,
        "reduce": options.reduce,
        "shapes": {"all": TINY} if options.tiny else SHAPES,
        "sequence": 32 if options.tiny else SEQUENCE,
        "vocabulary": 256 if options.tiny else VOCABULARY,
        "command": " ".join(sys.argv),
    }


def _of_cluster(told: dict[str, Any]) -> str:
    shown = {key: told.get(key) for key in ("rates", "overlap_slowdown", "collective_slowdown")}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _wait(started: list[subprocess.Popen[bytes]], until: float) -> str:
    """Wait for all processes; return the error, empty if none. A failure or the time limit ends the others."""
    error = ""
    while any(process.poll() is None for process in started):
        failed = next((process for process in started if process.poll() not in (None, 0)), None)
        if failed is not None or time.monotonic() > until:
            error = "the time limit was reached" if failed is None else f"a rank ended with {failed.returncode}"
            time.sleep(2 if failed is not None else 0)  # the others may report the cause
            break
        time.sleep(0.2)
    for process in started:  # all at once: a rank left alone would fail for another reason
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in started:
        process.wait()
    return error or next((f"a rank ended with {p.returncode}" for p in started if p.returncode), "")


def _last_line(logs: list[Path]) -> str:
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line or "error" in line]
    return (told or lines or ["no output"])[-1].strip()[:300]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, nargs="*", choices=(2, 4), default=[2, 4])
    parser.add_argument("--jobs", nargs="*", default=["*"], help="patterns such as 'fsdp:2:*'; --list shows all")
    parser.add_argument("--variants", nargs="*", default=["*"], help="patterns such as 'weft*'; --list shows all")
    parser.add_argument("--traces", metavar="FOLDER", help="keep the profile of each variant's step on rank 0 there")
    parser.add_argument("--list", action="store_true", help="list the jobs in their order")
    parser.add_argument("--budget-s", type=float, default=560.0, help="seconds for the whole run")
    parser.add_argument("--steps", type=int, default=8, help="timed steps in a round")
    parser.add_argument("--reduce", choices=("f32", "bf16"), default="f32", help="dtype in which gradients are summed")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and two steps, to try the flow")
    for name in ("num-layers", "dim", "ffn-dim", "num-heads", "tokens"):
        parser.add_argument(f"--{name}", type=int, help="of the model; default depends on the parallelism")
    parser.add_argument("--json", help="write everything to this file, after every row")
    parser.add_argument("--docs", metavar="FILE", nargs="+", help="write docs/gpu.md from files of results and exit")
    parser.add_argument("--again", metavar="FILE", help="predict the rows of a file of results again and exit")
    parser.add_argument("--store", action="store_true", help="keep what --again predicts in its file")
    parser.add_argument("--record", metavar="FILE", nargs="+", help="write errors for error bars and exit")
    options = parser.parse_args(arguments)
    options.steps = min(options.steps, 2) if options.tiny else options.steps
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.docs:
        fill([Path(file) for file in options.docs], HERE.parents[1] / "docs" / "gpu.md")
        return
    if options.record:
        record((Path(file).stem, json.loads(Path(file).read_text())) for file in options.record)
        return
    if options.again:
        found = json.loads(Path(options.again).read_text())
        predict_again(found, options.jobs)
        if options.store:
            Path(options.again).write_text(json.dumps(found, indent=1))
        return
    jobs = [job for job in all_jobs(options.ranks) if any(fnmatch.fnmatch(job.label, each) for each in options.jobs)]
    if options.list:
        print("\n".join(f"{job.label:22} {', '.join(job.all_variants)}" for job in jobs))
        return
    print(", ".join(f"{key} {value}" for key, value in about(options).items() if key != "shapes"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(options, Path(folder))
        runner.run(jobs)
        print(table(runner.rows))


if __name__ == "__main__":
    main()
