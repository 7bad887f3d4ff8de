"""Weft compared with PyTorch Inductor's own passes: same captured graphs, one simulator, one run, one page.

    python benchmarks/bench.py [--full] [--only fsdp,rewrites] [--jobs 2] [--json FILE] [--resume] [--plots FOLDER]
    python benchmarks/bench.py --docs benchmarks/results/bench-DATE.json

Steps of the zoo, by parallelism and ranks: as captured, naive, each variant of the peer (`peer.py`, on Weft's prices;
once for each parallelism on its own estimates, too), Weft's planner alone (the peer's moves: order and merging), and
Weft as `auto` leaves the graph. The bound holds for the captured graph. Every step has 16 layers; one step of each
parallelism also has 32 and is timed, because pass time does not depend on the number of ranks. Then rewrites
(`rewrites.py`), merging (`bucketing.py`) and the graph layer (`backbone.py`). A pass of less than two seconds is timed
three times. In timed steps the whole of `weft.optimize` is timed as well, then its report and plan, once each. `--full`
adds 64 and 128 layers, larger graphs, and medians of all times.

One process does each task, all contestants in turn; `--jobs` processes run at the same time. Seconds are processor
time. `--resume` continues an interrupted run. `--docs` writes the page of a run into docs/benchmarks.md, with its
pictures.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import backbone
import bench_plot
import bench_table
import bucketing
import peer
import rewrites
import torch
from planner import NAIVE, Contestant, Result, judge, program_of, run_peer, run_weft, synthetic
from scenarios import HERE, SCENARIOS, capture
from torch.fx import GraphModule

import weft
from weft.bounds.lower_bound import lower_bound

ROOT = HERE.parent
TIMED = ("ddp-x8-nvlink", "tp-x8-nvlink", "fsdp-x8-nvlink", "hsdp-x64", "moe-x64", "fsdp-x64-tp-x8")
"""One scenario of each parallelism, short ones first."""
OTHERS = (
    "ddp-x64-ib",
    "ddp-x512-ib",
    "fsdp-x64-ib",
    "fsdp-x512-ib",
    "fsdp-x8-tp-x8",
    "hsdp-x512",
    "moe-x8",
    "moe-x512",
)
OFTEN = ("weft planner", "weft auto", *(f"inductor {name}" for name in ("overlap", "overlap + pre-bucketing")))
"""Contestants that are timed more than once; only these run with more than 32 layers."""
ON_ITS_OWN = "inductor default, own estimates"
"""Takes by far the longest, and uses its own prices: run only in timed steps of 16 layers."""
LATE = "inductor overlap + bucketing"
"""Bucketing after ordering: fails whenever `overlap + pre-bucketing` does, takes long, and is hardly ever the best; run
only in timed steps."""
WHOLE = ("schedule-overlap", "auto")
"""The pipelines of the whole call that is timed."""
REPEATS = 3
LONG_S = 2.0
"""Passes that take longer are timed once, without `--full`."""


@dataclass(frozen=True)
class Task:
    """One unit of work: its section and name, and the call that does it."""

    section: str
    name: str
    work: Callable[..., Any]
    arguments: tuple[Any, ...]


def say(text: str) -> None:
    print(text, flush=True)


@functools.cache
def warm_up() -> None:
    """Load modules before timing, so that no pass pays for it."""
    torch.set_num_threads(1)
    cluster, module = SCENARIOS[TIMED[0]].cluster(), synthetic(100)
    for work in contestants_of("fsdp", cluster).values():
        work([module])


def contestants_of(parallel: str, cluster: weft.Cluster) -> dict[str, Contestant]:
    found = {name: run_weft(spec, cluster, "default", None) for name, spec in NAIVE.items()}
    found["weft planner"] = run_weft("schedule-overlap", cluster, "default", None)
    found |= {f"inductor {name}": run_peer(name, cluster) for name in peer.variants_for(parallel)}
    found["weft auto"] = run_weft("auto", cluster, "default", None)
    return found


def step(name: str, layers: int, repeats: int, long_s: float) -> dict[str, Any]:
    """All contestants on one step, in turn."""
    warm_up()
    scenario, place = SCENARIOS[name], f"{name}, {layers} layers"
    start = time.process_time()
    module = capture(scenario, layers)
    say(f"  {place}: {len(module.graph.nodes)} nodes, captured or read in {time.process_time() - start:.1f} s")
    cluster = scenario.cluster()
    bound = lower_bound(program_of([module], cluster))
    bound_ms = bound.bound_ns / 1e6
    captured, peak_bytes = judge([module], cluster, bound_ms, None)
    results = {"no pass": captured}
    contestants = contestants_of(scenario.parallel, cluster)
    if layers > 16 or name not in TIMED:
        del contestants[ON_ITS_OWN]
    if name not in TIMED:
        del contestants[LATE]
    if layers > 32:
        contestants = {key: work for key, work in contestants.items() if key in OFTEN}
    for turn in range(repeats):
        for key, work in contestants.items():
            if turn and (key not in OFTEN or results[key].seconds[0] > long_s):
                continue
            made, seconds, error = work([module])
            if key not in results:
                results[key] = Result(error=error) if made is None else judge(made, cluster, bound_ms, peak_bytes)[0]
                say(f"  {place}: {key:32} {seconds:6.1f} s  {results[key].cell()}")
            results[key].seconds.append(seconds)
    return {
        "scenario": name,
        "parallel": scenario.parallel,
        "mesh": dict(scenario.mesh),
        "layers": layers,
        "timed": name in TIMED,
        "nodes": len(module.graph.nodes),
        "bound_ms": bound_ms,
        "bound": bound.name,
        "results": {key: asdict(result) for key, result in results.items()},
        "whole": whole_call(module, cluster) if name in TIMED else {},
    }


def whole_call(module: GraphModule, cluster: weft.Cluster) -> dict[str, dict[str, float]]:
    """Seconds of `weft.optimize`, and of the evidence that its report and plan add, for the planner and for `auto`."""
    found: dict[str, dict[str, float]] = {}
    for pipeline in WHOLE:
        gc.collect()
        start = time.process_time()
        result = weft.optimize(module, cluster, pipeline=pipeline, cache=False)
        returned = time.process_time()
        result.plan.to_json()
        str(result.report)
        found[pipeline] = {"call_s": returned - start, "evidence_s": time.process_time() - returned}
    return found


def rewrite(parallel: str, layers: int, repeats: int) -> dict[str, Any]:
    warm_up()
    return rewrites.compare(f"{parallel}, {layers} layers", rewrites.step(layers, parallel), repeats)


def merging(gathers: Sequence[int], layers: Sequence[int], sizes: list[int], repeats: int) -> dict[str, Any]:
    warm_up()
    return bucketing.measure(gathers, layers, sizes, repeats)


def tasks_of(full: bool) -> list[Task]:
    """All tasks, long ones first; graphs that several tasks need are captured before."""
    long_s = float("inf") if full else LONG_S
    more = [64, 128] if full else []
    repeats = REPEATS if full else 1
    found = [
        Task("steps", f"{name}, {layers} layers", step, (name, layers, REPEATS, long_s))
        for layers in (*reversed(more), 32, 16)
        for name in reversed(TIMED)
    ]
    found += [Task("steps", f"{name}, 16 layers", step, (name, 16, 1, long_s)) for name in OTHERS]
    gathers, sizes = (
        ([250, 500, 1000], [1250, 2500, 5000, 10_000, 20_000]) if full else ([250, 1000], [1250, 2500, 5000])
    )
    found.append(Task("merging", "merging", merging, (gathers, [16, 32, *more[:1]], sizes, repeats)))
    found.append(Task("graph", "graph layer", measure_graphs, ([200, 1000, 2000] if full else [100, 500],)))
    found += [
        Task("rewrites", f"rewrites, {parallel}, {layers} layers", rewrite, (parallel, layers, repeats))
        for layers in (16, 32)
        for parallel in rewrites.STEPS
    ]
    return found


def measure_graphs(collectives: Sequence[int]) -> list[dict[str, Any]]:
    warm_up()
    return [backbone.measure(count) for count in collectives]


def run(tasks: Sequence[Task], jobs: int) -> Iterator[tuple[Task, Any, str]]:
    """Yield each task when it ends, with its outcome or its error."""
    start = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(task.work, *task.arguments): task for task in tasks}
        for number, future in enumerate(as_completed(waiting), start=1):
            task, error = waiting[future], future.exception()
            wrong = f"{type(error).__name__}: {error}" if error else ""
            say(f"[{time.perf_counter() - start:4.0f} s] {number} of {len(tasks)}: {task.name} {wrong}".rstrip())
            yield task, None if error else future.result(), wrong


def machine() -> str:
    cpus = Path("/proc/cpuinfo")
    names = [line.partition(": ")[2] for line in cpus.read_text().splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"


def commit() -> str:
    """The commit that is measured, with `+` if files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def selected(tasks: Sequence[Task], only: str) -> list[Task]:
    words = [word for word in only.split(",") if word]
    return [task for task in tasks if not words or any(word in f"{task.section} {task.name}" for word in words)]


