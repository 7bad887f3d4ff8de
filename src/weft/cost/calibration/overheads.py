"""Overheads of a step that its trace shows: gaps between kernels, the host's time per kernel, slowdown by collectives.

- Launch gap: idle time between two kernels of a stream whose second one the host had issued before the first one ended.
  Gaps in which a collective ends are left out, because the stream may have waited for it.
- Host time: time between the issues of two kernels, if the device ran empty in between.
- Overlap slowdown: products of one shape that run beside a collective for their whole time, against those that run
  without one.

Contract: nothing is executed. Each figure is a median, and None with fewer than `MIN_SAMPLES` samples. Without the
host's calls, a trace shows neither gaps nor host time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from weft.cost.calibration.event_fields import NS_PER_US
from weft.cost.calibration.stalls import Interval, Union

MIN_SAMPLES = 20
"""Fewest gaps or issues that give a figure."""
MIN_RUNS = 3
"""Fewest runs of a shape, beside collectives and without them, that give a slowdown."""


@dataclass(frozen=True)
class Overheads:
    """Samples of one or several traces, in microseconds."""

    gaps_us: tuple[float, ...] = ()
    host_us: tuple[float, ...] = ()
    slowdowns: tuple[float, ...] = ()
    """One for each shape: time beside a collective over time without one, minus 1."""

    @property
    def launch_gap_us(self) -> float | None:
        """Time between two kernels on the compute stream."""
        return median(self.gaps_us) if len(self.gaps_us) >= MIN_SAMPLES else None

    @property
    def host_kernel_us(self) -> float | None:
        """Time of the host for each kernel, where the host is slower than the device."""
        return median(self.host_us) if len(self.host_us) >= MIN_SAMPLES else None

    @property
    def overlap_slowdown(self) -> float | None:
        """The share by which products slow while a collective runs."""
        return max(median(self.slowdowns), 0.0) if self.slowdowns else None


NO_OVERHEADS = Overheads()


def merge_overheads(found: Iterable[Overheads]) -> Overheads:
    """The samples of several traces."""
    parts = list(found)
    return Overheads(
        tuple(us for part in parts for us in part.gaps_us),
        tuple(us for part in parts for us in part.host_us),
        tuple(share for part in parts for share in part.slowdowns),
    )


@dataclass(frozen=True)
class _Kernel:
    span: Interval
    correlation: int | None
    operator: int | None
    """The `External id` of the operator that launched it."""


class OverheadReader:
    """Collects kernels, collectives and issues of one trace, in any order."""

    def __init__(self) -> None:
        self.streams: dict[Any, list[_Kernel]] = {}
        self.collectives: list[Interval] = []
        self.issued: dict[int, int] = {}
        """When the host issued a kernel, by correlation."""

    def add_kernel(self, span: Interval, stream: Any, correlation: int | None, operator: int | None) -> None:
        """Add a compute kernel."""
        self.streams.setdefault(stream, []).append(_Kernel(span, correlation, operator))

    def finish(self, work: Mapping[int, tuple[str, int, int]]) -> Overheads:
        """The samples found so far; `work` has the shapes of operators."""
        gaps: list[float] = []
        host: list[float] = []
        ends = sorted(end for _, end in self.collectives)
        for kernels in self.streams.values():
            for early, late in pairwise(sorted(kernels, key=lambda kernel: kernel.span)):
                free, start = early.span[1], late.span[0]
                before, issued = self._issued(early), self._issued(late)
                if start < free or issued is None or early.correlation == late.correlation:
                    continue
                if issued > free and before is not None:
                    host.append((issued - before) / NS_PER_US)
                elif issued <= free and bisect_left(ends, free) == bisect_left(ends, start + 1):
                    gaps.append((start - free) / NS_PER_US)
        return Overheads(tuple(gaps), tuple(host), tuple(self._slowdowns(work)))

    def _issued(self, kernel: _Kernel) -> int | None:
        return None if kernel.correlation is None else self.issued.get(kernel.correlation)

    def _slowdowns(self, work: Mapping[int, tuple[str, int, int]]) -> Iterable[float]:
        busy = Union(self.collectives)
        times: dict[tuple[str, int, int], tuple[list[int], list[int]]] = {}
        """Times alone and beside collectives, by shape."""
        for kernel in (kernel for kernels in self.streams.values() for kernel in kernels):
            shape = work.get(kernel.operator) if kernel.operator is not None else None
            if shape is None or shape[0] == "memory":
                continue
            start, end = kernel.span
            shared = busy.length_to(end) - busy.length_to(start)
            if shared in (0, end - start):
                times.setdefault(shape, ([], []))[1 if shared else 0].append(end - start)
        for _, (alone, beside) in sorted(times.items()):
            if min(len(alone), len(beside)) >= MIN_RUNS and median(alone) > 0:
                yield median(beside) / median(alone) - 1
