"""Stream all-gathers into the matmuls that use them.

Why: a matmul that waits for the whole gather leaves the device idle; it can multiply rows as they arrive.

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

The pass follows all views between the wait and the matmul to find the gathered dim and the position of each element.
Several matmuls of one gather run chunk by chunk together. Other users of the gathered tensor get the joined chunks.

Declines: views that reorder or repeat the parts of the ranks; a matmul whose other operand, bias or scale depends on
the gathered tensor; one that sums over the gathered rows, or has them as columns; sizes that do not split evenly;
streaming that would not save time.
Numerics: reassociates; a matmul of fewer rows may run another kernel. Bytes on the wire: unchanged. Memory: while
chunks are joined, two copies of the matmul results, and of the gathered tensor if it has other users.
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
    """Multiply the rows of gathered tensors chunk by chunk as they arrive."""

    numerics = Numerics.REASSOCIATES
    kinds = (Kind.ALL_GATHER,)

    def read(self, collective: Collective, dag: Dag) -> Site | Refusal:
        return read_gather(collective, dag)
