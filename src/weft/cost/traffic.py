"""Traffic: the bytes that each node moves, given what a compiler fuses with it.

Contract: pointwise operators, casts, copies and fills with numbers are fused; views between them are free. A closing
node is a kernel of its own, a reduction, a write, a launch or a wait. The depth of a node is the number of closing
nodes on the longest path to it. A fused node joins the region of each fused node of the same depth that it reads; a
reduction or a write joins as well, and ends the region. So no path leaves a region and comes back. A region reads each
outside tensor once (charged to its first reader) and writes each tensor that is needed outside; inner tensors move no
bytes.

Complex results are kernels of their own: Inductor generates no code for complex numbers.

A thorough compiler, such as Inductor, fuses more: reductions of rows do not close a region, a node may be delayed to
the region that reads it, and nodes that read the same tensor share a region.

Time and memory are linear in nodes and edges; the result depends on the order of the graph, not on names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import Module

from weft.compat import OpOverload, input_nodes, schema_of
from weft.cost.flops import name_of, rule_of
from weft.graph import ops
from weft.graph.assumed_sizes import size_of
from weft.graph.dag import Dag
from weft.graph.host import is_read_on_host
from weft.graph.operator_effects import profile, shares_storage
from weft.graph.ops import cached_by_target


class TrafficKind(IntEnum):
    """How a node accesses memory."""

    FREE = 0
    """An input, a number, an empty tensor."""
    VIEW = 1
    FUSED = 2
    END = 3
    """Joins a region and ends it."""
    KERNEL = 4
    """Reads its inputs and writes its results."""
    BOUNDARY = 5
    """A launch or a wait: no compute, and no fusion across it."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUSED = _names(
    "_to_copy clone convert_element_type lift_fresh_copy expand_copy full full_like new_full zeros zeros_like new_zeros"
    " ones ones_like new_ones arange iota scalar_tensor fill tril triu constant_pad_nd slice_scatter select_scatter"
    " reshape contiguous to view_copy copy"
)
ENDS = _names(
    "sum mean prod amax amin max min argmax argmin any all var var_mean std std_mean norm linalg_vector_norm logsumexp"
    " _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm nll_loss_backward"
    " native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward native_group_norm native_group_norm_backward"
    " native_batch_norm native_batch_norm_backward copy_ fill_ zero_"
)
EMPTY = _names("empty empty_like new_empty empty_strided new_empty_strided empty_permuted")
ROW_OPERATORS = _names(
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data nll_loss_backward native_layer_norm"
    " _fused_rms_norm"
)
"""Operators that work on one row at a time, whatever their arguments."""
ROW_REDUCTIONS = _names("sum mean prod amax amin max min argmax argmin any all var var_mean std std_mean logsumexp")
"""Reductions that do so if they reduce the last dim only."""
LOOKUPS = _names("embedding index gather index_select take nll_loss_forward")
"""Operators that read only selected parts of their first argument."""
UNREAD = {"copy_": "self", "fill_": "self", "zero_": "self", "nll_loss_backward": "self"}
"""Operators that do not read one of their arguments: they overwrite it, or need only its shape."""


@cached_by_target
def kind_of(target: Any) -> TrafficKind:
    """How calls of an operator access memory. Operators that may copy are decided call by call, by metadata."""
    if not isinstance(target, OpOverload):
        found = profile(target)
        return TrafficKind.VIEW if found.is_view else TrafficKind.FREE if found.plain else TrafficKind.KERNEL
    found, name = profile(target), name_of(target)
    if found.wait or found.launch or found.host_copy:
        return TrafficKind.BOUNDARY
    if rule_of(target) is not None:
        return TrafficKind.KERNEL
    if found.is_view:
        return TrafficKind.VIEW
    if name in EMPTY or not ops.reads_data(target):
        return TrafficKind.FREE
    if name in ENDS and torch.Tag.pointwise not in target.tags:
        return TrafficKind.END
    if torch.Tag.pointwise in target.tags or name in FUSED:
        return TrafficKind.END if found.writes else TrafficKind.FUSED
    return TrafficKind.KERNEL


def bytes_of(value: Any) -> int | None:
    """Bytes of a value in memory, by hint; None if unknown. Broadcast dims and overlapping windows count once."""
    if isinstance(value, Tensor):
        num = span = 1
        for size, stride in zip(value.shape, value.stride(), strict=True):
            known = size if type(size) is int else size_of(size)
            step = stride if type(stride) is int else size_of(stride)
            if known is None:
                return None
            if known == 0 or step != 0:
                num *= known
            span = None if span is None or step is None else span + (known - 1) * step
        return (num if span is None else min(num, max(span, 0))) * value.element_size()
    if isinstance(value, list | tuple | dict):
        parts: Iterable[Any] = value.values() if isinstance(value, dict) else value
        sizes = [bytes_of(each) for each in parts if each is not None]
        return None if None in sizes else sum(size for size in sizes if size is not None)
    return 0 if isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool) else None


