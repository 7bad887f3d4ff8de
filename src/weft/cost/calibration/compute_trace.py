"""Compute in a Chrome trace of torch.profiler: time by kernel, and the device's peaks that products and copies show.

A kernel event has the duration. The operator that launched it (same `External id`) has the shapes, if the profile was
taken with `record_shapes=True`. Large matrix products give the flops per second of their dtype; large copies and
additions give the memory bandwidth: the median over shapes of the best run of each shape. Small ones measure launches
and caches instead, and are skipped. `overheads` adds gaps, host time and slowdown.

Contract: nothing is executed, and no fault is raised: malformed events are ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any, NamedTuple, cast

from weft.cost.calibration.attention_trace import AttentionRun, attention_of, fitted_attention
from weft.cost.calibration.event_fields import arguments_of, span_of, whole
from weft.cost.calibration.host_times import NO_HOST, HostReader, HostSamples, merge_host
from weft.cost.calibration.overheads import MIN_SAMPLES, NO_OVERHEADS, OverheadReader, Overheads, merge_overheads
from weft.cost.calibration.peer_copies import NO_PEER_COPIES, PeerCopies, PeerCopyReader, merge_peer_copies
from weft.cost.device import UNDESCRIBED, Device
from weft.cost.kernels import AttentionShape, HostTimes

MIN_FLOPS = 1e9
"""Smallest product that is used to measure the peak, in flops."""
MIN_BYTES = 1 << 26
"""Smallest copy that is used to measure memory bandwidth: larger than caches."""
SMALL_BYTES = 1 << 16
"""Largest copy that measures only the time to start and finish a kernel: its bytes move in less than 0.1 us."""
MAX_DIM = 1 << 40
DTYPES = {
    "c10::bfloat16": ("bf16", 2),
    "c10::half": ("f16", 2),
    "float": ("f32", 4),
    "double": ("f64", 8),
    "c10::float8_e4m3fn": ("fp8", 1),
    "c10::float8_e5m2": ("fp8", 1),
}
"""Key of the peak and bytes of an item, by the dtype name that profilers write, in lower case."""
FIRST_FACTOR = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_scaled_mm": 0}
"""Index of the first factor among the arguments of a product."""
MOVED_TENSORS = {"aten::copy_": 2, "aten::add": 3, "aten::mul": 3}
"""Number of tensors of the first argument's size that an operator reads and writes."""


@dataclass(frozen=True)
class KernelTime:
    """All runs of one kernel."""

    name: str
    count: int
    total_us: float


@dataclass(frozen=True)
class KernelWork:
    """The work of one shape, and the shortest time that it took."""

    key: str
    """A dtype such as bf16 for flops; `memory` for bytes."""
    amount: int
    us: float
    terms: int = 0
    """Terms that each element of a product sums; 0: not a product."""

    @property
    def per_second(self) -> float:
        return self.amount / self.us * 1e6

    def per_second_on(self, device: Device) -> float:
        """The rate without what the device adds to every kernel and product; the plain rate if that is all."""
        us = self.us - device.kernel_us
        overhead = device.product_overhead_terms / self.terms if self.terms else 0.0
        return self.amount * (1 + overhead) / us * 1e6 if us > 0 else self.per_second


@dataclass(frozen=True)
class ComputeTrace:
    """Compute, as measured by traces."""

    kernels: tuple[KernelTime, ...] = ()
    """Largest total time first."""
    work: tuple[KernelWork, ...] = ()
    overheads: Overheads = NO_OVERHEADS
    peer_copies: PeerCopies = NO_PEER_COPIES
    attention: tuple[AttentionRun, ...] = ()
    small_us: tuple[float, ...] = ()
    """Times of kernels that move at most `SMALL_BYTES`."""
    host: HostSamples = NO_HOST

    @property
    def kernel_us(self) -> float | None:
        """Time that each kernel takes to start and to finish."""
        return median(self.small_us) if len(self.small_us) >= MIN_SAMPLES else None

    def rates(self, device: Device = UNDESCRIBED) -> dict[str, list[float]]:
        """Flops per second of each dtype, and bytes per second of `memory`, one for each shape."""
        rates: dict[str, list[float]] = {}
        for each in self.work:
            rates.setdefault(each.key, []).append(each.per_second_on(device))
        return rates

    def device(self) -> Device | None:
        """The measured device; None if no large operator with shapes was traced."""
        found = {key: median(values) for key, values in self.rates().items()}
        memory = found.pop("memory", None)
        if not found and memory is None:
            return None
        host = self.host.medians
        peaks = tuple(sorted((key, rate / 1e12) for key, rate in found.items()))
        return Device(
            "measured",
            peaks,
            None if memory is None else memory / 1e9,
            launch_gap_us=self.overheads.launch_gap_us or 0.0,
            overlap_slowdown=self.overheads.overlap_slowdown or 0.0,
            matmul_efficiency=1.0,
            kernel_us=self.kernel_us or 0.0,
            attention=fitted_attention(self.attention),
            host=HostTimes(**host) if host else None,
        )


