"""Read a training step of one rank from a Chrome trace of torch.profiler: its collectives, and its exposed time.

The compute stream is the stream with the most compute. It stalls between two of its kernels. A stall begins when the
stream is idle and the host has issued the next kernel; until then the host was late, and the idle time is the host's.
The stream waited for the collectives that end during a stall: the stall up to such an end is exposed time. The rest of
a stall is a launch gap.

Traces without a device, such as those of gloo on processors, show operators instead of kernels. The thread that
launches is the compute stream there, and it stalls in its waits.

Contract: nothing is executed. Malformed collectives are faults; other malformed events are ignored.
"""

from __future__ import annotations

import re
import zlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import isfinite, prod
from pathlib import Path
from typing import Any, cast

from weft.cost.calibration.chrome_trace import (
    ITEM_BYTES,
    NAME,
    TracedCollective,
    axis_named,
    cause_of,
    groups_of,
    is_nccl,
    read_collective,
    read_events,
)
from weft.cost.calibration.samples import MAX_MESSAGE_BYTES, MAX_RANKS, MeasurementError, kind_named
from weft.graph.ops import Kind

STEP = re.compile(r"ProfilerStep#([0-9]{1,9})", re.ASCII)
FUNCTIONAL, EAGER = "_c10d_functional::", "c10d::"
"""Namespaces of the operators that launch and wait."""
GLOO = "gloo:"
"""Begins the name of a collective that gloo runs."""
ON_DEVICE = ("gpu_memcpy", "gpu_memset")
ON_HOST = ("cuda_runtime", "cuda_driver")
MAX_TS_US = 1e15
"""Largest time of an event that is read: nanoseconds then fit into 64 bits."""
NS_PER_US = 1000
Interval = tuple[int, int]
EVERYTHING: Interval = (-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class TracedGroup:
    """A process group of a trace."""

    name: str
    """The run-time name; empty if the trace does not name the groups of its collectives."""
    num_ranks: int = 0
    """0 if unknown."""
    ranks: tuple[int, ...] = ()
    axis: str = ""


@dataclass(frozen=True)
class MeasuredCollective:
    """One collective of a step. Times count from the start of the step."""

    kind: Kind
    group: str
    """The run-time name; empty if the trace does not say."""
    num_bytes: int | None
    """Size of the full tensor; None if the trace does not say."""
    launched_ns: int | None
    """When the host launched it; None if the trace does not say. May be before the step's first kernel."""
    start_ns: int
    end_ns: int | None
    """None if the trace does not say."""
    exposed_ns: int = 0
    """How long the compute stream waited for it."""


@dataclass(frozen=True)
class MeasuredStep:
    """One step of one rank."""

    path: str
    rank: int | None
    number: int | None
    """Of its mark `ProfilerStep#`; None if the trace has no marks."""
    step_ns: int
    """From the start of its first kernel to the end of its last one."""
    compute_ns: int
    """How long the compute stream was busy."""
    host_late_ns: int
    """How long the compute stream was idle because the host had not issued the next kernel."""
    collectives: tuple[MeasuredCollective, ...]
    """In launch order, as far as the trace shows it."""
    groups: tuple[TracedGroup, ...]
    notes: tuple[str, ...] = ()

    @property
    def exposed_ns(self) -> int:
        return sum(each.exposed_ns for each in self.collectives)


class StepTrace:
    """One rank's trace. Its steps are told apart by the marks `ProfilerStep#` that `torch.profiler.schedule` makes."""

    def __init__(self, path: str, reader: _StepReader, info: Mapping[str, Any]) -> None:
        self._path, self._reader, self._info = path, reader, info
        self.numbers = reader.numbers()
        """The marked steps that have collectives, in order; empty if the trace has no marks."""

    def step(self, number: int | None = None) -> MeasuredStep:
        """One step: the last by default, or the whole trace if it has no marks."""
        number = self.numbers[-1] if number is None and self.numbers else number
        return self._reader.step(self._path, number, self._info)


def read_step_trace(path: str | Path) -> StepTrace:
    """The steps of one rank's trace, JSON or gzip."""
    path = Path(path)
    reader = _StepReader()
    try:
        info = read_events(path, reader.add, reader.faults)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise _fault([f"{path}: it cannot be read: {cause_of(error)}"]) from None
    if reader.faults:
        raise _fault(f"{path}:{line}: {what}" for line, what in reader.faults)
    found = StepTrace(str(path), reader, cast(dict[str, Any], info) if isinstance(info, dict) else {})
    if reader.marks and not found.numbers:
        raise _fault([f"{path}: no collective was launched inside its {len(reader.marks)} marks ProfilerStep#"])
    if not reader.collectives and not reader.operators:
        skipped = ", ".join(f"{count} {what}" for what, count in sorted(reader.skipped.items()))
        what = "none of its events is a kernel or an operator of a collective"
        raise _fault([f"{path}: {what}" + (f" ({skipped})" if skipped else "")])
    return found


def _fault(faults: Iterable[str]) -> MeasurementError:
    return MeasurementError(faults, "compare", "the trace cannot be used")


def attribute_stalls(stalls: Sequence[Interval], spans: Sequence[Interval]) -> list[int]:
    """How long the compute stream waited for each collective, by when it stalls and when each collective runs.

    The part of a stall during which collectives run is divided among those that end in it, in order of their ends. No
    time counts twice, and the part after the last end belongs to no collective. Stalls are in order and do not overlap.
    """
    running = _Union(spans)
    order = sorted(range(len(spans)), key=lambda i: (spans[i][1], i))
    ends = [spans[i][1] for i in order]
    found = [0] * len(spans)
    for start, end in stalls:
        k = bisect_right(ends, start)
        while k < len(order) and ends[k] <= end:
            found[order[k]] += running.length_to(ends[k]) - running.length_to(start)
            start, k = ends[k], k + 1
    return found


class _Union:
    """The union of intervals."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self.parts: list[Interval] = []
        for start, end in sorted(intervals):
            if self.parts and start <= self.parts[-1][1]:
                self.parts[-1] = self.parts[-1][0], max(self.parts[-1][1], end)
            else:
                self.parts.append((start, end))
        self._starts = [start for start, _ in self.parts]
        self._lengths = [0, *accumulate(end - start for start, end in self.parts)]

    def length_to(self, time: int) -> int:
        """The length of the part before a time."""
        k = bisect_right(self._starts, time)
        return self._lengths[k] - max(self.parts[k - 1][1] - time, 0) if k else 0

    @property
    def length(self) -> int:
        return self._lengths[-1]


@dataclass(frozen=True)
class _Work:
    """One kernel, copy or fill on the device."""

    start_ns: int
    end_ns: int
    stream: Any
    correlation: int | None


@dataclass(frozen=True)
class _Operator:
    """An operator on the host that launches a collective or waits."""

    thread: Any
    start_ns: int
    end_ns: int
    kind: Kind | None
    """None for a wait."""
    num_bytes: int | None


class _StepReader:
    """Collects the events of one trace."""

    def __init__(self) -> None:
        self.faults: list[tuple[int, str]] = []
        self.skipped: Counter[str] = Counter()
        self.marks: dict[int, Interval] = {}
        self.compute: list[_Work] = []
        self.collectives: list[tuple[_Work, TracedCollective | Kind]] = []
        self.issued: dict[int, int] = {}
        """When the host issued a kernel, by correlation."""
        self.operators: list[_Operator] = []
        self.host_compute: dict[Any, array[int]] = {}
        """Starts and ends of the other operators, by thread."""
        self.on_wire: list[Interval] = []
        """Collectives that gloo ran."""

    def add(self, line: int, event: dict[str, Any]) -> None:
        category, name = event.get("cat"), event.get("name")
        if not isinstance(category, str) or not isinstance(name, str):
            return
        if category == "kernel" and (is_nccl(event) or NAME in _args(event)):
            self._add_collective(line, event)
            return
        span = _span(event)
        if span is None:
            return
        if category == "kernel" or category in ON_DEVICE:
            self.compute.append(_work(event, span))
        elif category in ON_HOST:
            correlation = _whole(_args(event).get("correlation"))
            if correlation is not None:
                self.issued[correlation] = span[0]
        elif category == "cpu_op":
            self._add_operator(event, name, span)
        elif category == "user_annotation" and name.startswith(GLOO):
            self.on_wire.append(span)
        elif category == "user_annotation" and (mark := STEP.fullmatch(name)):
            self.marks[int(mark[1])] = span

    def _add_collective(self, line: int, event: dict[str, Any]) -> None:
        name, span = str(event["name"]), _span(event)
        if span is None:
            self.faults.append((line, f"{name[:60]!r}: ts and dur: expected times in microseconds"))
            return
        found = read_collective(event) if NAME in _args(event) else kind_named(name.partition("(")[0])
        if isinstance(found, TracedCollective | Kind):
            self.collectives.append((_work(event, span), found))
        elif found is None or isinstance(found, str):
            self.skipped[found or "NCCL kernels that do not say what they do"] += 1
        else:
            self.faults += ((line, fault) for fault in found)

    def _add_operator(self, event: Mapping[str, Any], name: str, span: Interval) -> None:
        thread = event.get("tid") if isinstance(event.get("tid"), int | str) else None
        namespace, _, operator = name.rpartition("::")
        if f"{namespace}::" not in (FUNCTIONAL, EAGER):
            self.host_compute.setdefault(thread, array("q")).extend(span)
            return
        is_wait = operator.startswith("wait_tensor")
        kind = kind_named(operator)
        if is_wait or kind is not None:
            num_bytes = None if kind is None or namespace + "::" == EAGER else _operand_bytes(kind, _args(event))
            self.operators.append(_Operator(thread, *span, kind, num_bytes))

    @property
    def is_on_device(self) -> bool:
        return bool(self.compute or self.collectives)

    def numbers(self) -> tuple[int, ...]:
        """The marks with collectives."""
        marks = sorted((start, end, number) for number, (start, end) in self.marks.items())
        starts = [start for start, _, _ in marks]
        found: set[int] = set()
        launches = (each.start_ns for each in self.operators if each.kind is not None)
        for time in (self._issued(work) for work, _ in self.collectives) if self.is_on_device else launches:
            k = bisect_right(starts, time) - 1
            if k >= 0 and time < marks[k][1]:
                found.add(marks[k][2])
        return tuple(sorted(found))

    def step(self, path: str, number: int | None, info: Mapping[str, Any]) -> MeasuredStep:
        """One marked step, or the whole trace."""
        window = EVERYTHING if number is None else self.marks[number]
        step = self._device_step(window) if self.is_on_device else self._host_step(window, info)
        groups = self._groups(info) if self.is_on_device else _host_groups(info)
        left_out = tuple(f"left out: {count} {what}" for what, count in sorted(self.skipped.items()))
        rank, notes = _whole(info.get("rank")), left_out + step.notes
        return replace(step, path=path, rank=rank, number=number, groups=groups, notes=notes)

    def _groups(self, info: Mapping[str, Any]) -> tuple[TracedGroup, ...]:
        known = groups_of(info.get("pg_config"))
        found: dict[str, TracedGroup] = {}
        for _, traced in self.collectives:
            if isinstance(traced, TracedCollective):
                ranks = traced.ranks or known.get(traced.group, ())
                ranks = ranks if len(ranks) == traced.num_ranks else ()
                found.setdefault(traced.group, TracedGroup(traced.group, traced.num_ranks, ranks, traced.axis))
        return tuple(found.values())

    def _device_step(self, window: Interval) -> MeasuredStep:
        streams: Counter[Any] = Counter()
        work = [each for each in self.compute if self._is_inside(each, window)]
        for each in work:
            streams[each.stream] += each.end_ns - each.start_ns
        main = max(streams, key=lambda stream: (streams[stream], str(stream)), default=None)
        kernels = [(each, traced) for each, traced in self.collectives if self._is_inside(each, window)]
        everything = [*work, *(each for each, _ in kernels)]
        begin = min((each.start_ns for each in everything), default=0)
        end = max((each.end_ns for each in everything), default=0)
        on_main = sorted((e for e in work if e.stream == main), key=lambda each: (each.start_ns, each.end_ns))
        busy_ns, late_ns, stalls = self._stalls(on_main, begin, end)
        exposed = attribute_stalls(stalls, [(each.start_ns, each.end_ns) for each, _ in kernels])
        collectives = [
            self._measured(each, traced, begin, ns) for (each, traced), ns in zip(kernels, exposed, strict=True)
        ]
        notes: list[str] = []
        if unsized := sum(each.num_bytes is None for each in collectives):
            notes.append(
                f"{unsized} NCCL kernels do not state their size and group: CUDA graphs and coalesced calls leave them "
                "out, and so do old versions of torch; they are matched by kind and order (torch 2.11 writes them)"
            )
        if (beside := sum(streams.values()) - streams[main]) > 0:
            notes.append(f"kernels on other streams than the compute stream run for {beside / NS_PER_US:.0f} us")
        return MeasuredStep("", None, None, end - begin, busy_ns, late_ns, _in_launch_order(collectives), (), (*notes,))

    def _is_inside(self, work: _Work, window: Interval) -> bool:
        return window[0] <= self._issued(work) < window[1]

    def _issued(self, work: _Work) -> int:
        """When the host issued a kernel, or if that is unknown, its start."""
        return self.issued.get(work.correlation, work.start_ns) if work.correlation is not None else work.start_ns

    def _stalls(self, work: Sequence[_Work], begin: int, end: int) -> tuple[int, int, list[Interval]]:
        """How long the compute stream is busy, how long the host is late, and when the stream stalls."""
        busy_ns, late_ns, free, stalls = 0, 0, begin, list[Interval]()
        for each in work:
            if each.start_ns > free:
                issued = self.issued.get(each.correlation, free) if each.correlation is not None else free
                ready = min(max(issued, free), each.start_ns)
                late_ns += ready - free
                stalls.append((ready, each.start_ns))
            busy_ns += max(each.end_ns - max(each.start_ns, free), 0)
            free = max(free, each.end_ns)
        if end > free:
            stalls.append((free, end))
        return busy_ns, late_ns, stalls

    def _measured(
        self, work: _Work, traced: TracedCollective | Kind, begin: int, exposed_ns: int
    ) -> MeasuredCollective:
        issued = self.issued.get(work.correlation) if work.correlation is not None else None
        is_known = isinstance(traced, TracedCollective)
        return MeasuredCollective(
            traced.kind if is_known else traced,
            traced.group if is_known else "",
            traced.num_bytes if is_known else None,
            None if issued is None else issued - begin,
            work.start_ns - begin,
            work.end_ns - begin,
            exposed_ns,
        )

    def _host_step(self, window: Interval, info: Mapping[str, Any]) -> MeasuredStep:
        inside = [each for each in self.operators if window[0] <= each.start_ns < window[1]]
        operators = _outermost(inside)
        launches = [each for each in operators if each.kind is not None]
        threads = {each.thread for each in operators}
        compute = _Union(
            (start, end)
            for thread in threads
            for start, end in _pairs(self.host_compute.get(thread, array("q")))
            if window[0] <= start < window[1]
        )
        waits = _Union((each.start_ns, each.end_ns) for each in operators if each.kind is None)
        everything = [*compute.parts, *((each.start_ns, each.end_ns) for each in operators)]
        begin = min((start for start, _ in everything), default=0)
        end = max((end for _, end in everything), default=0)
        wires = sorted(span for span in self.on_wire if window[0] <= span[0] < window[1])
        is_matched = len(wires) == len(launches)
        exposed = attribute_stalls(waits.parts, wires) if is_matched else [0] * len(launches)
        group = next((group.name for group in _host_groups(info)), "")
        collectives = [
            MeasuredCollective(
                cast(Kind, each.kind),
                group,
                each.num_bytes,
                each.start_ns - begin,
                (wires[i][0] if is_matched else each.start_ns) - begin,
                wires[i][1] - begin if is_matched else None,
                exposed[i],
            )
            for i, each in enumerate(launches)
        ]
        # Operators inside of a wait do not count as compute.
        waiting = sum(compute.length_to(end) - compute.length_to(start) for start, end in waits.parts)
        notes = () if is_matched else (f"gloo ran {len(wires)} collectives for {len(launches)} launches: no durations",)
        return MeasuredStep("", None, None, end - begin, compute.length - waiting, 0, tuple(collectives), (), notes)


def _in_launch_order(found: list[MeasuredCollective]) -> tuple[MeasuredCollective, ...]:
    """By launch if the host's launches are known for all, else by start."""
    is_known = all(each.launched_ns is not None for each in found)
    return tuple(sorted(found, key=lambda each: (each.launched_ns or 0, each.start_ns) if is_known else each.start_ns))


def _outermost(operators: Iterable[_Operator]) -> list[_Operator]:
    """The operators that no other one of their thread contains, in order of time."""
    free: dict[Any, int] = {}
    found: list[_Operator] = []
    for each in sorted(operators, key=lambda each: (each.start_ns, -each.end_ns)):
        if each.start_ns >= free.get(each.thread, EVERYTHING[0]):
            found.append(each)
            free[each.thread] = each.end_ns
    return found


def _host_groups(info: Mapping[str, Any]) -> tuple[TracedGroup, ...]:
    """The group of all collectives, if the job has only one: operators do not name theirs."""
    known = groups_of(info.get("pg_config"))
    if len(known) != 1:
        return ()
    rows = info["pg_config"]
    row = rows[0] if isinstance(rows, list) else next(iter(rows.values()))
    return tuple(TracedGroup(name, len(ranks), ranks, axis_named(row.get("pg_desc"))) for name, ranks in known.items())


def _pairs(flat: Sequence[int]) -> Iterable[Interval]:
    return zip(flat[::2], flat[1::2], strict=True)


def _args(event: Mapping[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return cast(dict[str, Any], args) if isinstance(args, dict) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _span(event: Mapping[str, Any]) -> Interval | None:
    """Start and end in nanoseconds; None if they are malformed."""
    start, us = event.get("ts"), event.get("dur")
    for value in (start, us):
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            return None
    start, us = cast(float, start), cast(float, us)
    if abs(start) > MAX_TS_US or not 0 <= us <= MAX_TS_US:
        return None
    start_ns = round(start * NS_PER_US)
    return start_ns, start_ns + round(us * NS_PER_US)


def _work(event: Mapping[str, Any], span: Interval) -> _Work:
    args = _args(event)
    stream = args.get("stream", event.get("tid"))
    return _Work(*span, stream if isinstance(stream, int | str) else None, _whole(args.get("correlation")))


def _operand_bytes(kind: Kind, args: Mapping[str, Any]) -> int | None:
    """Bytes of the full tensor of a functional collective, from the shapes that the profiler recorded."""
    shapes, types, given = args.get("Input Dims"), args.get("Input type"), args.get("Concrete Inputs")
    if not (isinstance(shapes, list) and isinstance(types, list) and shapes and types):
        return None
    shape, item_bytes = cast(list[Any], shapes)[0], ITEM_BYTES.get(_dtype(cast(list[Any], types)[0]))
    if item_bytes is None or not isinstance(shape, list):
        return None
    sizes = cast(list[Any], shape)
    if not all(_whole(size) is not None and 0 <= size < MAX_MESSAGE_BYTES for size in sizes):
        return None
    size = "1"
    if kind is Kind.ALL_GATHER:
        concrete = cast(list[Any], given) if isinstance(given, list) else []
        size = concrete[1] if len(concrete) > 1 and isinstance(concrete[1], str) else ""
    if not size.isdecimal() or len(size) > 7 or int(size) > MAX_RANKS:
        return None
    return prod(sizes) * item_bytes * int(size)


def _dtype(name: Any) -> str:
    """`c10::BFloat16` and `float` as kernels of NCCL name them."""
    return str(name).removeprefix("c10::").lower()
