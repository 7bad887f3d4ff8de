"""Stream the results of matmuls into the reduce-scatters that use them.

Why: a reduce-scatter that waits for the whole matmul leaves the network idle; rows can be sent as they are computed.

Before::

    y: f32[8, 6] = mm(a, b)
    rs: f32[4, 6] = reduce_scatter(y, 'sum', 2, 'tp')
    w: f32[4, 6] = wait(rs)

After::

    a_rows: f32[2, 2, 2, 4] = view(a, [2, 2, 2, 4])
    ...
    y_0: f32[4, 6] = mm(a_0, b)
    rs_0: f32[2, 6] = reduce_scatter(y_0, 'sum', 2, 'tp')
    y_1: f32[4, 6] = mm(a_1, b)
    rs_1: f32[2, 6] = reduce_scatter(y_1, 'sum', 2, 'tp')
    rs_0_done: f32[2, 6] = wait(rs_0)
    rs_1_done: f32[2, 6] = wait(rs_1)
    rs_joined: f32[4, 6] = cat([rs_0_done, rs_1_done])

Each chunk holds the rows for one chunk of every rank's result. Casts, sums of several matmuls and other pointwise calls
in between run chunk by chunk too. The all-reduce of a matmul is split by rows; a chunk becomes a reduce-scatter and an
all-gather where these are faster than its all-reduce.

Declines: views that leave no single scattered dim; chunks that would be columns of the right operand; sizes that do not
split evenly; all-reduces of gradients, which bucketing serves better; streaming that would not save time.
Numerics: reassociates; a matmul of fewer rows may run another kernel, and a ring sums in an order that depends on the
offset in the buffer. Bytes on the wire: unchanged. Memory: a copy of the left operands, by chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.ops import Kind
from weft.passes.base import Numerics
from weft.passes.stream_pass import Site, StreamPass
from weft.plan.decision import Reason, Refusal
from weft.streaming.scatter_sites import read_scatter


@dataclass(frozen=True)
class FuseMatmulReduceScatters(StreamPass):
    """Scatter the rows of matmul results chunk by chunk as they are computed."""

    numerics = Numerics.REASSOCIATES
    kinds = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)

    sums: bool = True
    """Also stream sums of several products. Inductor's pass leaves them alone."""

    def read(self, collective: Collective, dag: Dag) -> Site | Refusal:
        site = read_scatter(collective, dag)
        if self.sums or isinstance(site, Refusal) or len(site.products) == 1:
            return site
        name = collective.launch.name
        what = f"{name} scatters a sum of {len(site.products)} products, and sums are left out"
        return Refusal(Reason.FORBIDDEN, what, name)
