"""Decides whether rounding explains the difference of two runs: counts terms, and runs both sides again in f64.

Contract: if two runs differ by more than their sums over ranks explain, they are equal only if two conditions hold.
First, in f64 they agree to `WIDE` times the rounding error of f64; this finds a wrong term or factor that is smaller
than the rounding error of the graph's own dtypes. Second, in the graph's dtypes they differ by no more than the sums
along the graph explain, or than the first run differs from its run in f64; this finds a lost cast or a coarser product.
If the graphs cannot be run in f64 (they draw random numbers, look at bits, or call unknown functions), the difference
stays unexplained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from weft.compat import OpOverload, hint_of, input_nodes
from weft.cost.flops import flops_of
from weft.errors import WeftError
from weft.graph import ops
from weft.graph.groups import GroupTable
from weft.graph.operator_effects import profile
from weft.verification.comparison import Verdict, compare
from weft.verification.rank import RankResult, tensors_in
from weft.verification.virtual.cluster import VirtualCluster
from weft.verification.written_out import each_written_out

WIDE = 1 << 20
"""Factor on the number of terms in f64: an allowance for ill-conditioned graphs. The tolerance is 1024 times the usual
one, and still 10^4 times tighter than one rounding in f32."""

MOVES = frozenset(f"aten::{name}" for name in ("cat", "stack", "clone", "copy", "copy_", "_to_copy", "constant_pad_nd"))
"""Operators that move numbers and add none."""

ModuleOrModules = GraphModule | Sequence[GraphModule]
Tables = GroupTable | Sequence[GroupTable]


@dataclass(frozen=True)
class Sides:
    """Two graphs, or two lists with one graph per rank, and everything they were run with."""

    modules: tuple[ModuleOrModules, ModuleOrModules]
    tables: Sequence[Tables]
    inputs: Sequence[Sequence[Any]]
    seed: int


def judge_rounding(verdict: Verdict, sides: Sides, results: Sequence[list[RankResult]]) -> Verdict:
    """The final verdict on runs that differ by more than their sums over ranks explain."""
    num_ranks = len(sides.inputs)
    written = [
        module
        for side, tables in zip(sides.modules, sides.tables, strict=True)
        for module in each_written_out(*_by_rank(side, tables))
    ]
    modules = list(dict.fromkeys(written))
    if any(_hides_values(module) for module in modules):
        return verdict
    terms = max(count_terms(module, num_ranks) for module in modules)
    cluster = VirtualCluster(num_ranks)
    try:
        wide = [
            cluster.run(side, sides.inputs, tables, seed=sides.seed, wide=True)
            for side, tables in zip(sides.modules, sides.tables, strict=True)
        ]
    except WeftError:  # an operator has no f64 kernel, or inputs of different dtypes share memory
        return verdict
    in_f64 = compare(*wide, num_terms=WIDE * terms)
    if not in_f64:
        return in_f64
    return compare(*results, num_terms=terms, reference=wide[0])


def _by_rank(side: ModuleOrModules, tables: Tables) -> tuple[list[GraphModule], list[GroupTable]]:
    """The modules of a side, each with the groups of its rank."""
    modules = [side] if isinstance(side, GraphModule) else list(side)
    return modules, [tables] * len(modules) if isinstance(tables, GroupTable) else list(tables)[: len(modules)]


def count_terms(module: GraphModule, num_ranks: int) -> int:
    """The number of terms of products, reductions and collectives along the longest path through a graph."""
    longest: dict[Node, int] = {}
    for node in module.graph.nodes:
        longest[node] = _terms(node, num_ranks) + max((longest[source] for source in input_nodes(node)), default=0)
    return max(longest.values(), default=1)


def _terms(node: Node, num_ranks: int) -> int:
    """Upper bound on the number of terms in each element of the result."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or profile(target).is_view:
        return 0
    if ops.is_communication(target):
        return num_ranks
    if torch.Tag.pointwise in target.tags or target.name().partition(".")[0] in MOVES:
        return 1
    outputs = [_sizes(value) for value in tensors_in(ops.value_of(node))]
    flops = flops_of(node)
    if flops and outputs:
        return max(flops // (2 * max(_numel(outputs[0]), 1)), 1)
    sources = [_sizes(value) for source in input_nodes(node) for value in tensors_in(ops.value_of(source))]
    largest = max(map(_numel, sources), default=1)
    least = min(map(_numel, outputs), default=1)
    return max(1, largest // max(least, 1), *(size for sizes in sources for size in sizes))


def _sizes(value: Tensor) -> list[int]:
    return [hint_of(size) or 1 for size in value.shape]


def _numel(sizes: Sequence[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _hides_values(module: GraphModule) -> bool:
    """Whether f64 would change the meaning of a graph: it draws, looks at bits, or calls unknown functions."""
    for node in module.graph.nodes:
        target: Any = node.target
        if node.op in ("placeholder", "output", "get_attr") or target is getitem:
            continue
        if node.op != "call_function":
            return True
        if not isinstance(target, OpOverload):
            if profile(target).opaque:
                return True
            continue
        is_moved = ops.is_communication(target) or ops.is_wait(target) or ops.host_copy(target) is not None
        known = target.namespace in ("aten", "prims") or is_moved
        is_bits = target.name().startswith(("aten::view.dtype", "prims::view_of_dtype", "aten::view_as_"))
        if not known or is_bits or profile(target).random or profile(target).opaque:
            return True
    return False
