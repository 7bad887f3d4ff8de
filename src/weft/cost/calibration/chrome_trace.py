"""Read the collectives of Chrome traces of torch.profiler, one for each rank of a run.

A rank that arrives early waits inside its kernel, so the kernel takes longer than the collective. The last rank to
arrive waits for no other: the shortest time over the ranks is the true time of a collective. Ranks are matched by group
and sequence number; traces without sequence numbers (torch 2.11) by group, kind, size and order. A rank whose part ends
early, such as the root of a broadcast, makes the estimate too short.

Contract: nothing is executed. Kernels that are not collectives go to `compute_trace`. Collectives without a price
(point-to-point, one rank, no bytes) are counted. A collective kernel that lacks required fields is a fault.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from weft.cost.calibration.compute_trace import NO_COMPUTE, ComputeReader, ComputeTrace, merge_compute
from weft.cost.calibration.event_fields import ON_HOST, arguments_of
from weft.cost.calibration.json_stream import EventStream, JsonError
from weft.cost.calibration.samples import (
    MAX_MESSAGE_BYTES,
    MAX_RANKS,
    MAX_US,
    MIN_US,
    MeasurementError,
    Measurements,
    Sample,
    kind_named,
    open_measurements,
)
from weft.errors import nearest
from weft.graph.ops import Kind

NAME = "Collective name"
UNDESCRIBED = "NCCL kernels that do not say what they do"
WITH_ARGUMENTS = (
    "profile with torch 2.4 or later and ProfilerActivity.CPU, without CUDA graphs, or give tables of nccl-tests"
)
"""How to get kernels with arguments. Traces of torch 2.2.2 and 2.3.1 were found to have none, those of 2.4.1 all; the
tests read traces of torch 2.11."""
ITEM_BYTES = {
    **dict.fromkeys(("byte", "char", "bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("short", "half", "bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("int", "float", "float32", "int32", "uint32", "complexhalf"), 4),
    **dict.fromkeys(("long", "double", "float64", "int64", "uint64", "complexfloat"), 8),
    "complexdouble": 16,
}
"""Bytes of an item, by the dtype name that profilers write, in lower case."""
POINT_TO_POINT = re.compile(r"send|recv|p2p", re.IGNORECASE)
SHOWN = 60


@dataclass(frozen=True)
class TracedCollective:
    """One collective as one rank saw it."""

    kind: Kind
    group: str
    """The run-time name, which all members of a group share."""
    ranks: tuple[int, ...]
    num_ranks: int
    num_bytes: int
    seq: int | None
    start_us: float
    us: float
    axis: str = ""
    """The mesh axis of the group, if its description names one."""


@dataclass(frozen=True)
class ChromeTrace:
    """One rank's trace."""

    path: str
    rank: int | None
    kernels: tuple[TracedCollective, ...]
    skipped: tuple[tuple[str, int], ...] = ()
    """Kinds of skipped kernels, and their counts."""
    compute: ComputeTrace = NO_COMPUTE


def read_chrome_trace(path: str | Path) -> ChromeTrace:
    """The collectives of one rank's trace, JSON or gzip. An unchanged file is read once."""
    path = Path(path)
    try:
        state = path.stat()
    except (OSError, ValueError) as error:
        raise MeasurementError([f"{path}: it cannot be read: {cause_of(error)}"]) from None
    return _read(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=64)
def _read(path: Path, _mtime_ns: int, _size: int) -> ChromeTrace:
    reader = _TraceReader()
    try:
        reader.finish(read_events(path, reader.add, reader.faults))
    except (OSError, EOFError, zlib.error) as error:
        raise MeasurementError([f"{path}: it cannot be read: {cause_of(error)}"]) from None
    if not reader.kernels and not reader.faults:
        reader.faults.append((1, reader.why_empty()))
    if reader.faults:
        raise MeasurementError(f"{path}:{line}: {what}" for line, what in reader.faults)
    skipped = tuple(sorted(reader.skipped.items()))
    return ChromeTrace(str(path), reader.rank, tuple(reader.kernels), skipped, reader.compute.finish())


def read_events(path: Path, add: Callable[[int, dict[str, Any]], None], faults: list[tuple[int, str]]) -> Any:
    """Give each event of a trace to `add`, with its line. Return the trace's `distributedInfo`.

    Faults of the text go to `faults`. May raise an OSError, EOFError or zlib.error.
    """
    with open_measurements(path) as file:
        stream = EventStream(file, keep=("distributedInfo",))
        try:
            for line, event in stream:
                if isinstance(event, dict):
                    add(line, cast(dict[str, Any], event))
                else:
                    faults.append((line, f"expected an event, found {show(event)}"))
        except JsonError as fault:
            faults.append((fault.line, f"it is not a trace: {fault}"))
        return stream.other_values.get("distributedInfo")


