"""Program: a graph as the execution model sees it. What simulator, bounds and planner share.

Contract: plain data, integers only, times in nanoseconds. Operations are numbered as the nodes of the Dag it was made
from. One compute stream runs operations in program order. Each group has a queue that runs its collectives in the order
of their launches; queues that use one link share its bandwidth.

    compute   takes `duration_ns` on the compute stream
    launch    takes no time on the stream (but the gap); its collective takes `duration_ns` alone on its queue
    wait      blocks the stream until the collectives that it waits for have ended
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MILLION = 1_000_000
"""Slowdowns are integers in parts per million (`_ppm`), so that no time is ever a float."""


class OpKind(IntEnum):
    """What an operation is to the model."""

    NOTHING = 0
    """A view, an input, a number: no time, no kernel."""
    COMPUTE = 1
    LAUNCH = 2
    WAIT = 3


@dataclass(frozen=True)
class Queue:
    """The collectives of one group."""

    group: str
    """Canonical name."""
    link: int
    """Number of the link that it uses."""


@dataclass(frozen=True)
class Program:
    """Operations in the order of the graph, and what keeps them in order."""

    names: tuple[str, ...]
    kinds: tuple[OpKind, ...]
    duration_ns: tuple[int, ...]
    """Of a compute operation on the stream, of a launch's collective alone on its queue; else 0."""
    preds: tuple[tuple[int, ...], ...]
    """Operations that must come before, in any order that computes the same: data and effect edges."""
    queue: tuple[int, ...]
    """The number of a launch's queue; -1 for what is no launch."""
    waits_for: tuple[tuple[int, ...], ...]
    """The launches that a wait completes; empty for what is no wait."""
    queues: tuple[Queue, ...]
    links: tuple[str, ...]
    """Names of the links that queues share."""
    drains: tuple[bool, ...]
    """Operations that read device data on the host: the stream runs empty before the next one is issued."""
    launch_gap_ns: int = 0
    """Between two kernels on the compute stream."""
    slowdown_ppm: int = 0
    """By how many millionths compute slows while a collective runs."""
    collective_slowdown_ppm: int = 0
    """By how many millionths collectives slow while compute runs."""
    allocates: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each operation the (storage, bytes) that come to life with it; storages of inputs with their inputs."""
    uses: tuple[tuple[int, ...], ...] = ()
    """For each operation the storages that it needs; a launch holds them until its wait. The last use frees one."""
    kept: frozenset[int] = frozenset()
    """Storages that are never freed: of inputs, constants and outputs."""
    given: frozenset[int] = frozenset()
    """Storages that are there before the first operation: of inputs and constants. Each is kept too."""
    latency_ns: tuple[int, ...] = ()
    """For each launch the most that merging saves of it, else 0: a bucket takes at least the longest of these and the
    rest of each member. Where larger ones have more bandwidth that is more than the time of sending nothing: all but
    the bytes at the highest bandwidth. Empty: not known, and bounds leave merging out."""
    kernel: tuple[int, ...] = ()
    """The kernel that each operation is part of, -1 for none: no gap passes between two parts of one kernel where
    nothing is issued between them. Empty: each one is a kernel of its own."""
