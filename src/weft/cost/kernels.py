"""How fast single kernels run: constants of a device, by kind of kernel.

A product of k terms reaches k / (k + overhead) of the device's rate for large products: every tile pays for filling and
draining its pipeline. A product with few tiles uses only as many multiprocessors. A grouped product fills whole tiles
of each group, and every multiprocessor computes as many of them as the busiest one. Attention has rates of its own, by
kernel and direction, that rise with the number of positions and of blocks. Every kernel takes a fixed time to start and
to finish.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

TILE_ROWS, TILE_COLUMNS = 64, 128
"""The smallest tile that products are cut into, in elements of the result."""
GROUPED_TILE, SMALL_GROUPED_TILE = (128, 256), (64, 128)
"""Rows and columns of the tiles of grouped products: torch's kernels for Hopper, aten/src/ATen/native/cuda/GroupMM.cu.
Other architectures and dtypes are assumed to have the same."""
SMALL_GROUP = 128
"""Groups of at most this many rows or columns take the small tile (the same file)."""
SPLIT_TERMS = 1024
"""A product with too few tiles is split along its sum, into parts of at least this many terms."""
BLOCK_POSITIONS = 128
"""Query positions that one block of an attention kernel computes."""
NARROW_WIDTH = 64
"""Heads of at most this width run at the narrow rate."""


class ProductShape(NamedTuple):
    """A batch of products [rows, terms] x [terms, columns]."""

    batch: int
    rows: int
    columns: int
    terms: int
    groups: int = 0
    """Groups that the rows are divided into, evenly as far as anyone knows; 0: not a grouped product."""

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.columns * self.terms

    def occupied_flops(self, num_multiprocessors: int) -> int:
        """The flops of a grouped product if all tiles were full, and all multiprocessors as long busy as the busiest.

        The flops themselves for other products.
        """
        if not self.groups:
            return self.flops
        rows = -(-self.rows // self.groups)
        is_small = rows <= SMALL_GROUP or self.columns <= SMALL_GROUP
        tile_rows, tile_columns = SMALL_GROUPED_TILE if is_small else GROUPED_TILE
        tiles = self.groups * -(-rows // tile_rows) * -(-self.columns // tile_columns)
        share = num_multiprocessors or 1
        return 2 * -(-tiles // share) * share * tile_rows * tile_columns * self.terms

    def share_of_processors(self, num_multiprocessors: int) -> float:
        """The share of the device that the product's tiles can occupy."""
        if self.groups:
            return 1.0  # counted in `occupied_flops`
        tiles = self.batch * -(-self.rows // TILE_ROWS) * -(-self.columns // TILE_COLUMNS)
        parts = tiles * max(1, self.terms // SPLIT_TERMS)
        return min(1.0, parts / num_multiprocessors) if num_multiprocessors else 1.0


class AttentionShape(NamedTuple):
    """One attention; the flops count what its kernel computes."""

    flops: int
    num_heads: int
    """Batch times query heads."""
    num_positions: int
    width: int
    is_backward: bool


@dataclass(frozen=True)
class AttentionRate:
    """The rate of one attention kernel in one direction."""

    tflops: float
    """Rate of long sequences in many blocks, heads of width 128."""
    half_positions: float = 0.0
    """Number of positions at which half of the rate is reached."""
    half_blocks: float = 0.0
    """Number of blocks at which half of the rate is reached."""
    narrow: float = 1.0
    """Share of the rate for heads of width 64 and less."""

    def ns(self, shape: AttentionShape) -> int:
        """The time of an attention."""
        blocks = shape.num_heads * -(-shape.num_positions // BLOCK_POSITIONS)
        rate = self.tflops * (self.narrow if shape.width <= NARROW_WIDTH else 1.0)
        rate *= shape.num_positions / (shape.num_positions + self.half_positions)
        rate *= blocks / (blocks + self.half_blocks)
        per_us = max(1, round(rate * 1e6))  # whole numbers, so that every rank computes the same
        return -(-shape.flops * 1000 // per_us)


@dataclass(frozen=True)
class AttentionKernel:
    """An implementation of attention."""

    name: str
    """`flash2`, `flash3` or `cudnn`."""
    forward: AttentionRate
    backward: AttentionRate


@dataclass(frozen=True)
class HostTimes:
    """Times that the host takes to issue work, in microseconds."""

    operator_us: float = 0.0
    """One operator of eager execution, its bookkeeping for gradients included."""
    view_us: float = 0.0
    """One view of eager execution."""
    policy_us: float = 0.0
    """The same for an operator or view under a checkpointing policy, in addition: torch asks the policy in Python."""
    launch_us: float = 0.0
    """One kernel of a compiled graph."""
    collective_us: float = 0.0
    """One collective, or one wait for it."""
    optimizer_us: float = 0.0
    """One operator for one tensor of an optimizer that runs over lists of tensors."""
