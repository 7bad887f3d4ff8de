"""Messages between the caller and the processes of real ranks.

Tensors are sent as the bytes of their storages, so tensors that share a storage still share it on the other side. A
graph is sent as its listing, which the other side parses and never executes as code.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.compat import FakeTensor, is_process_group, storage_key
from weft.errors import VerificationError, compose
from weft.verification.rank import substitute, view_of


@dataclass(frozen=True)
class Record:
    """One tensor: its storage, and its position and layout in it."""

    storage: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """A value with a record for each tensor, and the bytes of the storages."""

    value: Any
    storages: tuple[bytes, ...]


@dataclass(frozen=True)
class Prepare:
    """Create process groups; every rank of the world does so in this order."""

    groups: tuple[tuple[str, tuple[int, ...]], ...]
    """The identity and the ranks of each group."""


@dataclass(frozen=True)
class Job:
    """Run a graph, several times from the same inputs."""

    listing: str
    tensors: Packed
    """The constants by path and the inputs, packed together since an input may share the memory of a constant."""
    groups: dict[str, tuple[str, tuple[int, ...]]]
    """For each canonical name, the identity and the ranks of that group on this rank."""
    seed: int
    repeat: int


@dataclass(frozen=True)
class Answer:
    """The answer to a message: the packed results of a job, or an error and the node at which it happened."""

    results: tuple[Packed, ...] = ()
    error: str = ""
    node: str = ""


def pack(value: Any) -> Packed:
    """Replace the tensors of a value by records, and collect the bytes of their storages."""
    numbers: dict[int, int] = {}
    storages: list[bytes] = []

    def record(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return _plain(leaf)
        if isinstance(leaf, FakeTensor) or leaf.device.type == "meta":
            what = "an input or constant has no values (it is a fake or meta tensor)"
            raise VerificationError(compose("real ranks", what, do="give real tensors"))
        key = storage_key(leaf)
        if key not in numbers:
            numbers[key] = len(storages)
            raw = torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(leaf.untyped_storage())
            storages.append(raw.cpu().numpy().tobytes())
        return Record(numbers[key], leaf.dtype, int(leaf.storage_offset()), tuple(leaf.shape), tuple(leaf.stride()))

    return Packed(substitute(value, record), tuple(storages))


def _plain(leaf: Any) -> Any:
    """A leaf that needs no packing. A process group is not sent, since each rank has its own."""
    if leaf is None or isinstance(leaf, bool | int | float | complex | str):
        return leaf
    if is_process_group(leaf):
        return None
    what = f"a {type(leaf).__name__} cannot be sent to another process"
    raise VerificationError(compose("real ranks", what, do="use the virtual cluster, or tensors and numbers only"))


def unpack(packed: Packed) -> Any:
    """The value that was packed."""
    storages = [_tensor_of(data) for data in packed.storages]

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, Record):
            return leaf
        return view_of(storages[leaf.storage], leaf.dtype, leaf.offset, leaf.size, leaf.stride)

    return substitute(packed.value, tensor)


def _tensor_of(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()  # `clone` aligns the data for every dtype


class Progress:
    """The node that each rank is running, in a file that all ranks map, so that it can be read even if a rank hangs."""

    SLOT = 256

    def __init__(self, path: Path, num_ranks: int) -> None:
        size = num_ranks * self.SLOT
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def mark(self, rank: int, name: str) -> None:
        start = rank * self.SLOT
        self._map[start : start + self.SLOT] = name.encode()[: self.SLOT].ljust(self.SLOT, b"\0")

    def read(self, rank: int) -> str:
        start = rank * self.SLOT
        return self._map[start : start + self.SLOT].rstrip(b"\0").decode(errors="replace")
