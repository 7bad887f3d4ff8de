"""One training step, measured in this process: called by `steps.py` with the file that describes the row.

Contract: the process imports everything, then waits for a line on its input. It writes its results after every stage,
so that a row that is stopped keeps what it has. Steps run back to back without synchronisation, as in training.
"""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from train_profile import ON_DEVICE, events_of, length

from weft.frontends.capture import OPTIMIZERS
from weft.zoo import build

TIMED_S = 4.0
"""Seconds of timed steps, if that is more than the minimum number of steps."""
MAX_STEPS = 60
LARGEST = 25
"""Kernels listed by name."""
SMALL = 64
"""Tokens of the batch with which host time is measured: the GPU then never holds the host back."""
CATEGORIES = (
    ("optimizer", ("multi_tensor_apply", "triton_for_")),
    ("triton", ("triton_",)),
    ("attention", ("flash", "fmha", "sdpa", "attention")),
    ("product", ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitkreduce", "gemv")),
    ("copy", ("memcpy", "memset", "copy")),
    ("reduction", ("reduce", "softmax", "nll_loss", "norm", "embedding", "index", "sort", "scan")),
    ("pointwise", ("elementwise", "roll", "fill")),
)
"""Parts of kernel names by category, in lower case; the first match decides."""


def category_of(name: str) -> str:
    """The category of a kernel, by its name."""
    low = name.lower()
    return next((category for category, parts in CATEGORIES if any(part in low for part in parts)), "other")


def kernels_of(events: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Time and number of the kernels by category, the largest by name, and busy and idle time; None without kernels."""
    found = [event for event in events if event.get("cat") in ON_DEVICE]
    if not found:
        return None
    categories: dict[str, list[float]] = {}
    names: dict[str, list[float]] = {}
    for event in found:
        name = str(event["name"])
        kind = "copy" if event["cat"] != "kernel" else category_of(name)
        categories.setdefault(kind, []).append(event["dur"])
        names.setdefault(name, []).append(event["dur"])
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in found]
    window = max(end for _, end in spans) - min(start for start, _ in spans)
    busy = length(spans)
    largest = sorted(names.items(), key=lambda item: (-sum(item[1]), item[0]))[:LARGEST]
    return {
        "num_kernels": len(found),
        "window_us": window,
        "busy_us": busy,
        "idle_us": window - busy,
        "categories": {kind: {"num": len(us), "us": sum(us)} for kind, us in sorted(categories.items())},
        "largest": [{"name": name[:200], "num": len(us), "us": sum(us)} for name, us in largest],
    }


def flops_of(shape: dict[str, int], checkpointed: bool) -> dict[str, int]:
    """Floating-point operations of products and causal attention: of the model, and recomputed ones."""
    tokens = shape["batch"] * shape["sequence"]
    head_dim = shape["dim"] // shape["num_heads"]
    queries, keys = shape["num_heads"] * head_dim, shape["num_kv_heads"] * head_dim
    weights = shape["dim"] * (2 * queries + 2 * keys + 3 * shape["ffn_dim"])
    block = 2 * tokens * weights + 2 * tokens * shape["sequence"] * queries
    forward = shape["num_layers"] * block + 2 * tokens * shape["dim"] * shape["vocabulary"]
    return {"model_flops": 3 * forward, "recomputed_flops": shape["num_layers"] * block if checkpointed else 0}


class Clocks:
    """Clocks and power of the GPU, read by nvidia-smi in the background."""

    FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")

    def __init__(self, device: str) -> None:
        self.samples: list[tuple[float, ...]] = []
        """Time (`time.monotonic`), SM clock in MHz, memory clock in MHz, power in W, temperature in degrees."""
        self.process: subprocess.Popen[str] | None = None
        if device != "cuda":
            return
        command = ["nvidia-smi", f"--query-gpu={','.join(self.FIELDS)}", "--format=csv,noheader,nounits", "-i", "0"]
        try:
            self.process = subprocess.Popen([*command, "-lms", "200"], stdout=subprocess.PIPE, text=True)
        except OSError:
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in (self.process and self.process.stdout) or ():
            try:
                self.samples.append((time.monotonic(), *(float(field) for field in line.split(","))))
            except ValueError:
                continue

    def between(self, start: float, end: float) -> list[list[float]]:
        """The samples of an interval, with times relative to its start."""
        return [[sample[0] - start, *sample[1:]] for sample in list(self.samples) if start <= sample[0] <= end]

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()


class Bench:
    """A model, its optimizer and its batches on a device, and the measurements of its step."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.device = spec, spec["device"]
        shape = dict(spec["shape"])
        batch = shape.pop("batch")
        layers = shape.pop("num_layers")
        torch.manual_seed(0)
        with torch.device(self.device):
            model, make_batch = build(
                "llama-8b", layers=layers, checkpoint="full" if spec["checkpointed"] else "none", **shape
            )
        self.batches = [tuple(each.to(self.device) for each in make_batch(batch, seed)) for seed in range(2)]
        self.model: Callable[..., Tensor] = model
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.optimizer = _optimizer(spec["optimizer"], list(model.parameters()))
        self.update: Callable[[], Any] = self.optimizer.step
        self.is_compiled = spec["mode"] != "eager"
        if self.is_compiled:
            self.model = _compiled(model, spec)
        if spec["optimizer"] == "compiled":
            self.update = _compiled(lambda: self.optimizer.step(), spec | {"mode": "compiled"})
        self.count = 0

    def step(self) -> None:
        """One training step; gradients are freed at its end."""
        self.forward_backward()
        self.update()
        self.optimizer.zero_grad(set_to_none=True)

    def forward_backward(self) -> None:
        if self.spec["mode"] == "cudagraphs":
            torch.compiler.cudagraph_mark_step_begin()
        loss = self.model(*self.batches[self.count % len(self.batches)])
        loss.backward()
        self.count += 1

    def synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, is_done: Callable[[int, float], bool]) -> dict[str, Any]:
        """Steps back to back until `is_done(number, seconds)`: times between events, issue time and wall time."""
        self.synchronise()
        began = time.monotonic()
        marks = [self._mark()]
        while not is_done(len(marks) - 1, time.monotonic() - began):
            self.step()
            marks.append(self._mark())
        issued = time.monotonic()
        self.synchronise()
        ended = time.monotonic()
        number = len(marks) - 1
        steps = [_between_ms(marks[i], marks[i + 1]) for i in range(number)]
        return {
            "step_ms": statistics.median(steps),
            "min_ms": min(steps),
            "max_ms": max(steps),
            "steps_ms": [round(each, 4) for each in steps],
            "issue_ms": (issued - began) * 1e3 / number,
            "wall_ms": (ended - began) * 1e3 / number,
            "interval_s": [began, ended],
        }

    def _mark(self) -> Any:
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def memory(self) -> dict[str, int]:
        """Peaks since the last reset, from the allocator's statistics, and the memory in use on the device."""
        if self.device != "cuda":
            return {}
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        return {
            "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
            "peak_requested_bytes": stats.get("requested_bytes.all.peak", 0),
            "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
            "between_steps_bytes": stats["allocated_bytes.all.current"],
            "num_retries": stats["num_alloc_retries"],
            "device_used_bytes": total - free,
        }

    def phase_peaks(self) -> dict[str, int]:
        """The allocated peaks of forward, backward and the optimizer; of one step with synchronisation between them."""
        if self.device != "cuda":
            return {}
        peaks: dict[str, int] = {}

        def close(name: str) -> None:
            torch.cuda.synchronize()
            peaks[f"{name}_peak_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

        close("before")
        if self.spec["mode"] == "cudagraphs":
            torch.compiler.cudagraph_mark_step_begin()
        loss = self.model(*self.batches[0])
        close("forward")
        peaks["kept_bytes"] = torch.cuda.memory_allocated()
        loss.backward()
        close("backward")
        self.update()
        close("optimizer")
        self.optimizer.zero_grad(set_to_none=True)
        del peaks["before_peak_bytes"]
        return peaks

    def host(self) -> dict[str, Any]:
        """Host time to issue one step from an idle GPU; of eager steps also with few tokens, phase by phase."""
        whole: list[float] = []
        for _ in range(3):
            self.synchronise()
            began = time.perf_counter()
            self.step()
            whole.append((time.perf_counter() - began) * 1e3)
        found: dict[str, Any] = {"host_ms": statistics.median(whole)}
        if self.is_compiled:
            return found
        tokens, targets = (each[:1, :SMALL] for each in self.batches[0])
        phases: list[tuple[float, float, float]] = []
        for _ in range(4):
            self.synchronise()
            times = [time.perf_counter()]
            loss = self.model(tokens, targets)
            times.append(time.perf_counter())
            loss.backward()
            times.append(time.perf_counter())
            self.update()
            self.optimizer.zero_grad(set_to_none=True)
            times.append(time.perf_counter())
            phases.append((times[1] - times[0], times[2] - times[1], times[3] - times[2]))
        for index, name in enumerate(("forward", "backward", "optimizer")):
            found[f"host_small_{name}_ms"] = statistics.median(each[index] for each in phases[1:]) * 1e3
        return found

    def kernels(self) -> dict[str, Any] | None:
        """The kernels of one step under the profiler."""
        if self.device != "cuda":
            return None
        self.synchronise()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.step()
            self.synchronise()
        found.export_chrome_trace(self.spec["trace"])
        return kernels_of(events_of(Path(self.spec["trace"])))


def _optimizer(kind: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if kind == "fused":
        return torch.optim.AdamW(parameters, lr=3e-4, fused=True)
    if kind == "plain" or parameters[0].device.type == "cpu":  # capturable exists on devices only
        return torch.optim.AdamW(parameters, lr=3e-4, foreach=True)
    return OPTIMIZERS["adamw"](parameters)


def _compiled(function: Callable[..., Any], spec: dict[str, Any]) -> Callable[..., Any]:
    """The function compiled by Inductor; on a CPU traced only, so that no C++ compiler is needed."""
    if spec["device"] != "cuda":
        return torch.compile(function, backend="aot_eager", dynamic=False)
    mode = "reduce-overhead" if spec["mode"] == "cudagraphs" else None
    return torch.compile(function, mode=mode, dynamic=False)


def _between_ms(first: Any, second: Any) -> float:
    return (second - first) * 1e3 if isinstance(first, float) else first.elapsed_time(second)


def measure(spec: dict[str, Any], keep: Callable[[str, dict[str, Any]], None]) -> None:
    """All measurements of a row; `keep(stage, results)` is called after each."""
    clocks = Clocks(spec["device"])
    try:
        bench = Bench(spec)
        tokens = spec["shape"]["batch"] * spec["shape"]["sequence"]
        flops = flops_of(spec["shape"], spec["checkpointed"])
        keep("building", {"num_parameters": bench.num_parameters, "tokens": tokens, **flops})
        first = time.monotonic()
        bench.step()
        bench.synchronise()
        keep("the first step", {"first_step_s": time.monotonic() - first})
        warm_up = 1 if spec["num_steps"] < 5 else 4 if spec["mode"] == "cudagraphs" else 3
        warm = bench.timed(lambda number, _s: number >= warm_up)
        number = max(spec["num_steps"], min(MAX_STEPS, int(TIMED_S * 1e3 / max(warm["min_ms"], 1e-3))))
        number = spec["num_steps"] if spec["num_steps"] < 5 else number
        if spec["device"] == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found = bench.timed(lambda done, _s: done >= number)
        found["clocks"] = clocks.between(*found.pop("interval_s"))
        keep("timing", found | bench.memory() | {"graph_breaks": _graph_breaks()})
        if spec["steady_s"]:
            steady = bench.timed(lambda _number, seconds: seconds >= spec["steady_s"])
            steady["clocks"] = clocks.between(*steady.pop("interval_s"))
            keep("the steady state", {"steady": steady})
        keep("host time", bench.host())
        keep("the peaks of phases", bench.phase_peaks())
        keep("the profile", {"kernels": bench.kernels()})
    finally:
        clocks.stop()


def _graph_breaks() -> int:
    counters = importlib.import_module("torch._dynamo.utils").counters
    return sum(counters["graph_break"].values())


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    if spec["mode"] != "eager" or spec["optimizer"] == "compiled":
        importlib.import_module("torch._inductor.compile_fx")  # takes seconds: before its turn on the GPU
    if not sys.stdin.readline():
        return
    results: dict[str, Any] = {"shape_fields": spec["shape"]}
    path = Path(spec["result"])

    def keep(stage: str, found: dict[str, Any]) -> None:
        results.update(found, stage=stage)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(results))
        part.replace(path)
        print(f"done: {stage}", flush=True)

    try:
        measure(spec, keep)
    except torch.OutOfMemoryError as error:
        keep("out of memory", {"error": f"out of memory after {results.get('stage')}: {str(error)[:300]}"})
    except Exception as error:
        traceback.print_exc()
        keep("failing", {"error": f"{type(error).__name__} after {results.get('stage')}: {str(error)[:600]}"})


if __name__ == "__main__":
    main()