def begin() -> dict[str, Any]:
    """The header of the figures: machine and versions."""
    versions = {"weft": importlib.metadata.version("weft"), "torch": str(torch.__version__)}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "note": "",
        "versions": versions | {"python": platform.python_version()},
        "machine": machine(),
        "wall_s": 0.0,
        "processor_s": 0.0,
        **{section: {} for section in ("steps", "rewrites", "merging", "graph", "failed")},
    }


def measure(options: argparse.Namespace) -> int:
    tasks = selected(tasks_of(options.full), options.only)
    if not tasks:
        sys.exit(f"--only {options.only}: nothing is called so; --list tells what there is")
    found = json.loads(options.json.read_text()) if options.resume else begin()
    found |= {"jobs": options.jobs, "full": options.full, "note": options.note, "failed": {}}
    before = found["wall_s"], found["processor_s"]
    start = time.perf_counter()

    def keep() -> None:
        found["wall_s"] = before[0] + time.perf_counter() - start
        found["processor_s"] = before[1] + processor_s()
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")

    for task, outcome, wrong in run([task for task in tasks if task.name not in found[task.section]], options.jobs):
        found["failed" if wrong else task.section][task.name] = wrong or outcome
        keep()  # an interrupted run keeps its results
    keep()
    drawn = draw(found, options.plots)
    say("\n" + bench_table.page(found) + "\n\n" + "\n".join(f"wrote {path}" for path in (options.json, *drawn)))
    return 1 if found["failed"] else 0


