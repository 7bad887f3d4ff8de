"""Spread additions to a few rows over several buffers, then sum the buffers.

Why: gradients of small embeddings add thousands of rows to a few. On a GPU these atomic additions contend for the same
rows.

Before::

    s: f32[16, 64] = index_put(x, [rows], values, True)

After::

    s_arange: i64[8192] = arange(8192)
    s_remainder: i64[8192] = remainder.Scalar(s_arange, 8)
    s_zeros: f32[8, 16, 64] = zeros([8, 16, 64], dtype=f32)
    s_index_put: f32[8, 16, 64] = index_put(s_zeros, [s_remainder, rows], values, True)
    s_sum: f32[16, 64] = sum.dim_IntList(s_index_put, [0])
    s_add: f32[16, 64] = add(x, s_sum)

The number of buffers is the average number of additions per row, rounded down to a power of two, from 2 to 128. With a
cluster, the buffers take at most a tenth of the device's memory.

Declines: indices that are few, multi-dimensional or of unknown size; fewer than two additions per row on average;
integers; buffers that do not fit.
Numerics: reassociates. Memory: the buffers, until they are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph

from weft.graph import ops
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.launches import is_written

PUT = ops.op_of("index_put")
MAX_PARTS = 128
"""Maximum number of buffers."""
SHARE = 10
"""The buffers may take up to 1/SHARE of the device's memory."""


@dataclass(frozen=True)
class SplitScatters(GraphwisePass):
    """Spread additions to a few rows over several buffers."""

    numerics = Numerics.REASSOCIATES

    min_rows: int = 4096
    """Minimum number of added rows; fewer are left alone."""

    def plan_one(self, graph: Graph, context: Context) -> Step:
        sites = [n for n in graph.nodes if n.target is PUT and ops.bind(n)["accumulate"] is True]
        if not sites:
            return self.step([], [])
        draft = Draft(graph)
        decisions: list[Decision] = []
        for node in sites:
            given = draft.bind(node)
            parts = self._parts(draft, node, given, context)
            if isinstance(parts, Refusal):
                decisions.append(self.decision(parts.reason, parts.sentence, node.name))
                continue
            replacement = _spread(draft, node, given, parts)
            refusal = draft.why_not_replace(node, replacement) or draft.replace({node: replacement}, [node])
            if refusal is not None:
                draft.forget()
                decisions.append(self.decision(refusal.reason, refusal.sentence, node.name, blocking=refusal.blocking))
                continue
            decisions.append(
                self.decision(Reason.APPLIED, f"spread the additions of {node.name} over {parts} buffers", node.name)
            )
        return self.step(draft.actions, decisions)

    def _parts(self, draft: Draft, node: AnyNode, given: dict[str, Any], context: Context) -> int | Refusal:
        """The number of buffers, or why the additions are not spread."""
        name, table = node.name, draft.value(given["self"])
        rows = [draft.value(index) if isinstance(index, AnyNode) else None for index in given["indices"]]
        index = rows[0] if len(rows) == 1 else None
        sizes = [*table.shape, *(index.shape if index is not None else [])]
        if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype.is_floating_point or not table.dim():
            return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: it does not add rows by a single index")
        if any(type(size) is not int for size in sizes) or str(index.dtype) in ("torch.bool", "torch.uint8"):
            return Refusal(Reason.UNKNOWN_SIZE, f"{name} stays: the number of rows it adds is not known")
        if not table.dtype.is_floating_point or is_written(draft, given["self"]):
            return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: it adds integers, or to a tensor that is written")
        shared = index.numel() // max(table.shape[0], 1)
        if index.numel() < self.min_rows or shared < 2:
            return Refusal(
                Reason.NO_GAIN, f"{name} stays: {index.numel()} additions to {table.shape[0]} rows contend little"
            )
        parts = min(MAX_PARTS, 1 << (shared.bit_length() - 1))
        memory = context.cluster.device.memory_bytes if context.cluster is not None else None
        size = table.numel() * table.element_size()
        while memory is not None and parts > 1 and parts * size > memory // SHARE:
            parts //= 2
        return (
            parts
            if parts > 1
            else Refusal(Reason.HOLDS_MEMORY, f"{name} stays: the buffers would take too much memory")
        )


def _spread(draft: Draft, node: AnyNode, given: dict[str, Any], parts: int) -> AnyNode:
    table, index = given["self"], given["indices"][0]
    value, rows = draft.value(table), draft.value(index)
    counted = draft.call("arange.default", rows.numel(), device=rows.device, before=node)
    part = draft.call("remainder.Scalar", counted, parts, before=node)
    shape = [parts, *value.shape]
    buffers = draft.call("zeros", shape, dtype=value.dtype, device=value.device, before=node)
    added = draft.call(PUT, buffers, [part, index], given["values"], True, before=node)
    return draft.call("add", table, draft.call("sum.dim_IntList", added, [0], before=node), before=node)