class Traffic:
    """The kinds, regions and bytes of the nodes of one Dag."""

    def __init__(self, dag: Dag, fuses: Sequence[bool] | None = None, thorough: bool = False) -> None:
        """`fuses` says for each node whether it may join its neighbours; None: all may."""
        self.dag, self.fuses = dag, [True] * len(dag.nodes) if fuses is None else fuses
        self.thorough = thorough
        num = len(dag.nodes)
        self.kinds: list[TrafficKind] = [_kind(node) for node in dag.nodes]
        if thorough:
            for i, node in enumerate(dag.nodes):
                if self.fuses[i] and _is_of_rows(node, self.kinds[i]):
                    self.kinds[i] = TrafficKind.FUSED
                elif self.fuses[i] and name_of(node.target) == "nll_loss_forward":
                    self.kinds[i] = TrafficKind.END
        self.values: list[int | None] = [_result_bytes(node) for node in dag.nodes]
        self.inputs: list[list[int]] = [[dag.index[source] for source in input_nodes(node)] for node in dag.nodes]
        self.roots: list[int] = list(range(num))
        """The node whose result a view refers to."""
        self.regions: list[int] = list(range(num))
        """The first node of each node's region."""
        self.num_bytes: list[int | None] = [0] * num
        """Bytes that each node moves; None if unknown."""
        self.is_inner: list[bool] = [False] * num
        """Nodes whose result exists only inside a fused kernel."""
        self._find_regions()
        self._count()

    def _find_regions(self) -> None:
        kinds, roots, regions = self.kinds, self.roots, self.regions
        depth = self._depths()
        shared: dict[tuple[int, int, Any], int] = {}
        for i, kind in enumerate(kinds):
            if kind is TrafficKind.VIEW and self.inputs[i]:
                # An item of several results is a tensor of its own; an item of several views is a view.
                source = roots[self.inputs[i][0]]
                if not isinstance(self.dag.nodes[source].meta.get("val"), list | tuple | dict):
                    roots[i] = source
            elif self.fuses[i] and kind in (TrafficKind.FUSED, TrafficKind.END):
                for p in self.inputs[i]:
                    source = roots[p]
                    if kinds[source] is TrafficKind.FUSED and depth[source] == depth[i] and self.fuses[source]:
                        _join(regions, source, i)
                    elif self.thorough:
                        _join(regions, shared.setdefault((source, depth[i], _phase(self.dag.nodes[i])), i), i)
        for i in range(len(regions)):
            regions[i] = regions[regions[i]]

    def _depths(self) -> list[int]:
        """The number of closing nodes before each node; a thorough compiler delays fused nodes to their readers."""
        kinds, nodes = self.kinds, self.dag.nodes
        depth, after = [0] * len(kinds), [0] * len(kinds)
        for i, kind in enumerate(kinds):
            depth[i] = max((after[p] for p in self.dag.preds[i]), default=0)
            after[i] = depth[i] + (kind >= TrafficKind.END)
        if not self.thorough:
            return depth
        # In reverse, so that a chain of fused and viewed nodes is delayed as a whole. No node moves to another phase:
        # what forward computes for backward is stored.
        latest: list[int | None] = [None] * len(kinds)
        is_tied = [False] * len(kinds)
        for i in range(len(kinds) - 1, -1, -1):
            moves = kinds[i] in (TrafficKind.FUSED, TrafficKind.VIEW) and self.fuses[i] and not is_tied[i]
            limit = latest[i]
            if moves and limit is not None and limit > depth[i]:
                depth[i] = limit
            for p in self.inputs[i]:
                is_tied[p] = is_tied[p] or nodes[i].op == "output" or _phase(nodes[p]) != _phase(nodes[i])
                known = latest[p]
                latest[p] = depth[i] if known is None else min(known, depth[i])
        return depth

    def _count(self) -> None:
        kinds, roots, regions, values = self.kinds, self.roots, self.regions, self.values
        counted: dict[tuple[int, int], int] = {}
        seen: set[tuple[int, int]] = set()
        written = [kind in (TrafficKind.END, TrafficKind.KERNEL) for kind in kinds]
        for i, kind in enumerate(kinds):
            sources = self.inputs[i]
            if kind in (TrafficKind.FREE, TrafficKind.VIEW) and self.dag.nodes[i].op != "output":
                continue
            for p in sources:
                source = roots[p]
                if regions[source] != regions[i]:
                    written[source] = written[source] or kinds[source] is TrafficKind.FUSED
            if kind not in (TrafficKind.FUSED, TrafficKind.END, TrafficKind.KERNEL):
                continue
            for p in self.read(i):
                source, key = roots[p], (regions[i], p)
                if regions[source] == regions[i] or key in seen:
                    continue
                seen.add(key)
                # Two views of a tensor read at most all of it. A single view may be larger than its base.
                before, whole = counted.get((regions[i], source), 0), values[source]
                part = self._picked(i, p)
                after = None if part is None or whole is None else min(before + part, max(whole, part, before))
                self.num_bytes[i] = _add(self.num_bytes[i], None if after is None else after - before)
                counted[regions[i], source] = before if after is None else after
        for i, is_written in enumerate(written):
            if is_written:
                self.num_bytes[i] = _add(self.num_bytes[i], values[i])
            self.is_inner[i] = kinds[i] is TrafficKind.FUSED and not is_written

    def read(self, i: int) -> list[int]:
        """The inputs whose data a node reads."""
        name = name_of(self.dag.nodes[i].target)
        if name in UNREAD:
            unread = ops.bind(self.dag.nodes[i]).get(UNREAD[name])
            return [p for p in self.inputs[i] if self.dag.nodes[p] is not unread]
        return self.inputs[i]

    def _picked(self, i: int, source: int) -> int | None:
        """Bytes that a node reads of one of its inputs."""
        whole, sources = self.values[source], self.inputs[i]
        if whole is None or source != sources[0] or name_of(self.dag.nodes[i].target) not in LOOKUPS:
            return whole
        others = sum(self.values[p] or 0 for p in sources[1:])
        return min(whole, max(self.values[i] or 0, others))


