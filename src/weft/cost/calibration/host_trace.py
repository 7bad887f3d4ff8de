"""A step in a trace without a device, such as that of gloo: operators of the host instead of kernels.

The threads that launch collectives are the compute stream, which stalls in its waits. With `record_shapes=True`, the
profiler records the sizes of single tensors. It records neither the group of a collective nor the dtype of a list.

Contract: nothing is executed. Malformed values count as unknown.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from weft.compat import FUNCTIONAL
from weft.cost.calibration.chrome_trace import ITEM_BYTES, groups_of
from weft.cost.calibration.event_fields import arguments_of, whole
from weft.cost.calibration.measured_step import MeasuredCollective, MeasuredStep, TracedGroup
from weft.cost.calibration.samples import MAX_MESSAGE_BYTES, MAX_RANKS, kind_named
from weft.cost.calibration.stalls import Interval, Union, attribute_stalls
from weft.graph.ops import Kind

EAGER = "c10d"
"""Namespace of the operators that launch and wait outside of graphs."""
GLOO = "gloo:"
"""Begins the name of a collective that gloo runs."""


@dataclass(frozen=True)
class _Operator:
    """An operator on the host that launches a collective or waits."""

    thread: Any
    start_ns: int
    end_ns: int
    kind: Kind | None
    """None for a wait."""
    num_bytes: int | None
    num_tensors: int
    """gloo runs one collective for all of them, or one for each."""


class HostTrace:
    """Collects the operators of one trace."""

    def __init__(self) -> None:
        self.operators: list[_Operator] = []
        self.compute: dict[Any, array[int]] = {}
        """Starts and ends of the other operators, by thread."""
        self.on_wire: list[tuple[Interval, int]] = []
        """Collectives that gloo ran, each with its number of tensors."""

    def add_operator(self, event: Mapping[str, Any], span: Interval) -> None:
        """Add an operator of the host."""
        thread = event.get("tid") if isinstance(event.get("tid"), int | str) else None
        namespace, _, name = str(event.get("name")).partition("::")
        if namespace not in (FUNCTIONAL, EAGER):
            self.compute.setdefault(thread, array("q")).extend(span)
            return
        kind, args = kind_named(name), arguments_of(event)
        if kind is not None or name.startswith("wait_tensor"):
            num_bytes = _operand_bytes(kind, args) if kind is not None and namespace == FUNCTIONAL else None
            self.operators.append(_Operator(thread, *span, kind, num_bytes, _num_tensors(args)))

    def add_collective(self, event: Mapping[str, Any], span: Interval) -> None:
        """Add a collective that gloo ran."""
        shapes = arguments_of(event).get("Input Dims")
        self.on_wire.append((span, max(len(cast(list[Any], shapes)), 1) if isinstance(shapes, list) else 1))

    def launches(self) -> Iterator[int]:
        """When collectives were launched."""
        return (each.start_ns for each in self.operators if each.kind is not None)

    def step(self, window: Interval, info: Mapping[str, Any]) -> MeasuredStep:
        """The step in a span of time."""
        inside = [each for each in self.operators if window[0] <= each.start_ns < window[1]]
        operators = _outermost(inside)
        launches = [each for each in operators if each.kind is not None]
        threads = {each.thread for each in operators}
        compute = Union(
            (start, end)
            for thread in threads
            for start, end in _pairs(self.compute.get(thread, array("q")))
            if window[0] <= start < window[1]
        )
        waits = Union((each.start_ns, each.end_ns) for each in operators if each.kind is None)
        everything = [*compute.parts, *((each.start_ns, each.end_ns) for each in operators)]
        begin = min((start for start, _ in everything), default=0)
        end = max((end for _, end in everything), default=0)
        wires = self._wires(launches, window)
        exposed = attribute_stalls(waits.parts, wires) if wires is not None else [0] * len(launches)
        groups = _only_group(info)
        group = groups[0].name if groups else ""
        collectives = [
            MeasuredCollective(
                cast(Kind, each.kind),
                group,
                each.num_bytes,
                each.start_ns - begin,
                (each.start_ns if wires is None else wires[i][0]) - begin,
                None if wires is None else wires[i][1] - begin,
                exposed[i],
            )
            for i, each in enumerate(launches)
        ]
        # Operators inside of a wait do not count as compute.
        waiting = sum(compute.length_to(end) - compute.length_to(start) for start, end in waits.parts)
        notes = ("gloo's collectives cannot be distinguished, so their times are unknown",) if wires is None else ()
        return MeasuredStep("", None, None, end - begin, compute.length - waiting, 0, tuple(collectives), groups, notes)

    def _wires(self, launches: Sequence[_Operator], window: Interval) -> list[Interval] | None:
        """When the collective of each launch ran; None if the numbers do not fit. gloo starts them in launch order."""
        left = iter(sorted(each for each in self.on_wire if window[0] <= each[0][0] < window[1]))
        found: list[Interval] = []
        for launch in launches:
            parts, num_tensors = list[Interval](), 0
            while num_tensors < launch.num_tensors and (each := next(left, None)) is not None:
                parts.append(each[0])
                num_tensors += each[1]
            if num_tensors != launch.num_tensors:
                return None
            found.append((parts[0][0], max(end for _, end in parts)))
        return found if next(left, None) is None else None


def _outermost(operators: Iterable[_Operator]) -> list[_Operator]:
    """The operators that no other one of their thread contains, in order of time."""
    free: dict[Any, int] = {}
    found: list[_Operator] = []
    for each in sorted(operators, key=lambda each: (each.start_ns, -each.end_ns)):
        if each.thread not in free or each.start_ns >= free[each.thread]:
            found.append(each)
            free[each.thread] = each.end_ns
    return found


def _only_group(info: Mapping[str, Any]) -> tuple[TracedGroup, ...]:
    """The group of all collectives, if the job has only one: operators do not name theirs."""
    known = groups_of(info.get("pg_config"))
    if len(known) != 1:
        return ()
    return tuple(TracedGroup(name, len(ranks), ranks) for name, ranks in known.items())


def _pairs(flat: Sequence[int]) -> Iterable[Interval]:
    return zip(flat[::2], flat[1::2], strict=True)


def _operand_bytes(kind: Kind, args: Mapping[str, Any]) -> int | None:
    """Bytes of the full tensor of a functional collective, from the shapes that the profiler recorded."""
    shapes, types, given = args.get("Input Dims"), args.get("Input type"), args.get("Concrete Inputs")
    if not (isinstance(shapes, list) and isinstance(types, list) and shapes and types):
        return None
    shape, item_bytes = cast(list[Any], shapes)[0], ITEM_BYTES.get(_dtype(cast(list[Any], types)[0]))
    if item_bytes is None or not isinstance(shape, list):
        return None
    sizes = cast(list[Any], shape)
    if not all(whole(size) is not None and 0 <= size < MAX_MESSAGE_BYTES for size in sizes):
        return None
    size = "1"
    if kind is Kind.ALL_GATHER:
        concrete = cast(list[Any], given) if isinstance(given, list) else []
        size = concrete[1] if len(concrete) > 1 and isinstance(concrete[1], str) else ""
    if not size.isdecimal() or len(size) > 7 or int(size) > MAX_RANKS:
        return None
    return prod(sizes) * item_bytes * int(size)


def _num_tensors(args: Mapping[str, Any]) -> int:
    """The number of tensors that an operator sends: those of its first argument, if it is a list of tensors."""
    shapes = args.get("Input Dims")
    first = cast(list[Any], shapes)[0] if isinstance(shapes, list) and shapes else None
    is_list = isinstance(first, list) and bool(first) and isinstance(cast(list[Any], first)[0], list)
    return len(cast(list[Any], first)) if is_list else 1


def _dtype(name: Any) -> str:
    """`c10::BFloat16` and `float` as kernels of NCCL name them."""
    return str(name).removeprefix("c10::").lower()