def processor_s() -> float:
    """Processor time of this process and of its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def draw(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"bench-steps.svg": bench_plot.steps(found), "bench-seconds.svg": bench_plot.seconds(found)}
    for name, text in pictures.items():
        (folder / name).write_text(text)
    return [folder / name for name in pictures]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="add 64 and 128 layers, and take medians of all times")
    parser.add_argument("--only", default="", help="comma-separated words; run the tasks whose names contain one")
    parser.add_argument("--list", action="store_true", help="list all tasks and exit")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="number of parallel processes")
    parser.add_argument(
        "--json", type=Path, default=ROOT / ".benchmarks" / "bench.json", help="output file for the figures"
    )
    parser.add_argument("--resume", action="store_true", help="continue with the figures in that file")
    parser.add_argument("--note", default="", help="a remark on this run, such as other load on the machine")
    parser.add_argument("--plots", type=Path, default=ROOT / ".benchmarks", help="folder for the pictures")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write these figures into the docs and exit")
    options = parser.parse_args()
    if options.list:
        say("\n".join(f"{task.section:10} {task.name}" for task in tasks_of(options.full)))
    elif options.docs:
        found = json.loads(options.docs.read_text())
        bench_table.fill(ROOT / "docs" / "benchmarks.md", bench_table.page(found))
        draw(found, ROOT / "docs" / "images")
    else:
        sys.exit(measure(options))


if __name__ == "__main__":
    main()
