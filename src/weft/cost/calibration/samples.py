"""Samples: how long collectives took somewhere, as the readers of traces and tables give them to `calibrate.py`.

Contract: readers execute nothing, and tell every fault of a file at once, with its line, as a MeasurementError.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from weft.cost.calibration.compute_trace import NO_COMPUTE, ComputeTrace
from weft.errors import ReadError, compose
from weft.graph.ops import Kind

MAX_FAULTS = 50
"""That an error shows; the rest is counted."""
MAX_RANKS = 1_000_000
MAX_US = 1e12
MIN_US = 1e-3
"""Profilers count nanoseconds: what took less took no time that was measured."""
MAX_MESSAGE_BYTES = 1 << 60
GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Sample:
    """One collective that was measured."""

    kind: Kind
    num_ranks: int
    num_bytes: int
    """Of the full tensor, gathered or not yet scattered."""
    us: float
    ranks: tuple[int, ...] = ()
    """Global ranks of the group; empty where they are not known."""


@dataclass(frozen=True)
class Measurements:
    """What files hold: samples, and what their reader wants to be said of them."""

    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()
    ranks_per_node: int | None = None
    """Where the files say it."""
    compute: ComputeTrace = NO_COMPUTE
    """What traces say of compute."""


class MeasurementError(ReadError):
    """Files that hold no measurements, or malformed ones: every fault, each with its place."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        rest = len(self.faults) - MAX_FAULTS
        shown = [*self.faults[:MAX_FAULTS], *([f"... and {rest} more"] if rest > 0 else [])]
        super().__init__(compose("calibrate", "nothing can be fitted", where=shown))


def open_measurements(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked if it is a gzip file. May raise an OSError."""
    with path.open("rb") as file:
        is_packed = file.read(2) == GZIP
    return cast(IO[bytes], gzip.open(path)) if is_packed else path.open("rb")


def kind_named(name: str) -> Kind | None:
    """The kind that a profiler or a test means by a name; None for those that have no price."""
    plain = name.lower().replace("_", "")
    words = {
        "allgather": Kind.ALL_GATHER,
        "reducescatter": Kind.REDUCE_SCATTER,
        "allreduce": Kind.ALL_REDUCE,
        "alltoall": Kind.ALL_TO_ALL,
        "broadcast": Kind.BROADCAST,
    }
    return next((kind for word, kind in words.items() if word in plain), None)