NO_COMPUTE = ComputeTrace()


def merge_compute(found: Iterable[ComputeTrace]) -> ComputeTrace:
    """Merge several ranks."""
    traces = list(found)
    kernels: Counter[str] = Counter()
    total: dict[str, float] = {}
    best: dict[tuple[str, int, int], float] = {}
    for trace in traces:
        for kernel in trace.kernels:
            kernels[kernel.name] += kernel.count
            total[kernel.name] = total.get(kernel.name, 0.0) + kernel.total_us
        for work in trace.work:
            shape = work.key, work.amount, work.terms
            best[shape] = min(best.get(shape, work.us), work.us)
    times = [KernelTime(name, count, total[name]) for name, count in kernels.items()]
    return ComputeTrace(
        tuple(sorted(times, key=lambda kernel: (-kernel.total_us, kernel.name))),
        tuple(KernelWork(key, amount, us, terms) for (key, amount, terms), us in sorted(best.items())),
        merge_overheads(trace.overheads for trace in traces),
        merge_peer_copies(trace.peer_copies for trace in traces),
        tuple(run for trace in traces for run in trace.attention),
        tuple(us for trace in traces for us in trace.small_us),
        merge_host(trace.host for trace in traces),
    )


class ComputeReader:
    """Collects the compute of one trace, event by event; operators and kernels may come in any order."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.total: dict[str, float] = {}
        self.us: dict[int, float] = {}
        """Kernel time of each operator, by its `External id`."""
        self.work: dict[int, tuple[str, int, int]] = {}
        self.attention: dict[int, tuple[str, AttentionShape]] = {}
        self.small: set[int] = set()
        """Operators that move at most `SMALL_BYTES`."""
        self.host = HostReader()
        self.overheads = OverheadReader()
        self.peer_copies = PeerCopyReader()

    def add_kernel(self, event: Mapping[str, Any]) -> None:
        """Add a kernel that is not a collective."""
        name, us = event.get("name"), event.get("dur")
        if not isinstance(name, str) or isinstance(us, bool) or not isinstance(us, int | float) or not 0 < us < 1e12:
            return
        self.count[name] += 1
        self.total[name] = self.total.get(name, 0.0) + us
        launched_by, span, args = _external_id(event), span_of(event), arguments_of(event)
        self.host.add_kernel(name, launched_by, whole(args.get("correlation")))
        if launched_by is not None:
            self.us[launched_by] = self.us.get(launched_by, 0.0) + us
        if span is not None:
            stream = str(args.get("stream", event.get("tid")))
            self.overheads.add_kernel(span, stream, whole(args.get("correlation")), launched_by)

    def add_collective(self, event: Mapping[str, Any]) -> None:
        """Add a kernel of NCCL, beside which compute may run."""
        if (span := span_of(event)) is not None:
            self.overheads.collectives.append(span)

    def add_issue(self, event: Mapping[str, Any]) -> None:
        """Add a call of the host that issues a kernel."""
        span, correlation = span_of(event), whole(arguments_of(event).get("correlation"))
        if span is not None and correlation is not None:
            self.overheads.issued[correlation] = span[0]

    def add_operator(self, event: Mapping[str, Any]) -> None:
        """Add an operator on the host."""
        number, args, name = _external_id(event), arguments_of(event), str(event.get("name"))
        self.host.add_operator(event)
        if number is None:
            return
        if (attention := attention_of(name, args)) is not None:
            self.attention[number] = attention
        num_bytes = _moved_bytes(name, args)
        if num_bytes is not None and num_bytes <= SMALL_BYTES:
            self.small.add(number)
        if (work := _work_of(name, args)) is not None:
            self.work[number] = work

    def finish(self) -> ComputeTrace:
        """The compute found so far."""
        times = tuple(KernelTime(name, count, self.total[name]) for name, count in self.count.items())
        work = (
            KernelWork(key, amount, self.us[number], terms)
            for number, (key, amount, terms) in self.work.items()
            if number in self.us
        )
        overheads = self.overheads.finish(self.work)
        other = ComputeTrace(
            times,
            (),
            overheads,
            self.peer_copies.finish(),
            tuple(
                AttentionRun(*found, self.us[number]) for number, found in self.attention.items() if number in self.us
            ),
            tuple(self.us[number] for number in sorted(self.small) if number in self.us),
            self.host.finish(self.overheads.issued),
        )
        return merge_compute([other, *(ComputeTrace((), (each,)) for each in work)])


def _external_id(event: Mapping[str, Any]) -> int | None:
    return whole(arguments_of(event).get("External id"))


class TracedProduct(NamedTuple):
    """The shape of a matrix product of a trace."""

    dtype: str
    batch: int
    rows: int
    columns: int
    terms: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.columns * self.terms


def product_of(name: str, args: Mapping[str, Any]) -> TracedProduct | None:
    """The product that an operator of the host computes; None if it computes none, or was recorded without shapes."""
    first = FIRST_FACTOR.get(name)
    shapes, types = args.get("Input Dims"), args.get("Input type")
    if first is None or not isinstance(shapes, list) or not isinstance(types, list):
        return None
    left, right = (_sizes(cast(list[Any], shapes), i) for i in (first, first + 1))
    key, _ = _dtype(cast(list[Any], types), first)
    if not key or not len(left) == len(right) > 1 or left[-1] != right[-2]:
        return None
    return TracedProduct(key, prod(left[:-2]), left[-2], right[-1], left[-1])


def _work_of(name: str, args: Mapping[str, Any]) -> tuple[str, int, int] | None:
    """Flops by dtype with the terms of a sum, or bytes of memory; None for operators that show neither."""
    if (product := product_of(name, args)) is not None:
        return (product.dtype, product.flops, product.terms) if product.flops >= MIN_FLOPS else None
    num_bytes = _moved_bytes(name, args)
    return ("memory", num_bytes, 0) if num_bytes is not None and num_bytes >= MIN_BYTES else None


def _moved_bytes(name: str, args: Mapping[str, Any]) -> int | None:
    """The bytes that a copy, an addition or a multiplication moves; None for others and without shapes."""
    shapes, types = args.get("Input Dims"), args.get("Input type")
    if name not in MOVED_TENSORS or not isinstance(shapes, list) or not isinstance(types, list):
        return None
    left, right = (_sizes(cast(list[Any], shapes), i) for i in (0, 1))
    dtypes = cast(list[Any], types)
    key, item_bytes = _dtype(dtypes, 0)
    # An expanded tensor reads less than its size.
    is_expanded = any(0 in steps for steps in _lists(args.get("Input Strides"))[:2])
    is_plain = bool(key and left) and left == right and dtypes[:1] == dtypes[1:2] and not is_expanded
    return prod(left) * item_bytes * MOVED_TENSORS[name] if is_plain else None


def _dtype(types: Sequence[Any], i: int) -> tuple[str, int]:
    """The key of the peak and the bytes of an item."""
    return DTYPES.get(str(types[i]).lower() if i < len(types) else "", ("", 0))


def _lists(value: Any) -> list[list[Any]]:
    return [each for each in cast(list[Any], value) if isinstance(each, list)] if isinstance(value, list) else []


def _sizes(shapes: Sequence[Any], i: int) -> list[int]:
    """One shape; empty if it is malformed."""
    shape = shapes[i] if i < len(shapes) else None
    if not isinstance(shape, list):
        return []
    sizes = cast(list[Any], shape)
    return sizes if all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < MAX_DIM for n in sizes) else []
