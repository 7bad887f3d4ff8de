"""Read a training step of one rank from a Chrome trace of torch.profiler: its collectives, and its exposed time.

The compute stream is the stream with the most compute. It stalls between two of its kernels. A stall begins when the
stream is idle and the host has issued the next kernel; until then the host was late, and the idle time is the host's.
The stream waited for the collectives that end during a stall: the stall up to such an end is exposed time. The rest of
a stall is a launch gap.

A trace without a device is read by `host_trace`.

Contract: nothing is executed. Malformed collectives are faults; other malformed events are ignored.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from weft.cost.calibration.chrome_trace import (
    NAME,
    TracedCollective,
    cause_of,
    groups_of,
    is_nccl,
    read_collective,
    read_events,
)
from weft.cost.calibration.compute_trace import TracedProduct, product_of
from weft.cost.calibration.event_fields import NS_PER_US, ON_HOST, arguments_of, span_of, whole
from weft.cost.calibration.host_trace import GLOO, HostTrace
from weft.cost.calibration.measured_step import MeasuredCollective, MeasuredStep, TracedGroup
from weft.cost.calibration.samples import MeasurementError, kind_named
from weft.cost.calibration.stalls import Interval, attribute_stalls
from weft.graph.ops import Kind

STEP = re.compile(r"ProfilerStep#([0-9]{1,9})", re.ASCII)
ON_DEVICE = ("gpu_memcpy", "gpu_memset")
EVERYTHING: Interval = (-(1 << 63), 1 << 63)


class StepTrace:
    """One rank's trace. The marks `ProfilerStep#` that `torch.profiler.schedule` makes separate its steps."""

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
    if not reader.collectives and not any(True for _ in reader.host.launches()):
        skipped = ", ".join(f"{count} {what}" for what, count in sorted(reader.skipped.items()))
        what = "none of its events is a kernel or an operator of a collective"
        raise _fault([f"{path}: {what}" + (f" ({skipped})" if skipped else "")])
    return found


def _fault(faults: Iterable[str]) -> MeasurementError:
    return MeasurementError(faults, "compare", "the trace cannot be used")


@dataclass(frozen=True)
class _Work:
    """One kernel, copy or fill on the device."""

    start_ns: int
    end_ns: int
    stream: Any
    correlation: int | None


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
        self.host = HostTrace()
        self.products: list[tuple[int, TracedProduct]] = []
        """When the host called them."""

    def add(self, line: int, event: dict[str, Any]) -> None:
        category, name = event.get("cat"), event.get("name")
        if not isinstance(category, str) or not isinstance(name, str):
            return
        if category == "kernel" and (is_nccl(event) or NAME in arguments_of(event)):
            self._add_collective(line, event)
            return
        span = span_of(event)
        if span is None:
            return
        if category == "kernel" or category in ON_DEVICE:
            self.compute.append(_work(event, span))
        elif category in ON_HOST:
            correlation = whole(arguments_of(event).get("correlation"))
            if correlation is not None:
                self.issued[correlation] = span[0]
        elif category == "cpu_op":
            self.host.add_operator(event, span)
            if (product := product_of(name, arguments_of(event))) is not None:
                self.products.append((span[0], product))
        elif category == "user_annotation" and name.startswith(GLOO):
            self.host.add_collective(event, span)
        elif category == "user_annotation" and (mark := STEP.fullmatch(name)):
            self.marks[int(mark[1])] = span

    def _add_collective(self, line: int, event: dict[str, Any]) -> None:
        name, span = str(event["name"]), span_of(event)
        if span is None:
            self.faults.append((line, f"{name[:60]!r}: ts and dur: expected times in microseconds"))
            return
        found = read_collective(event) if NAME in arguments_of(event) else kind_named(name.partition("(")[0])
        if isinstance(found, TracedCollective | Kind):
            self.collectives.append((_work(event, span), found))
        elif found is None or isinstance(found, str):
            self.skipped[found or "NCCL kernels that do not say what they do"] += 1
        else:
            self.faults += ((line, fault) for fault in found)

    @property
    def is_on_device(self) -> bool:
        return bool(self.compute or self.collectives)

    def numbers(self) -> tuple[int, ...]:
        """The marks with collectives."""
        marks = sorted((start, end, number) for number, (start, end) in self.marks.items())
        starts = [start for start, _, _ in marks]
        found: set[int] = set()
        issued = (self._issued(work) for work, _ in self.collectives)
        for time in issued if self.is_on_device else self.host.launches():
            k = bisect_right(starts, time) - 1
            if k >= 0 and time < marks[k][1]:
                found.add(marks[k][2])
        return tuple(sorted(found))

    def step(self, path: str, number: int | None, info: Mapping[str, Any]) -> MeasuredStep:
        """One marked step, or the whole trace."""
        window = EVERYTHING if number is None else self.marks[number]
        step = self._device_step(window, info) if self.is_on_device else self.host.step(window, info)
        left_out = tuple(f"left out: {count} {what}" for what, count in sorted(self.skipped.items()))
        rank = whole(info.get("rank"))
        ran = Counter(product for time, product in self.products if window[0] <= time < window[1])
        notes = left_out + step.notes
        return replace(step, path=path, rank=rank, number=number, notes=notes, products=tuple(sorted(ran.items())))

    def _groups(self, info: Mapping[str, Any]) -> tuple[TracedGroup, ...]:
        known = groups_of(info.get("pg_config"))
        found: dict[str, TracedGroup] = {}
        for _, traced in self.collectives:
            if isinstance(traced, TracedCollective):
                ranks = traced.ranks or known.get(traced.group, ())
                ranks = ranks if len(ranks) == traced.num_ranks else ()
                found.setdefault(traced.group, TracedGroup(traced.group, traced.num_ranks, ranks, traced.axis))
        return tuple(found.values())

    def _device_step(self, window: Interval, info: Mapping[str, Any]) -> MeasuredStep:
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
                "out, and so does torch before 2.4; they are matched by kind and order"
            )
        if (beside := sum(streams.values()) - streams[main]) > 0:
            notes.append(f"kernels on other streams than the compute stream run for {beside / NS_PER_US:.0f} us")
        ordered, groups = _in_launch_order(collectives), self._groups(info)
        return MeasuredStep("", None, None, end - begin, busy_ns, late_ns, ordered, groups, tuple(notes))

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


def _in_launch_order(found: list[MeasuredCollective]) -> tuple[MeasuredCollective, ...]:
    """By launch if the host's launches are known for all, else by start."""
    is_known = all(each.launched_ns is not None for each in found)
    return tuple(sorted(found, key=lambda each: (each.launched_ns or 0, each.start_ns) if is_known else each.start_ns))


def _work(event: Mapping[str, Any], span: Interval) -> _Work:
    args = arguments_of(event)
    stream = args.get("stream", event.get("tid"))
    return _Work(*span, stream if isinstance(stream, int | str) else None, whole(args.get("correlation")))
