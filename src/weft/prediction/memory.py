"""Memory of a step as torch's allocator counts it: peak allocated and reserved bytes, by part.

The simulated program decides the order of allocations, and what takes memory at all. Allocated memory is counted
in blocks (`caching_allocator.py`); reserved memory is the sum of the peaks of all streams. The workspace of cuBLAS is
part of both. The CUDA context, the buffers of NCCL and symmetric memory are outside of both, but they take memory of
the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.cost.device import Device
from weft.graph.dag import Dag
from weft.prediction.caching_allocator import CachingAllocator, rounded
from weft.prediction.owners import DEFAULT_STREAM, MemoryPart, Owner, owners_of
from weft.quantities import exact_size_text, size_text
from weft.simulation.program import OpKind, Program

NUM_HANDLES = 2
"""cuBLAS handles with a workspace: one for the thread of forward, one for the thread of backward."""
WORKSPACE_BYTES = 32 << 20
"""Workspace of one handle since Hopper: pytorch issue 120925 and aten/src/ATen/cuda/CublasHandlePool.cpp."""
OLD_WORKSPACE_BYTES = 8_519_680
"""The same before Hopper."""
BEFORE_HOPPER = ("V100", "A100", "A10", "L40", "T4")
CONTEXT_BYTES = 500_000_000
"""CUDA context with lazy loading: 300 to 500 MB, pytorch issue 107667."""
NCCL_BYTES = 688_000_000
"""Buffers of one NCCL communicator of more than two ranks: measured on A100, nccl issue 964."""


@dataclass(frozen=True)
class StepMemory:
    """The memory that one rank needs."""

    allocated_bytes: int
    """Peak, as `torch.cuda.max_memory_allocated` counts it."""
    reserved_bytes: int
    """Peak, as `torch.cuda.max_memory_reserved` counts it with expandable segments."""
    parts: dict[str, int]
    """Allocated bytes by part at the moment of the peak."""
    streams: dict[str, int]
    """Reserved bytes by stream, without the workspace."""
    outside: dict[str, int]
    """Estimates of what the allocator does not count: the CUDA context, the buffers of NCCL, symmetric memory."""
    device_bytes: int | None
    """Memory of the device; None if the cluster does not state it."""

    @property
    def needed_bytes(self) -> int:
        """Memory of the device that the step takes: reserved by the allocator, and outside of it."""
        return self.reserved_bytes + sum(self.outside.values())

    @property
    def least_bytes(self) -> int:
        """Memory of the device without which the step cannot run: when it is full, torch gives back unused pages."""
        return self.allocated_bytes + sum(self.outside.values())

    @property
    def does_not_fit(self) -> str | None:
        """One sentence if the device has less memory than the step needs."""
        return does_not_fit(self.needed_bytes, self.device_bytes)


def outside_of(program: Program) -> dict[str, int]:
    """Estimates of the memory of the device that torch's allocator does not count, by part."""
    nccl, symmetric = NCCL_BYTES * program.num_groups, program.symmetric_bytes
    parts = {"CUDA context": CONTEXT_BYTES, "NCCL buffers": nccl, "symmetric memory": symmetric}
    return {part: num_bytes for part, num_bytes in parts.items() if num_bytes}


def does_not_fit(num_bytes: int, device_bytes: int | None) -> str | None:
    """One sentence if a step needs more memory than the device has."""
    if device_bytes is None or num_bytes <= device_bytes:
        return None
    return f"does not fit: needs {size_text(num_bytes)}, the device has {exact_size_text(device_bytes)}"


class Held(NamedTuple):
    """Memory that a step holds without an operation that uses it."""

    first: int
    """The operation before which it is allocated."""
    last: int
    """The operation after which it is freed."""
    num_bytes: int


def memory_of_graph(dag: Dag, program: Program, device: Device) -> StepMemory:
    """The memory of one graph that runs as it is."""
    return memory_of(program, owners_of([dag], None, device.execution), device)