def cause_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class _TraceReader:
    """Collects the kernels of one trace, event by event."""

    def __init__(self) -> None:
        self.kernels: list[TracedCollective] = []
        self.skipped: Counter[str] = Counter()
        self.faults: list[tuple[int, str]] = []
        self.rank: int | None = None
        self.num_events = 0
        self.compute = ComputeReader()

    def add(self, line: int, found: dict[str, Any]) -> None:
        self.num_events += 1
        category = found.get("cat")
        if category == "cpu_op":
            self.compute.add_operator(found)
        elif category in ON_HOST:
            self.compute.add_issue(found)
        if category in ("kernel", "gpu_memcpy"):
            self.compute.peer_copies.add(found)
        if category != "kernel":
            return
        is_described = NAME in arguments_of(found)
        if not is_described and not is_nccl(found):
            self.compute.add_kernel(found)
            return
        self.compute.add_collective(found)
        if is_described:
            self._add_collective(line, found)
        else:
            self.skipped[UNDESCRIBED] += 1

    def _add_collective(self, line: int, event: dict[str, Any]) -> None:
        found = read_collective(event)
        if isinstance(found, TracedCollective):
            self.kernels.append(found)
        elif isinstance(found, str):
            self.skipped[found] += 1
        else:
            self.faults += ((line, fault) for fault in found)

    def finish(self, info: Any) -> None:
        """Take the rank, and the ranks of groups that kernels only name, from the trace's metadata."""
        if not isinstance(info, dict):
            return
        metadata = cast(dict[str, Any], info)
        rank = metadata.get("rank")
        self.rank = rank if isinstance(rank, int) and not isinstance(rank, bool) else None
        groups = groups_of(metadata.get("pg_config"))
        for i, kernel in enumerate(self.kernels):
            ranks = groups.get(kernel.group, ())
            if not kernel.ranks and len(ranks) == kernel.num_ranks:
                self.kernels[i] = replace(kernel, ranks=ranks)

    def why_empty(self) -> str:
        found = f"none of its {self.num_events} events is a kernel of a collective with its arguments"
        skipped = ", ".join(f"{count} {what}" for what, count in sorted(self.skipped.items()))
        told = f"{found} ({skipped})" if skipped else found
        return f"{told}; {WITH_ARGUMENTS}" if UNDESCRIBED in self.skipped else told


def is_nccl(event: Mapping[str, Any]) -> bool:
    """Whether a kernel is one of NCCL's, or of RCCL's, which has the same names."""
    return str(event.get("name", "")).lower().startswith("nccl")


def read_collective(event: Mapping[str, Any]) -> TracedCollective | str | list[str]:
    """The collective of a kernel that has arguments; a str says why it is left out; a list has the faults."""
    args = _Fields(cast(dict[str, Any], event["args"]))
    name = str(args.values[NAME])
    kind = kind_named(name)
    if kind is None:
        return f"kernels that are {'point-to-point' if POINT_TO_POINT.search(name) else f'of kind {show(name)}'}"
    fields = _Fields(event)
    us = fields.number("dur", least=0, most=MAX_US)
    # Each trace has its own epoch, so a start may be any number.
    start_us = fields.number("ts", least=float("-inf"), most=float("inf"), default=0.0)
    incoming = args.whole("In msg nelems", least=0, most=MAX_MESSAGE_BYTES)
    outgoing = args.whole("Out msg nelems", least=0, most=MAX_MESSAGE_BYTES)
    num_ranks = args.whole("Group size", least=1, most=MAX_RANKS)
    seq = args.whole("Seq", least=-(1 << 63), most=1 << 63) if "Seq" in args.values else None
    item_bytes = args.item_bytes()
    ranks = args.ranks(num_ranks)
    if faults := fields.faults + args.faults:
        return [f"{show(name)}: {fault}" for fault in faults]
    is_sharded = kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    num_bytes = (max(incoming, outgoing) if is_sharded else incoming) * item_bytes
    if num_ranks == 1 or num_bytes == 0 or us < MIN_US:
        what = "of one rank" if num_ranks == 1 else "of no bytes" if num_bytes == 0 else "that took no time"
        return f"collectives {what}"
    group = str(args.values.get("Process Group Name", ""))
    axis = axis_named(args.values.get("Process Group Description"))
    return TracedCollective(kind, group, ranks, num_ranks, num_bytes, seq, start_us, us, axis)


def axis_named(description: Any) -> str:
    """The mesh axis in the description that torch gives a group; empty if it has none."""
    return description.removeprefix("mesh_") if isinstance(description, str) and description.startswith("mesh_") else ""


