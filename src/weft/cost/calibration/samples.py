"""Samples: measured times of collectives, as the readers of traces and tables give them to `fit`.

Contract: readers execute nothing. One MeasurementError lists all faults of a file with their lines.
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
"""Faults that an error shows; the rest is counted."""
MAX_RANKS = 1_000_000
MAX_US = 1e12
MIN_US = 1e-3
"""Profilers count in nanoseconds: shorter times were not measured."""
MAX_MESSAGE_BYTES = 1 << 60
GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Sample:
    """One measured collective."""

    kind: Kind
    num_ranks: int
    num_bytes: int
    """Size of the full tensor, gathered or not yet scattered."""
    us: float
    ranks: tuple[int, ...] = ()
    """Global ranks of the group; empty if unknown."""


@dataclass(frozen=True)
class Measurements:
    """The contents of files: samples, and notes of their reader."""

    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()
    ranks_per_node: int | None = None
    """None if the files do not say."""
    compute: ComputeTrace = NO_COMPUTE
    """Compute, as measured by traces."""


class MeasurementError(ReadError):
    """Files without measurements, or with malformed ones; lists every fault with its place."""

    def __init__(self, faults: Iterable[str], who: str = "calibrate", what: str = "nothing can be fitted") -> None:
        self.faults = tuple(faults)
        rest = len(self.faults) - MAX_FAULTS
        shown = [*self.faults[:MAX_FAULTS], *([f"... and {rest} more"] if rest > 0 else [])]
        super().__init__(compose(who, what, where=shown))


def open_measurements(path: Path) -> IO[bytes]:
    """Open a file, decompressed if it is a gzip file. May raise an OSError."""
    with path.open("rb") as file:
        is_packed = file.read(2) == GZIP
    return cast(IO[bytes], gzip.open(path)) if is_packed else path.open("rb")


def kind_named(name: str) -> Kind | None:
    """The kind that a profiler or a test means by a name; None for kinds without a price."""
    plain = name.lower().replace("_", "")
    words = {
        "allgather": Kind.ALL_GATHER,
        "reducescatter": Kind.REDUCE_SCATTER,
        "allreduce": Kind.ALL_REDUCE,
        "alltoall": Kind.ALL_TO_ALL,
        "broadcast": Kind.BROADCAST,
    }
    return next((kind for word, kind in words.items() if word in plain), None)
