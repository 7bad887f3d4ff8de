"""Stream all-gathers through the products that take what they gather.

Why: a product that waits for all of a gather leaves the device idle; its rows can be multiplied as they arrive.

Before::

    ag: f32[8, 4] = all_gather(x, 2, 'tp')
    w: f32[8, 4] = wait(ag)
    y: f32[8, 6] = mm(w, b)

After::

    x_0: f32[2, 4] = slice(x, 0, 0, 2)
    x_1: f32[2, 4] = slice(x, 0, 2, 4)
    ag_0: f32[4, 4] = all_gather(x_0, 2, 'tp')
    ag_1: f32[4, 4] = all_gather(x_1, 2, 'tp')
    ag_0_done: f32[4, 4] = wait(ag_0)
    y_0: f32[4, 6] = mm(ag_0_done, b)
    ag_1_done: f32[4, 4] = wait(ag_1)
    y_1: f32[4, 6] = mm(ag_1_done, b)
    ...

The dim that is gathered, and where each element goes, are computed from all views between the wait and the product.
Several products of one gather run chunk by chunk side by side; whoever else takes what was gathered gets it joined.

Declines: a chain that takes the parts of ranks in another order or twice; a product whose other operand, bias or scale
needs what is gathered; one that sums over the rows or has them as columns; sizes that do not split; what would not pay.
Numerics: reassociates: a product of fewer rows may run another kernel. Bytes on the wire: unchanged. Memory: results of
products, and what is gathered if somebody else takes it, are there twice while they are joined.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.ops import Kind
from weft.passes.base import Numerics
from weft.passes.stream_pass import Site, StreamPass
from weft.plan.decision import Refusal
from weft.streaming.gather_sites import read_gather


@dataclass(frozen=True)
class FuseAllGatherMatmuls(StreamPass):
    """Multiply the rows of gathered tensors chunk by chunk, as they arrive."""

    numerics = Numerics.REASSOCIATES
    kinds = (Kind.ALL_GATHER,)

    def read(self, collective: Collective, dag: Dag) -> Site | Refusal:
        return read_gather(collective, dag)
