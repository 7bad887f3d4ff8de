"""TrainingLayout: one way of dividing a model and its data among all ranks of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from weft.zoo.parallel.strategies import Strategy, strategy_of

TITLES = {
    "ddp": "DDP",
    "fsdp": "FSDP",
    "hsdp": "HSDP",
    "fsdp-tp": "FSDP x TP",
    "hsdp-tp": "HSDP x TP",
    "tp": "TP",
    "ep-fsdp": "FSDP x EP",
}


@dataclass(frozen=True)
class TrainingLayout:
    """One way of dividing a model and its data among all ranks."""

    parallel: str
    """A parallelism of the zoo: a key of `TITLES`."""
    mesh: tuple[tuple[str, int], ...]
    """Axes and sizes, the last one varying fastest."""
    reshard: str = "always"
    """`always` or `never`."""
    checkpoint: str = "none"

    @property
    def strategy(self) -> Strategy:
        return strategy_of(self.parallel)

    @property
    def num_data_ranks(self) -> int:
        """Ranks that see different data."""
        return prod(size for axis, size in self.mesh if axis in self.strategy.data_axes)

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of the state."""
        return prod(size for axis, size in self.mesh if axis in self.strategy.shard)

    @property
    def num_tensor_ranks(self) -> int:
        return prod(size for axis, size in self.mesh if axis == self.strategy.tensor)

    @property
    def reduces_last(self) -> bool:
        """Whether only the last of several microbatches reduces gradients, as under DDP's `no_sync`."""
        return self.parallel == "ddp"

    @property
    def shape(self) -> str:
        """The mesh for people: `HSDP 8 x 8`."""
        return f"{TITLES[self.parallel]} {' x '.join(str(size) for _, size in self.mesh)}"

    @property
    def text(self) -> str:
        """All of it for people: `HSDP 8 x 8, reshard always, selective`."""
        reshard = f", reshard {self.reshard}" if self.strategy.shard else ""
        return f"{self.shape}{reshard}, {'no' if self.checkpoint == 'none' else self.checkpoint} checkpointing"
