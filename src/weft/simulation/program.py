"""Program: a graph as the execution model sees it, shared by the simulator, the bounds and the planner.

Contract: plain data, integers only, times in nanoseconds. Operations are numbered like the nodes of the Dag that the
program was built from. One compute stream runs operations in program order. Each group has a queue that runs its
collectives in launch order; queues on the same link share its bandwidth. Collectives that a group runs as copies
through symmetric memory have a second queue. Copies to host memory and copies from there have a queue each; they are
launched and waited for like collectives.

    compute   takes `duration_ns` on the compute stream
    launch    takes no time on the stream except the gap; its collective takes `duration_ns` if alone on the link
    wait      blocks the stream until the collectives that it waits for have ended

The host issues operations one after another, ahead of the stream. An operation starts on the stream no earlier than the
host has issued it. Without host times the host is always far enough ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MILLION = 1_000_000
"""Slowdowns are integers in parts per million (`_ppm`), so that no time is ever a float."""


class OpKind(IntEnum):
    """How the execution model treats an operation."""

    NOTHING = 0
    """A view, an input, a number: it takes no time and needs no kernel."""
    COMPUTE = 1
    LAUNCH = 2
    WAIT = 3


@dataclass(frozen=True)
class Queue:
    """The collectives of one group over NCCL, those that it runs as copies, or the copies to or from host memory."""

    group: str
    """Canonical name of the group, or the direction of the copies."""
    link: int
    """Index of the link that it uses."""
    is_copies: bool = False
    """Whether copies do the work: no compute slows it, and it slows compute only by `Program.sm_share_ppm`."""
    is_host: bool = False
    """Whether it copies to or from host memory. It has its link to itself."""
    is_to_host: bool = False
    """Whether its copies leave the device, so that launching one early holds no memory for its result."""


@dataclass(frozen=True)
class Program:
    """Operations in graph order, and the constraints on other orders."""

    names: tuple[str, ...]
    kinds: tuple[OpKind, ...]
    duration_ns: tuple[int, ...]
    """Time of a compute operation, or of a launch's collective if alone on its link; 0 for other operations."""
    preds: tuple[tuple[int, ...], ...]
    """Operations that must come before, in any order that computes the same: data and effect edges."""
    queue: tuple[int, ...]
    """Queue index of a launch; -1 for other operations."""
    waits_for: tuple[tuple[int, ...], ...]
    """Launches that a wait completes; empty for other operations."""
    queues: tuple[Queue, ...]
    links: tuple[str, ...]
    """Names of the links."""
    drains: tuple[bool, ...]
    """Operations that read device data on the host: the stream runs empty before the next kernel is issued."""
    launch_gap_ns: int = 0
    """Time between two kernels on the compute stream."""
    slowdown_ppm: int = 0
    """Slowdown of compute while a collective runs that is not made of copies, in millionths."""
    collective_slowdown_ppm: int = 0
    """Slowdown of collectives while compute runs, in millionths. It does not apply to copies."""
    allocates: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each operation, the (storage, bytes) that it allocates; inputs allocate their own storages."""
    uses: tuple[tuple[int, ...], ...] = ()
    """For each operation, the storages that it needs; a launch holds them until its wait. The last use frees them."""
    kept: frozenset[int] = frozenset()
    """Storages that are never freed: those of inputs, constants and outputs."""
    given: frozenset[int] = frozenset()
    """Storages that exist before the first operation: those of inputs and constants. They are kept, too."""
    latency_ns: tuple[int, ...] = ()
    """For each launch, the most that merging can save of it; 0 for other operations. A bucket takes at least the
    longest of these and the rest of each member. It is the duration minus the time of the bytes at the highest
    bandwidth, which is more than the time of an empty message if large messages reach a higher bandwidth. Empty:
    unknown, so bounds do not allow merging."""
    kernel: tuple[int, ...] = ()
    """The kernel that each operation is part of; -1 for none. No gap separates two consecutive parts of a kernel.
    Empty: each operation is its own kernel."""
    host_ns: tuple[int, ...] = ()
    """Time that the host takes to issue each operation. Empty: none."""
    symmetric_bytes: int = 0
    """Symmetric memory of all groups. The ranks hold it between steps, and torch's allocator does not count it."""
    sm_share_ppm: tuple[int, ...] = ()
    """For each launch of copies, the share of the multiprocessors that it takes from compute, in millionths, below one
    million; 0 for other operations. Empty: none takes any."""
    underpriced: tuple[int, ...] = ()
    """Operations whose time is known only in part, or not at all: a size, what a call computes, or the peak of its
    dtype is unknown. Empty for a device that does not describe all of compute."""

    @property
    def num_groups(self) -> int:
        """Number of groups whose ranks communicate."""
        return len({queue.group for queue in self.queues if not queue.is_host})