def memory_of(program: Program, owners: Sequence[Owner], device: Device, held: Sequence[Held] = ()) -> StepMemory:
    """The memory of a program in its own order; `owners` has one entry for each operation."""
    allocator = CachingAllocator()
    sizes, last_use = _lifetimes(program)
    freed_after: dict[int, list[int]] = {}
    for storage, op in last_use.items():
        freed_after.setdefault(op, []).append(storage)
    in_use: Counter[MemoryPart] = Counter()
    now = peak = 0
    at_peak: Counter[MemoryPart] = Counter()

    def allocate(op: int, storage: int, num_bytes: int) -> None:
        nonlocal now
        part, stream = owners[op]
        allocator.allocate((storage, op), num_bytes, stream)
        in_use[part] += rounded(num_bytes)
        now += rounded(num_bytes)

    for op, made in enumerate(program.allocates):
        for storage, num_bytes in made:
            if storage in program.given:
                allocate(op, storage, num_bytes)
    held_from: dict[int, list[Held]] = {}
    held_until: dict[int, list[Held]] = {}
    for each in held:
        held_from.setdefault(each.first, []).append(each)
        held_until.setdefault(each.last, []).append(each)
    for op, made in enumerate(program.allocates):
        for begun in held_from.get(op, ()):
            allocator.allocate(begun, begun.num_bytes, DEFAULT_STREAM)
            in_use[MemoryPart.ACTIVATIONS] += rounded(begun.num_bytes)
            now += rounded(begun.num_bytes)
        for storage, num_bytes in made:
            if storage in sizes and storage not in program.given:
                allocate(op, storage, num_bytes)
        if now > peak:
            peak, at_peak = now, in_use.copy()
        for ended in held_until.get(op, ()):
            allocator.free(ended)
            in_use[MemoryPart.ACTIVATIONS] -= rounded(ended.num_bytes)
            now -= rounded(ended.num_bytes)
        for storage in freed_after.get(op, ()):
            for maker, num_bytes in sizes[storage]:
                allocator.free((storage, maker))
                in_use[owners[maker][0]] -= rounded(num_bytes)
                now -= rounded(num_bytes)
    workspace = _workspace_bytes(program, device)
    streams = allocator.reserved_bytes()
    parts = {part.value: at_peak[part] for part in MemoryPart if at_peak[part]}
    if workspace:
        parts[MemoryPart.WORKSPACE.value] = workspace
    return StepMemory(
        peak + workspace,
        sum(streams.values()) + workspace,
        parts,
        streams,
        outside_of(program),
        device.memory_bytes,
    )


def _lifetimes(program: Program) -> tuple[dict[int, list[tuple[int, int]]], dict[int, int]]:
    """Allocations (operation, bytes) of each storage that takes memory, and the operation after which it is freed."""
    until = list(range(len(program.kinds)))
    waited: set[int] = set()
    for op, launches in enumerate(program.waits_for):
        for launch in launches:
            if launch not in waited:
                until[launch] = op
                waited.add(launch)
    sizes: dict[int, list[tuple[int, int]]] = {}
    last_use: dict[int, int] = {}
    forever = set(program.kept)
    for op, made in enumerate(program.allocates):
        touched = (*program.uses[op], *(storage for storage, _ in made))
        for storage, num_bytes in made:
            sizes.setdefault(storage, []).append((op, num_bytes))
        if program.kinds[op] is OpKind.LAUNCH and op not in waited:
            forever.update(touched)
        for storage in touched:
            last_use[storage] = max(last_use.get(storage, 0), until[op])
    return sizes, {storage: op for storage, op in last_use.items() if storage in sizes and storage not in forever}


def _workspace_bytes(program: Program, device: Device) -> int:
    has_compute = any(kind is OpKind.COMPUTE for kind in program.kinds)
    if not has_compute or not device.name:
        return 0
    is_old = any(name in device.name for name in BEFORE_HOPPER)
    return NUM_HANDLES * (OLD_WORKSPACE_BYTES if is_old else WORKSPACE_BYTES)
