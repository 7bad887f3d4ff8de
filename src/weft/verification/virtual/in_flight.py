"""The tensors that a rank has in flight, by the storages of the actual tensors.

Contract: independent of `graph.effects`; this module knows nothing about views or schemas. Until its wait, a launch
reads the tensors it sends and writes those it receives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from weft.compat import storage_key
from weft.verification.virtual.meetings import Meeting


@dataclass(frozen=True, eq=False)
class TensorInFlight:
    """One tensor of a launch that is not complete."""

    launch: Node
    meeting: Meeting
    position: int
    """The position of the tensor in its launch."""
    sent: Tensor | None
    """The buffer that is read until the wait; None for a recv."""
    result: Tensor

    @property
    def is_complete(self) -> bool:
        return not self.meeting.missing

    def land(self, rank: int) -> None:
        """Copy the received data into the result."""
        received = self.meeting.take(rank, self.position)
        self.result.copy_(received.reshape(self.result.shape))


class TensorsInFlight:
    """All tensors in flight on one rank. They keep their storages alive, so that storage keys stay valid."""

    def __init__(self) -> None:
        self._reads: dict[int, list[TensorInFlight]] = {}
        self._writes: dict[int, list[TensorInFlight]] = {}
        self._open: dict[TensorInFlight, None] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def __iter__(self) -> Iterator[TensorInFlight]:
        return iter(list(self._open))

    def add(self, flight: TensorInFlight) -> None:
        self._open[flight] = None
        self._writes.setdefault(storage_key(flight.result), []).append(flight)
        if flight.sent is not None:
            self._reads.setdefault(storage_key(flight.sent), []).append(flight)

    def close(self, flight: TensorInFlight) -> None:
        del self._open[flight]
        tables = [(self._writes, flight.result)] + ([(self._reads, flight.sent)] if flight.sent is not None else [])
        for table, tensor in tables:
            key = storage_key(tensor)
            table[key].remove(flight)
            if not table[key]:
                del table[key]

    def writing(self, tensor: Tensor) -> list[TensorInFlight]:
        """The launches' tensors that will be received into the storage of this tensor."""
        return self._writes.get(storage_key(tensor), []) if self._writes else []

    def reading(self, tensor: Tensor) -> list[TensorInFlight]:
        """The launches' tensors that are sent from the storage of this tensor."""
        return self._reads.get(storage_key(tensor), []) if self._reads else []
