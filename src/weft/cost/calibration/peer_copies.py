"""Copies between GPUs in a Chrome trace: the times of copies of several sizes, and of barriers of symmetric memory.

A copy from or to the memory of another GPU is a `Memcpy PtoP` event with its bytes. A barrier of symmetric memory is a
kernel of that name. Ranks that share one GPU copy within it; such copies look like any other and are not found.

Contract: nothing is executed, and no fault is raised: malformed events are ignored. The transport is the same for any
order of the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from weft.cost.calibration.event_fields import NS_PER_US, arguments_of, span_of, whole
from weft.cost.calibration.robust_fit import fit_times
from weft.cost.levels import Link, Transport

COPY, BARRIER = "memcpy ptop", "symmetric_memory::barrier_kernel"
"""Parts of the names of events, in lower case."""
SHORTEST = 4
"""The median of the shortest quarter of the barriers counts: the others also wait for peers that are late."""
MAX_BYTES = 1 << 60


@dataclass(frozen=True)
class PeerCopies:
    """Copies between GPUs, and barriers, as measured by traces."""

    copies: tuple[tuple[int, float], ...] = ()
    """Bytes and microseconds of each."""
    barriers_us: tuple[float, ...] = ()

    def transport(self) -> Transport | None:
        """The fitted transport; None without two sizes whose times grow with their bytes."""
        by_size: dict[int, list[float]] = {}
        for num_bytes, us in self.copies:
            by_size.setdefault(num_bytes, []).append(us)
        if len(by_size) < 2:
            return None
        columns = np.array([[1.0, float(size)] for size in sorted(by_size)])
        times = np.array([median(by_size[size]) for size in sorted(by_size)])
        hop_us, us_per_byte = fit_times(columns, times).tolist()
        if us_per_byte <= 0:
            return None
        shortest = sorted(self.barriers_us)[: -(-len(self.barriers_us) // SHORTEST)]
        return Transport(Link(median(shortest) if shortest else 0.0, hop_us, 1e-3 / us_per_byte))


NO_PEER_COPIES = PeerCopies()


def merge_peer_copies(found: Iterable[PeerCopies]) -> PeerCopies:
    """Merge several ranks."""
    each = list(found)
    copies = sorted(copy for one in each for copy in one.copies)
    return PeerCopies(tuple(copies), tuple(sorted(us for one in each for us in one.barriers_us)))


class PeerCopyReader:
    """Collects the copies and barriers of one trace, event by event."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, float]] = []
        self.barriers_us: list[float] = []

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event of the device, if it is a copy between GPUs or a barrier."""
        name, span = str(event.get("name", "")).lower(), span_of(event)
        if span is None or span[1] <= span[0]:
            return
        us = (span[1] - span[0]) / NS_PER_US
        if BARRIER in name:
            self.barriers_us.append(us)
        elif name.startswith(COPY):
            num_bytes = whole(arguments_of(event).get("bytes"))
            if num_bytes is not None and 0 < num_bytes < MAX_BYTES:
                self.copies.append((num_bytes, us))

    def finish(self) -> PeerCopies:
        return PeerCopies(tuple(self.copies), tuple(self.barriers_us))
