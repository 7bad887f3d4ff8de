"""Profile of one rank's step: exposed communication, gaps between kernels, and the time of each node.

Contract: times in microseconds. NCCL kernels are communication; every other kernel, copy and fill on the device is
compute. Copies to and from host memory are neither. A trace without kernels (on a CPU) gives None.
"""

from __future__ import annotations

import gzip
import json
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.profiler import ProfilerActivity, profile, record_function

Interval = tuple[float, float]
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
MAX_GAP_US = 20.0
"""Longest gap between two kernels of a stream, in microseconds; anything longer is a wait."""
NODE = "node:"


def record(work: Callable[[], Any], path: Path, *, device: str, shapes: bool = False) -> Path:
    """Run a function under the profiler and write its Chrome trace."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, record_shapes=shapes) as found:
        work()
        if device == "cuda":
            torch.cuda.synchronize()
    found.export_chrome_trace(str(path))
    return path


def events_of(path: Path) -> list[dict[str, Any]]:
    """The complete events of a trace."""
    content = path.read_bytes()
    found = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    return [event for event in found if event.get("ph") == "X" and "dur" in event]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint intervals in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union(intervals))


def exposed_us(communication: Sequence[Interval], compute: Sequence[Interval]) -> float:
    """Time during which communication runs and compute does not."""
    return length([*communication, *compute]) - length(compute)


def communication_of(events: Iterable[dict[str, Any]]) -> dict[str, float] | None:
    """Communication, its exposed part, and compute; None if the trace has no kernels."""
    kernels = [event for event in events if event.get("cat") in ON_DEVICE and not is_host_copy(event)]
    if not kernels:
        return None
    sides: dict[bool, list[Interval]] = {True: [], False: []}
    for event in kernels:
        sides[is_communication(event)].append((event["ts"], event["ts"] + event["dur"]))
    return {
        "communication_us": length(sides[True]),
        "exposed_us": exposed_us(sides[True], sides[False]),
        "compute_us": length(sides[False]),
    }


def host_copies_of(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Time of copies to and from host memory, and the part of it during which a kernel runs."""
    on_device = [event for event in events if event.get("cat") in ON_DEVICE]
    spans = {
        is_copy: [(event["ts"], event["ts"] + event["dur"]) for event in on_device if is_host_copy(event) == is_copy]
        for is_copy in (True, False)
    }
    total = length(spans[True])
    return {"host_copies_us": total, "host_copies_beside_us": total - exposed_us(spans[True], spans[False])}


def is_communication(event: dict[str, Any]) -> bool:
    return str(event.get("name", "")).lower().startswith("nccl")


def is_host_copy(event: dict[str, Any]) -> bool:
    return any(direction in str(event.get("name", "")) for direction in ("DtoH", "HtoD"))


def gap_us(events: Iterable[dict[str, Any]]) -> float | None:
    """The median gap between consecutive kernels of a stream; None without gaps."""
    streams: dict[Any, list[Interval]] = {}
    for event in events:
        if event.get("cat") == "kernel" and not is_communication(event):
            streams.setdefault(event.get("tid"), []).append((event["ts"], event["ts"] + event["dur"]))
    gaps: list[float] = []
    for found in streams.values():
        found.sort()
        gaps += [late[0] - early[1] for early, late in pairwise(found)]
    near = [gap for gap in gaps if 0 <= gap <= MAX_GAP_US]
    return statistics.median(near) if near else None


class _Named(Interpreter):
    """Runs a graph with a mark around every node."""

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        with record_function(NODE + n.name):
            return super().run_node(n)


def node_times(module: GraphModule, inputs: Sequence[Any], path: Path, device: str) -> dict[str, float]:
    """Device time of each compute node (operator time on a CPU); the best of two runs."""
    runner = _Named(module)
    runner.run(*inputs)
    times: dict[str, float] = {}
    for _ in range(2):
        record(lambda: runner.run(*inputs), path, device=device)
        for name, us in marked(events_of(path), device).items():
            times[name] = min(us, times.get(name, us))
    return times


def marked(events: Sequence[dict[str, Any]], device: str) -> dict[str, float]:
    """Times by node: kernels, copies and fills inside its marks, without communication; on a CPU, the marks.

    Marks of one lane do not overlap. A kernel belongs to the mark in which it begins.
    """
    kind = "gpu_user_annotation" if device == "cuda" else "user_annotation"
    marks = [event for event in events if event.get("cat") == kind and str(event.get("name", "")).startswith(NODE)]
    times: dict[str, float] = {}
    if device != "cuda":
        for mark in marks:
            name = mark["name"].removeprefix(NODE)
            times[name] = times.get(name, 0.0) + mark["dur"]
        return times
    lanes: dict[Any, list[dict[str, Any]]] = {}
    for mark in sorted(marks, key=lambda mark: mark["ts"]):
        lanes.setdefault(mark.get("tid"), []).append(mark)
    for event in events:
        if event.get("cat") in ON_DEVICE and not is_communication(event):
            lane = lanes.get(event.get("tid"), [])
            place = bisect_right(lane, event["ts"], key=lambda mark: mark["ts"]) - 1
            if place >= 0 and event["ts"] < lane[place]["ts"] + lane[place]["dur"]:
                name = lane[place]["name"].removeprefix(NODE)
                times[name] = times.get(name, 0.0) + event["dur"]
    return times
