"""Shards: which nodes each rank could compute on its own shard of a gathered tensor.

A gathered tensor is the concatenation of all ranks' shards along a dim. So are the results of pointwise operators,
permutations and matmuls with replicated tensors. If an operator sums over that dim, as a sum or a matmul of two sharded
tensors may, its result is the sum over the ranks of the results on the shards.

Replicated tensors must be equal on all ranks of the group: gathered or reduced over it, or computed from such tensors
and numbers alone. Inputs of the graph do not count, since data and perhaps parameters differ between ranks. Nor do
slices: each rank may take another part.

Contract: a node is listed only if this holds exactly, except for rounding, none of its inputs and outputs is ever
written, and all sizes are known numbers. The analysis changes nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Node

from weft.compat import input_nodes
from weft.graph import ops
from weft.graph.operator_effects import is_pointwise
from weft.plan.context import Context
from weft.rewriting.draft import Draft
from weft.rewriting.launches import argument_of, group_of, is_written, place_in, runtime_name
from weft.rewriting.slices import SPLITS, slice_of

GATHER, WAIT, MM, CAT, ITEM = (ops.op_of(n) for n in ("all_gather", "wait", "mm", "cat", "operator.getitem"))
SUM, SUM_DIMS = ops.op_of("sum.default"), ops.op_of("sum.dim_IntList")
T, TRANSPOSE, PERMUTE = (ops.op_of(n) for n in ("t", "transpose.int", "permute"))
ALL_REDUCE, EMPTY = ops.op_of("all_reduce"), ops.op_of("empty.memory_format")
PIECES = frozenset(ops.op_of(n) for n in ("slice", "narrow", "select.int", "operator.getitem", "as_strided"))
NOWHERE: frozenset[str] = frozenset()
COPIES = frozenset(ops.op_of(n) for n in ("clone", "_to_copy", "prims.convert_element_type.default")) - {None}


@dataclass
class Family:
    """Nodes that must be computed on shards together, or not at all."""

    launches: list[Node] = field(default_factory=list[Node])
    nodes: list[Node] = field(default_factory=list[Node])
    """All of them in order, including waits and splits."""
    leaks: list[Node] = field(default_factory=list[Node])
    """The nodes that have a user outside the family, which needs the whole tensor."""


class Shards:
    """The nodes of a graph that are concatenations of shards, or sums over shards."""

    def __init__(self, draft: Draft, context: Context, rank: int | None, own: Container[str] = ()) -> None:
        self.draft, self.context, self.rank, self._own_names = draft, context, rank, own
        self.dims: dict[Node, int] = {}
        """The dim along which each node concatenates shards."""
        self.sums: dict[Node, None] = {}
        """The nodes that are sums over the ranks."""
        self.own: dict[Node, Node] = {}
        """The nodes that are this rank's own shard, each with the tensor that it is a shard of."""
        self.same: dict[Node, Node] = {}
        """Concatenations along another dim of the shards of a gathered tensor, each with that tensor."""
        self._whole: dict[Node, frozenset[str] | None] = {}
        """The groups over which a tensor is replicated; None: all groups."""
        self._cuts: dict[Node, Node] = {}
        self._launch: dict[Node, Node] = {}
        self._parents: dict[Node, Node] = {}
        for node in draft.dag.nodes:
            if node.op == "call_function":
                self._whole[node] = self._groups_of_whole(node)
                self._look(node)
                if (node in self.dims or node in self.sums) and self._whole[node] is not None:
                    self._whole[node] = frozenset({runtime_name(argument_of(draft, self._launch[node]))})

    def _groups_of_whole(self, node: Node) -> frozenset[str] | None:
        """The groups over which a node is replicated."""
        found = self.draft.profile(node)
        sources: list[Node] = list(input_nodes(node))
        acts = found.writes or found.random or found.opaque or node.target is EMPTY
        if acts or is_written(self.draft, node) or node.target in PIECES:
            return NOWHERE
        if found.launch:
            same = node.target in (GATHER, ALL_REDUCE)
            return frozenset({runtime_name(argument_of(self.draft, node))}) if same else NOWHERE
        groups: frozenset[str] | None = None
        for source in sources:
            known = self._whole.get(source, NOWHERE)
            groups = known if groups is None else groups if known is None else groups & known
        return groups

    def _is_whole(self, node: Node, group: str) -> bool:
        groups = self._whole.get(node, NOWHERE)
        return groups is None or group in groups

    def families(self) -> Iterable[Family]:
        """The families of dependent nodes."""
        found: dict[Node, Family] = {}
        members = [n for n in self.draft.dag.nodes if n in self._launch or n in self._cuts]
        for node in members:
            launch = self._launch[self._cuts.get(node, node)]
            family = found.setdefault(self._find(launch), Family())
            if node.target is WAIT:
                family.launches.append(launch)
            family.nodes.append(node)
            if node in self.dims and any(not self._takes_part(user) for user in node.users):
                family.leaks.append(node)
        return found.values()

    def _takes_part(self, user: Node) -> bool:
        if user in self._cuts:  # a split takes part if all its items are only concatenated again
            return all(self._takes_part(next_user) for next_user in user.users)
        return user in self._launch

    def _find(self, launch: Node) -> Node:
        while launch in self._parents:
            launch = self._parents[launch]
        return launch

    def _join(self, node: Node, sources: Iterable[Node]) -> None:
        first, *others = [self._find(self._launch[source]) for source in sources]
        for other in others:
            if other is not first:
                self._parents[other] = first
        self._launch[node] = first

    def group_size(self, launch: Node) -> int:
        """The number of shards."""
        return group_of(self.draft, launch, self.context).size

    def _look(self, node: Node) -> None:
        if node.target is WAIT:
            self._seed(node)
            return
        if node.target is ITEM or node.target in SPLITS:
            self._cut(node)
        if node.target is CAT:
            self._laid(node)
            return
        sources = [source for source in input_nodes(node) if source in self.dims]
        if not sources or not self._is_fit(node, sources):
            return
        if self._is_own(node, sources[0]):
            self.own[node] = sources[0]
            self._join(node, sources)
            return
        dim = self._dim_of(node)
        if dim is not None:
            self._join(node, sources)
            if dim < 0:
                self.sums[node] = None
            else:
                self.dims[node] = dim

    def _seed(self, node: Node) -> None:
        launch = node.args[0]
        if not isinstance(launch, Node) or launch.target is not GATHER or len(launch.users) > 1:
            return
        sent = self.draft.bind(launch)["input"]
        if _is_sized(sent) and _is_sized(node) and not is_written(self.draft, sent, launch):
            self.dims[node] = 0
            self._launch[node] = launch

    def _is_fit(self, node: Node, sources: list[Node]) -> bool:
        """Whether the node has no side effects, and none of its inputs and outputs is written."""
        found = self.draft.profile(node)
        acts = found.writes or found.random or found.ordered or found.opaque or found.launch
        groups = {runtime_name(argument_of(self.draft, self._launch[source])) for source in sources}
        tensors = [source for source in input_nodes(node) if isinstance(ops.value_of(source), Tensor)]
        fit = not acts and len(groups) == 1 and _is_sized(node) and all(map(_is_sized, tensors))
        whole = all(self._is_whole(n, group) for n in tensors if n not in self.dims for group in groups)
        return fit and whole and not is_written(self.draft, node, *tensors)

    # Splits of a gathered tensor whose items are concatenated along another dim.

    def _cut(self, node: Node) -> None:
        source = node.args[0]
        if not isinstance(source, Node) or is_written(self.draft, node):
            return
        if source in self.dims and source.target is WAIT and node.target in SPLITS:
            self._cuts[node] = source
        elif source in self._cuts and node.target is ITEM:
            self._cuts[node] = self._cuts[source]

    def _laid(self, node: Node) -> None:
        given = self.draft.bind(node)
        items, value = given["tensors"], ops.value_of(node)
        pieces = [slice_of(self.draft, item, 0) for item in items]
        source = self._cuts.get(items[0]) if items else None
        if source is None or not isinstance(value, Tensor) or is_written(self.draft, node):
            return
        count = self.group_size(self._launch[source])
        starts = [piece.start if piece and piece.source is source else None for piece in pieces]
        rows = ops.value_of(source).shape[0] // count
        if starts == [k * rows for k in range(count)] and all(p and p.end - p.start == rows for p in pieces):
            self.dims[node] = given["dim"] % value.dim()
            self.same[node] = source
            self._join(node, [source])

    def _is_own(self, node: Node, source: Node) -> bool:
        """Whether the node is this rank's own shard."""
        if self.rank is None or node.name not in self._own_names:
            return False
        dim = self.dims[source]
        piece = slice_of(self.draft, node, dim)
        group = group_of(self.draft, self._launch[source], self.context)
        place = place_in(group, self.rank)
        if piece is None or piece.source is not source or place is None:
            return False
        part = piece.size // group.size
        return (piece.start, piece.end) == (place * part, (place + 1) * part)

    # Operators.

    def _dim_of(self, node: Node) -> int | None:
        """The dim along which the result concatenates shards; -1 if it sums them; None if neither."""
        target, given = node.target, self.draft.bind(node) if node.target is not ITEM else {}
        if target is MM:
            return self._dim_of_product(given["self"], given["mat2"])
        if target in (T, TRANSPOSE, PERMUTE):
            return self._dim_of_turned(node, given)
        if target in (SUM, SUM_DIMS):
            return self._dim_of_sum(given)
        return self._dim_of_pointwise(node) if is_pointwise(target) or target in COPIES else None

    def _dim_of_product(self, first: Node, second: Node) -> int | None:
        match self.dims.get(first), self.dims.get(second):
            case (0, None):
                return 0
            case (None, 1):
                return 1
            case (1, 0):
                return -1
            case _:
                return None

    def _dim_of_turned(self, node: Node, given: dict[str, Any]) -> int | None:
        source = given["self"]
        dim, rank = self.dims[source], ops.value_of(source).dim()
        if node.target is PERMUTE:
            return [d % rank for d in given["dims"]].index(dim)
        pair = [0, 1] if node.target is T else [given["dim0"] % rank, given["dim1"] % rank]
        if rank < 2:
            return dim
        return pair[1 - pair.index(dim)] if dim in pair else dim

    def _dim_of_sum(self, given: dict[str, Any]) -> int | None:
        source = given["self"]
        dim, rank = self.dims[source], ops.value_of(source).dim()
        dims = [d % rank for d in given.get("dim") or range(rank)]
        if dim in dims:
            return -1
        return dim if given.get("keepdim") else dim - sum(d < dim for d in dims)

    def _dim_of_pointwise(self, node: Node) -> int | None:
        result = ops.value_of(node)
        if not isinstance(result, Tensor):
            return None
        tensors = [n for n in input_nodes(node) if isinstance(ops.value_of(n), Tensor)]
        sharded = [n for n in tensors if n in self.dims]
        backs = {ops.value_of(n).dim() - self.dims[n] for n in sharded}  # counted from the last dim, as broadcasts do
        if len(backs) != 1:
            return None
        (back,) = backs
        for n in tensors:
            value = ops.value_of(n)
            size = value.shape[-back] if value.dim() >= back else 1
            if (n in self.dims) != (size != 1) or (n in self.dims and size != result.shape[-back]):
                return None
        return result.dim() - back


def _is_sized(node: Node) -> bool:
    """Whether a node is a tensor, or a list of tensors, of known sizes."""
    value = ops.value_of(node)
    values = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(v, Tensor) and all(type(size) is int for size in v.shape) for v in values)