def _phase(node: Node) -> Any:
    return node.meta.get("partitioner_tag")


def _is_of_rows(node: Node, kind: TrafficKind) -> bool:
    """Whether a reduction stays within rows, so that a kernel can go on with its result."""
    if node.op != "call_function":
        return False
    name = name_of(node.target)
    if name in ROW_OPERATORS:
        return True
    if kind is not TrafficKind.END or name not in ROW_REDUCTIONS:
        return False
    source = next(iter(input_nodes(node)), None)
    value = None if source is None else ops.value_of(source)
    dims = ops.bind(node).get("dim")
    found = dims if isinstance(dims, list | tuple) else [dims]
    return isinstance(value, Tensor) and value.dim() > 0 and [*found] in ([-1], [value.dim() - 1])


def _result_bytes(node: Node) -> int | None:
    """Bytes of a node's results; of the arguments that it writes, if it returns nothing."""
    value, target = node.meta.get("val"), node.target
    if node.op == "get_attr" and isinstance(ops.attribute(node.graph.owning_module, str(target)), Module):
        return 0  # a nested graph
    if value is not None or not isinstance(target, OpOverload) or schema_of(target).returns:
        return bytes_of(value)
    bound = ops.bind(node)
    written = [each for name in profile(target).writes for each in _nodes_of(bound.get(name))]
    sizes = [bytes_of(ops.value_of(each)) for each in written]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _nodes_of(argument: Any) -> list[Node]:
    return [each for each in argument if isinstance(each, Node)] if isinstance(argument, list | tuple) else [argument]


def _kind(node: Node) -> TrafficKind:
    if node.op != "call_function":
        return TrafficKind.KERNEL if node.op in ("call_module", "call_method") else TrafficKind.FREE
    found = kind_of(node.target)
    if found in (TrafficKind.FUSED, TrafficKind.KERNEL) and profile(node.target).may_copy and shares_storage(node):
        return TrafficKind.VIEW
    if node.target is ops.READ_NUMBER and not is_read_on_host(node):
        return TrafficKind.VIEW  # the number is in host memory already
    value = node.meta.get("val")
    if found is TrafficKind.FUSED and isinstance(value, Tensor) and value.is_complex():
        return TrafficKind.KERNEL
    return found


def _join(regions: list[int], first: int, second: int) -> None:
    """Join two regions; the earlier first node names the result."""
    while regions[first] != first:
        regions[first] = first = regions[regions[first]]
    while regions[second] != second:
        regions[second] = second = regions[regions[second]]
    regions[max(first, second)] = min(first, second)


def _add(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second