class _Fields:
    """Checks the values of an event, and collects every fault."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.faults: list[str] = []

    def number(self, key: str, *, least: float, most: float, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            self._wrong(key, "a time in microseconds" if key == "ts" else f"a time of {least:g} us or more")
            return 0.0
        return float(value)

    def whole(self, key: str, *, least: int, most: int) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self._wrong(key, f"a whole number of {least} or more")
            return 0
        return value

    def item_bytes(self) -> int:
        value = self.values.get("dtype")
        known = ITEM_BYTES.get(value.lower()) if isinstance(value, str) else None
        if known is None:
            near = nearest(value.lower(), ITEM_BYTES) if isinstance(value, str) else ""
            self._wrong("dtype", "a dtype such as BFloat16", near)
            return 0
        return known

    def ranks(self, num_ranks: int) -> tuple[int, ...]:
        """The ranks of the group; empty if they are missing or truncated."""
        value = self.values.get("Process Group Ranks", "")
        if isinstance(value, str):
            text = value.strip().removeprefix("[").removesuffix("]")
            if not text or "..." in text:
                return ()
            value = [int(part) if part.strip().isdecimal() and len(part) < 10 else part for part in text.split(",")]
        ranks = _ranks(value)
        if ranks is None or (ranks and num_ranks and len(ranks) != num_ranks):
            self._wrong("Process Group Ranks", f"{num_ranks or 'some'} different ranks")
            return ()
        return ranks

    def _wrong(self, key: str, expected: str, do: str = "") -> None:
        found = f"found {show(self.values[key])}" if key in self.values else "it is missing"
        self.faults.append(f"{key}: expected {expected}, {found}" + (f"; {do}" if do else ""))


def _ranks(value: Any) -> tuple[int, ...] | None:
    """Ranks in ascending order; None if the value is not a list of distinct ranks."""
    if not isinstance(value, list):
        return None
    items = cast(list[Any], value)
    if not all(isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < MAX_RANKS for rank in items):
        return None
    return tuple(sorted(set(items))) if len(set(items)) == len(items) else None


def groups_of(config: Any) -> dict[str, tuple[int, ...]]:
    """Ranks by group name, in either of the two formats that profilers write."""
    if isinstance(config, list):
        rows = [(row.get("pg_name"), row) for row in cast(list[Any], config) if isinstance(row, dict)]
    elif isinstance(config, dict):
        rows = [(name, row) for name, row in cast(dict[str, Any], config).items() if isinstance(row, dict)]
    else:
        return {}
    return {str(name): ranks for name, row in rows if (ranks := _ranks(cast(dict[str, Any], row).get("ranks")))}


def merge_traces(traces: Sequence[ChromeTrace]) -> Measurements:
    """The samples of one run: each collective once, timed by the rank that arrived last."""
    seen: dict[tuple[Any, ...], dict[int | str, TracedCollective]] = {}
    members: dict[tuple[Any, ...], set[int | str]] = {}
    for who, kernels in _by_rank(traces).items():
        repeats: Counter[tuple[Any, ...]] = Counter()
        for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
            group = (kernel.group, kernel.ranks, kernel.num_ranks)
            key = (*group, kernel.kind.value, kernel.num_bytes, kernel.seq)
            repeats[key] += 1
            seen.setdefault((*key, repeats[key]), {})[who] = kernel
            members.setdefault(group, set()).add(who)
    samples: list[Sample] = []
    num_partial = 0
    whole: set[tuple[Any, ...]] = set()
    for key, by_rank in seen.items():
        if len(by_rank) < len(members[key[:3]]):
            num_partial += 1
            continue
        whole.add(key[:3])
        kernel = min(by_rank.values(), key=lambda kernel: kernel.us)
        samples.append(Sample(kernel.kind, kernel.num_ranks, kernel.num_bytes, kernel.us, kernel.ranks))
    if faults := [_unmatched(group, members[group]) for group in members if group not in whole]:
        raise MeasurementError(faults)
    notes = tuple(_notes(traces, members, num_partial))
    return Measurements(tuple(samples), notes, compute=merge_compute(trace.compute for trace in traces))


def _by_rank(traces: Iterable[ChromeTrace]) -> dict[int | str, list[TracedCollective]]:
    found: dict[int | str, list[TracedCollective]] = {}
    for trace in traces:
        found.setdefault(trace.path if trace.rank is None else trace.rank, []).extend(trace.kernels)
    return found


def _unmatched(group: tuple[Any, ...], members: Iterable[int | str]) -> str:
    who = ", ".join(sorted(map(str, members)))
    return f"group {show(group[0])} of {group[2]} ranks: the traces of {who} share none of its collectives"


def _notes(
    traces: Sequence[ChromeTrace], members: Mapping[tuple[Any, ...], set[int | str]], num_partial: int
) -> list[str]:
    skipped: Counter[str] = Counter()
    for trace in traces:
        skipped.update(dict(trace.skipped))
    notes = [f"left out: {count} {what}" for what, count in sorted(skipped.items())]
    if num_partial:
        notes.append(f"left out: {num_partial} collectives that some traces of their group do not have")
    alone = sum(1 for ranks in members.values() if len(ranks) == 1)
    if alone:
        what = f"{alone} of {len(members)} groups were seen by one rank only"
        notes.append(f"{what}: their times include waiting for the others; give the traces of all ranks")
    return notes


def show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
