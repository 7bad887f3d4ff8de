"""The time that the host takes to issue work, from the operators of a Chrome trace of torch.profiler.

The time of an operator is that from its start to the start of the next one on its thread. Operators that another one
calls belong to it. The profiler itself makes each of them slower.

Contract: malformed events are ignored. Each figure is a median, and None with fewer than `MIN_SAMPLES` samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, cast

from weft.compat import FUNCTIONAL
from weft.cost.calibration.event_fields import NS_PER_US, arguments_of, span_of, whole
from weft.cost.calibration.overheads import MIN_SAMPLES

COLLECTIVES = (FUNCTIONAL, "c10d")
"""Namespaces of the operators that launch collectives or wait."""
LISTS = ("_foreach_", "_fused_")
"""Begin the names of operators of an optimizer that take lists of tensors."""
VIEWS = (
    *("as_strided", "chunk", "detach", "expand", "permute", "select", "slice", "split", "squeeze", "t", "transpose"),
    *("unbind", "unsqueeze", "view"),
)
COMPILED = "triton_"
"""Begins the names of kernels that Inductor makes."""


@dataclass(frozen=True)
class HostSamples:
    """Samples of one or several traces, in microseconds, by the fields of `HostTimes`."""

    us: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])

    @property
    def medians(self) -> dict[str, float]:
        """The figures that have enough samples."""
        return {name: median(us) for name, us in sorted(self.us.items()) if len(us) >= MIN_SAMPLES}


NO_HOST = HostSamples()


def merge_host(found: Iterable[HostSamples]) -> HostSamples:
    """The samples of several traces."""
    samples: dict[str, list[float]] = {}
    for each in found:
        for name, us in each.us.items():
            samples.setdefault(name, []).extend(us)
    return HostSamples({name: tuple(us) for name, us in samples.items()})


@dataclass(frozen=True)
class _Call:
    start_ns: int
    end_ns: int
    name: str
    number: int | None
    """Its `External id`."""
    num_tensors: int


class HostReader:
    """Collects operators and kernels of one trace, in any order."""

    def __init__(self) -> None:
        self._calls: dict[Any, list[_Call]] = {}
        self._launching: set[int] = set()
        self._compiled: list[int] = []

    def add_operator(self, event: Mapping[str, Any]) -> None:
        """Add an operator on the host."""
        span, args = span_of(event), arguments_of(event)
        if span is not None:
            thread, number = str(event.get("tid")), whole(args.get("External id"))
            call = _Call(*span, str(event.get("name")), number, _num_tensors(args.get("Input Dims")))
            self._calls.setdefault(thread, []).append(call)

    def add_kernel(self, name: str, operator: int | None, correlation: int | None) -> None:
        """Add a compute kernel."""
        if operator is not None:
            self._launching.add(operator)
        if name.startswith(COMPILED) and correlation is not None:
            self._compiled.append(correlation)

    def finish(self, issued: Mapping[int, int]) -> HostSamples:
        """The samples found so far; `issued` says when the host issued a kernel, by correlation."""
        found: dict[str, list[float]] = {}
        for calls in self._calls.values():
            for (call, launches), (later, _) in pairwise(self._outermost(calls)):
                if (name := _figure(call, launches)) is not None:
                    us = (later.start_ns - call.start_ns) / NS_PER_US
                    found.setdefault(name, []).append(us / call.num_tensors if name == "optimizer_us" else us)
        compiled = set(self._compiled)
        for (early, first), (late, second) in pairwise(sorted((ns, correlation) for correlation, ns in issued.items())):
            if first in compiled and second in compiled:
                found.setdefault("launch_us", []).append((late - early) / NS_PER_US)
        return HostSamples({name: tuple(us) for name, us in found.items()})

    def _outermost(self, calls: list[_Call]) -> list[tuple[_Call, bool]]:
        """The operators of a thread that no other one contains, and whether they launch a kernel."""
        found: list[tuple[_Call, bool]] = []
        for call in sorted(calls, key=lambda call: (call.start_ns, -call.end_ns)):
            launches = call.number in self._launching
            if found and call.end_ns <= found[-1][0].end_ns:
                found[-1] = found[-1][0], found[-1][1] or launches
            else:
                found.append((call, launches))
        return found


def _figure(call: _Call, launches: bool) -> str | None:
    """The field of `HostTimes` that an operator is a sample of."""
    namespace, _, name = call.name.partition("::")
    if namespace in COLLECTIVES:
        return "collective_us"
    if namespace != "aten":
        return None
    if name.startswith(LISTS):
        return "optimizer_us" if launches and call.num_tensors > 1 else None
    if launches:
        return "operator_us"
    return "view_us" if name in VIEWS else None


def _num_tensors(shapes: Any) -> int:
    """Number of tensors in the first argument, if it is a list of them; otherwise 1."""
    first: Any = cast(list[Any], shapes)[0] if isinstance(shapes, list) and shapes else None
    is_list = isinstance(first, list) and bool(first) and isinstance(cast(list[Any], first)[0], list)
    return len(cast(list[Any], first)) if is_list else 1
