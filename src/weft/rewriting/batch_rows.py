"""How the values of a graph depend on the batch, so that the graph can be computed in chunks of the batch.

A value is one of

    shared    it does not depend on the batch; all chunks use it
    rows      one dim has the batch's rows: a chunk's value is a slice of it (`BatchDim`)
    sum       it is the sum of the chunks' values, such as a gradient of a weight (`Sum`)

Contract: the form of every value follows from the forms of its inputs by a rule for its operator. An operator without
a rule, or one that mixes rows, such as a statistic over the batch, is a `Refusal` that names it.

A dim may hold the rows several times: after an all-gather of a dim with rows, it has `outer` blocks, one for each rank,
each with all rows. A chunk then has the same rows of every block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import getitem
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from weft.compat import OpOverload, input_nodes
from weft.graph import ops
from weft.graph.operator_effects import is_pointwise, profile_of
from weft.graph.ops import Kind
from weft.plan.decision import Reason, Refusal
from weft.rewriting import routed_rows
from weft.rewriting.routed_rows import Routed


@dataclass(frozen=True)
class BatchDim:
    """A dim with the rows of the batch, `outer` times."""

    dim: int
    outer: int = 1


@dataclass(frozen=True)
class Sum:
    """A value that is the sum of the chunks' values, times a factor."""

    factor: float = 1.0


@dataclass(frozen=True)
class Loss:
    """The results of a mean loss: the sum of the chunks' sums, over the sum of their weights."""


@dataclass(frozen=True)
class OfChunk:
    """A value that attention returns for its own backward pass, such as a seed: each chunk has another one."""


Form = BatchDim | Sum | Loss | OfChunk | Routed | tuple["BatchDim | OfChunk | None", ...] | None
"""The form of a value or of a list of values; None: shared."""


@dataclass(frozen=True)
class Followed:
    """The form of a node, and how a chunk's call differs from the call in the graph."""

    form: Form
    literals: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments with other numbers in a chunk, by name."""
    slices: Mapping[Node, int] = field(default_factory=dict[Node, int])
    """Shared inputs, each with the dim along which a chunk takes its slice."""


class MixesRows(Exception):  # noqa: N818  # a signal inside this module
    """A rule cannot follow the rows."""

    def __init__(self, why: str, reason: Reason = Reason.NOT_BY_ROWS) -> None:
        super().__init__(why)
        self.reason = reason


LIKE = frozenset({"ones_like", "zeros_like", "full_like", "empty_like", "clone", "_to_copy", "detach", "alias"})
LINEAR = frozenset({"t", "transpose.int", "permute", "view", "_unsafe_view", "_to_copy", "clone", "detach", "alias"})
"""Operators with one input that commute with a sum."""


class BatchRows:
    """The forms of all nodes of a graph, for one number of chunks."""

    def __init__(self, nodes: Sequence[Node], inputs: Sequence[Node], chunks: int) -> None:
        self.chunks = chunks
        self.followed: dict[Node, Followed] = {node: Followed(BatchDim(0)) for node in inputs}
        self.refusal: Refusal | None = None
        try:
            for node in inputs:
                self._check(node, BatchDim(0))
            for node in nodes:
                if node.op == "call_function" and any(self.form(source) is not None for source in input_nodes(node)):
                    self._follow(node)
            self._check_writes(nodes)
        except MixesRows as error:
            self.refusal = Refusal(error.reason, str(error))

    def form(self, node: Any) -> Form:
        found = self.followed.get(node) if isinstance(node, Node) else None
        return None if found is None else found.form

    def _follow(self, node: Node) -> None:
        name = str(ops.name_of(node.target))
        forms = [self.form(source) for source in input_nodes(node)]
        if node.target is not getitem:  # the items of a loss are whole values
            forms = [None if isinstance(form, Loss) else form for form in forms]
        if all(form is None or isinstance(form, Sum) for form in forms):
            if name in LINEAR and forms[0] is not None:  # other calls take the whole sum
                self.followed[node] = Followed(forms[0])
            return
        if self._takes_totals(node, name):
            return
        found, rule = profile_of(node), _rule_of(node.target, name)
        is_routed = any(isinstance(form, Routed) for form in forms)
        is_check = is_routed and name in routed_rows.CHECKS
        acts = found.writes or (found.ordered and not is_check) or found.opaque
        if acts or (found.random and rule is not _attended):
            does = "draws random numbers" if found.random else "writes its input" if found.writes else "has effects"
            raise MixesRows(f"the batch is not split: {node.name} {does}", Reason.HAS_EFFECT)
        if any(isinstance(form, OfChunk) for form in forms) and rule is not _attended:
            raise _mixed(node, "reads the seed of an attention")
        if is_routed:
            self.followed[node] = self._follow_route(node, name)
            self._check(node, self.followed[node].form)
            return
        if rule is None or not isinstance(node.target, OpOverload | type(getitem)):
            raise MixesRows(f"the batch is not split: {name} of {node.name} has no rule", Reason.UNSUPPORTED_FORM)
        made = rule(self, node, ops.bind(node) if node.target is not getitem else {})
        self._check(node, made.form)
        self.followed[node] = made

    def _check_writes(self, nodes: Sequence[Node]) -> None:
        """Refuse a write to a whole sum or count if a chunk of it is read later: a chunk has memory of its own."""
        order = {node: i for i, node in enumerate(nodes)}
        wholes = {node: {node: None} for node in self.followed if node.op == "call_function"}
        for node in nodes:
            touched = [source for source in input_nodes(node) if source in wholes]
            found = profile_of(node) if touched and node.op == "call_function" else None
            if found is None or found.plain or (found.launch and not (found.writes or found.opaque)):
                continue
            written = touched if found.opaque else _written(node, found.writes)
            for root in (root for source in written for root in wholes.get(source, ())):
                chunked = [user for user in root.users if user in self.followed]
                is_read = any(not profile_of(user).plain or order[user] > order[node] for user in chunked)
                if is_read or not profile_of(root).plain:
                    what = f"{node.name} writes to {root.name}, of which each chunk has a part"
                    raise MixesRows(f"the batch is not split: {what}", Reason.HAS_EFFECT)
            if node not in self.followed:
                wholes[node] = dict.fromkeys(root for source in touched for root in wholes[source])

    def _takes_totals(self, node: Node, name: str) -> bool:
        """Whether a call only reads counts and sums, and leaves the way of the rows: it takes them for all chunks."""
        sources = [source for source in input_nodes(node) if self.form(source) is not None]
        are_totals = all(
            routed_rows.has_total(source, self.form(source)) or isinstance(self.form(source), Sum) for source in sources
        )
        return are_totals and routed_rows.follow(self.form, node, name, self._num_rows) is None

    def _follow_route(self, node: Node, name: str) -> Followed:
        """Rows on their way to experts and back."""
        made = routed_rows.follow(self.form, node, name, self._num_rows)
        if made is None:
            raise _mixed(node, f"leaves the known ways of rows to experts and back ({name})")
        if made.role == "rows" and name == "new_zeros":
            return _zeros(self, node, ops.bind(node))
        zeros = routed_rows.shared_zeros(node)
        slices = {zeros: 0} if zeros is not None and self.form(zeros) is None else {}
        forms: dict[str, Form] = {"rows": BatchDim(0), "sum": Sum()}
        return Followed(forms.get(made.role, made), {}, slices)

    def _num_rows(self, node: Any) -> int | None:
        """The extent of dim 0 if it has the batch's rows once."""
        return _shape(node)[0] if self.form(node) == BatchDim(0) else None

    def _check(self, node: Node, form: Form) -> None:
        value = ops.value_of(node)
        pairs = zip(form, value, strict=True) if isinstance(form, tuple) else [(form, value)]
        for each, tensor in pairs:
            if isinstance(each, BatchDim):
                extent = tensor.shape[each.dim]
                if not isinstance(extent, int) or extent % (each.outer * self.chunks):
                    what = f"dim {each.dim} of {node.name} has {extent} rows, which do not split into {self.chunks}"
                    raise MixesRows(f"the batch is not split: {what}", Reason.DOES_NOT_SPLIT)

    # Parts of rules.

    def rows(self, node: Any, dim: int | None = None) -> BatchDim:
        """The rows of an input, which must be in this dim if one is given."""
        form = self.form(node)
        if not isinstance(form, BatchDim) or (dim is not None and form != BatchDim(dim)):
            name = node.name if isinstance(node, Node) else str(node)
            raise MixesRows(f"the batch is not split: {name} has its rows in another dim, or none")
        return form

    def part(self, extent: int) -> int:
        return extent // self.chunks


Rule = Callable[[BatchRows, Node, dict[str, Any]], Followed]


def _shape(node: Any) -> list[int]:
    value = ops.value_of(node)
    sizes: list[Any] = list(value.shape) if isinstance(value, Tensor) else []
    return [n if isinstance(n, int) else -1 for n in sizes]


def _written(node: Node, arguments: Sequence[str]) -> list[Node]:
    """The inputs that a call writes, by the names of its arguments."""
    bound = ops.bind(node) if arguments else {}
    found: list[Node] = []
    map_arg([bound.get(name) for name in arguments], found.append)
    return found


def _mixed(node: Node, why: str) -> MixesRows:
    return MixesRows(f"the batch is not split: {node.name} {why}")


def _first_rows(batch: BatchRows, node: Node) -> BatchDim:
    return next(form for source in input_nodes(node) if isinstance(form := batch.form(source), BatchDim))


def _elementwise(batch: BatchRows, node: Node, _bound: dict[str, Any]) -> Followed:
    """Each element comes from the elements at its place; shared tensors with the rows' extent are sliced."""
    rank = len(_shape(node))
    slices: dict[Node, int] = {}
    aligned = {
        BatchDim(form.dim + rank - len(_shape(source)), form.outer)
        for source in input_nodes(node)
        if isinstance(form := batch.form(source), BatchDim)
    }
    if len(aligned) != 1:
        raise _mixed(node, "combines rows of different dims")
    (found,) = aligned
    extent = _shape(node)[found.dim]
    for source in input_nodes(node):
        shape = _shape(source)
        dim = found.dim - rank + len(shape)
        if isinstance(batch.form(source), BatchDim):
            if shape[dim] != extent:
                raise _mixed(node, "repeats a row")
        elif shape and dim >= 0 and shape[dim] not in (1, extent):
            raise _mixed(node, "combines different numbers of rows")
        elif shape and dim >= 0 and shape[dim] == extent:
            if found.outer > 1:
                raise _mixed(node, "needs rows of several blocks")
            slices[source] = dim
    return Followed(found, {}, slices)


def _moved(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """Transposes: dims in another order."""
    rows, rank = batch.rows(next(iter(input_nodes(node)))), len(_shape(node))
    order = list(range(rank))
    name = ops.name_of(node.target)
    if name == "permute":
        order = [d % rank for d in bound["dims"]]
    elif rank > 1:
        one, two = (0, 1) if name == "t" else (bound["dim0"] % rank, bound["dim1"] % rank)
        order[one], order[two] = two, one
    return Followed(BatchDim(order.index(rows.dim), rows.outer))


def _viewed(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """Views: the rows stay one contiguous part of each block, in a dim that begins where they begin."""
    source = bound["self"]
    rows, old, new = batch.rows(source), _shape(source), _shape(node)
    if -1 in old[: rows.dim]:
        raise _mixed(node, "has an unknown number of rows before those of the batch")
    blocks = prod(old[: rows.dim]) * rows.outer
    for dim, extent in enumerate(new):
        before = prod(new[:dim])
        if before < 0:
            break
        if before and blocks % before == 0 and extent % (blocks // before * batch.chunks) == 0 and extent:
            return Followed(BatchDim(dim, blocks // before), {"size": _resized(batch, bound["size"], new, dim)})
        if blocks % before:
            break
    raise _mixed(node, "views rows of several chunks as one")


def _expanded(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    rows, old, new = batch.rows(bound["self"]), _shape(bound["self"]), _shape(node)
    dim = rows.dim + len(new) - len(old)
    if new[dim] != old[rows.dim]:
        raise _mixed(node, "repeats rows")
    return Followed(BatchDim(dim, rows.outer), {"size": _resized(batch, bound["size"], new, dim)})


def _resized(batch: BatchRows, given: Sequence[Any], known: Sequence[int], dim: int) -> list[Any]:
    """The size of a chunk. Sizes that are not known stay as they were given."""
    return [batch.part(n) if d == dim else given[d] if n < 0 else n for d, n in enumerate(known)]


def _unsqueezed(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    rows = batch.rows(bound["self"])
    at = bound["dim"] % len(_shape(node))
    return Followed(BatchDim(rows.dim + (at <= rows.dim), rows.outer))


def _squeezed(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    rows, old = batch.rows(bound["self"]), _shape(bound["self"])
    given = bound["dim"]
    dims = {d % len(old) for d in (given if isinstance(given, list | tuple) else [given])}
    if rows.dim in dims:
        raise _mixed(node, "removes the dim of the batch if it has one row")
    return Followed(BatchDim(rows.dim - sum(d < rows.dim and old[d] == 1 for d in dims), rows.outer))


def _reduced(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """Sums and the like: rows stay unless they are reduced; only sums and means of rows add up."""
    source, name = bound["self"], str(ops.name_of(node.target))
    rows, rank = batch.rows(source), len(_shape(source))
    given = bound.get("dim")
    dims = {d % rank for d in (given if isinstance(given, list | tuple) else [given]) if d is not None}
    if not dims or rows.dim in dims:
        if name.partition(".")[0] not in ("sum", "mean"):
            raise _mixed(node, f"is a statistic over the batch ({name})")
        counts = routed_rows.counted_ids(node) if name == "sum.dim_IntList" else None
        if counts is not None and batch.form(counts.ids) == BatchDim(0):
            return Followed(counts)
        return Followed(Sum(1.0 if name.startswith("sum") else 1 / batch.chunks))
    lost = 0 if bound.get("keepdim") else sum(d < rows.dim for d in dims)
    return Followed(BatchDim(rows.dim - lost, rows.outer))


def _counted(batch: BatchRows, node: Node, _bound: dict[str, Any]) -> Followed:
    """A histogram, if it counts the ids of experts."""
    counts = routed_rows.counted_ids(node)
    if counts is None or batch.form(counts.ids) != BatchDim(0):
        raise _mixed(node, "is a statistic over the batch (histc)")
    return Followed(counts)


def _beside(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """Operators along one dim, which must not be that of the rows; shared tensors with the rows' extent are sliced."""
    rows, rank = _first_rows(batch, node), len(_shape(next(iter(input_nodes(node)))))
    extents = {_shape(source)[rows.dim] for source in input_nodes(node) if batch.form(source) == rows}
    slices: dict[Node, int] = {}
    given = bound["dims"] if "dims" in bound else [bound["dim"]]
    if not given or rows.dim in {d % rank for d in given}:
        raise _mixed(node, f"works along the batch ({ops.name_of(node.target)})")
    for source in input_nodes(node):
        if batch.form(source) not in (rows, None):
            raise _mixed(node, "combines rows with other values")
        if batch.form(source) is None and len(_shape(source)) == rank:
            if {_shape(source)[rows.dim]} != extents or rows.outer > 1:
                raise _mixed(node, "combines rows with other values")
            slices[source] = rows.dim
    value = ops.value_of(node)
    if isinstance(value, list | tuple):
        return Followed(tuple(rows for _ in value), {}, slices)
    is_select = ops.name_of(node.target) == "select.int"
    return Followed(BatchDim(_after_select(rows, bound, rank)) if is_select else rows, {}, slices)


def _after_select(rows: BatchDim, bound: dict[str, Any], rank: int) -> int:
    return rows.dim - (bound["dim"] % rank < rows.dim)


def _split(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """A split along another dim, or one that separates the blocks of the rows."""
    rows, shape = batch.rows(bound["self"]), _shape(bound["self"])
    count = len(ops.value_of(node))
    if bound["dim"] % len(shape) != rows.dim:
        return Followed((rows,) * count)
    name = "split_size" if "split_size" in bound else "split_sizes"
    given = bound[name]
    sizes = list(given) if isinstance(given, list | tuple) else [given] * count
    if any(not isinstance(size, int) or size * rows.outer != shape[rows.dim] for size in sizes):
        raise _mixed(node, "splits the batch")
    parts = [batch.part(size) for size in sizes]
    return Followed((BatchDim(rows.dim),) * count, {name: parts[0] if name == "split_size" else parts})


def _padded(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """Padding of other dims; the pairs of numbers begin with the last dim."""
    rows = batch.rows(bound["self"])
    from_end = len(_shape(node)) - 1 - rows.dim
    if any(n != 0 for n in bound["pad"][2 * from_end : 2 * from_end + 2]):
        raise _mixed(node, "pads the batch")
    return Followed(rows)


def _gradient_of_slice(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """The gradient of a slice along another dim: zeros around the slice."""
    rows, shape = batch.rows(bound["grad_output"]), _shape(node)
    if bound["dim"] % len(shape) == rows.dim:
        raise _mixed(node, "is the gradient of a slice of the batch")
    return Followed(rows, {"input_sizes": _resized(batch, bound["input_sizes"], shape, rows.dim)})


def _concatenated(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """Concatenation along another dim, or of whole batches, which become blocks."""
    parts = bound["tensors"]
    forms = {batch.form(part) for part in parts}
    rows = batch.rows(parts[0])
    if forms != {rows}:
        raise _mixed(node, "concatenates rows with other values")
    if bound["dim"] % len(_shape(node)) != rows.dim:
        return Followed(rows)
    if rows.outer > 1 or len({_shape(part)[rows.dim] for part in parts}) > 1:
        raise _mixed(node, "concatenates different batches")
    return Followed(BatchDim(rows.dim, len(parts)))


def _product(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """Products of matrices: rows stay rows, a product over rows is a sum over chunks."""
    left, right = bound["self"], bound["mat2"]
    one, two = batch.form(left), batch.form(right)
    if isinstance(one, BatchDim) and one.dim == 0 and not isinstance(two, BatchDim):
        return Followed(one)
    if isinstance(two, BatchDim) and two.dim == 1 and not isinstance(one, BatchDim):
        return Followed(two)
    if isinstance(one, BatchDim) and isinstance(two, BatchDim) and (one.dim, two.dim, one.outer) == (1, 0, two.outer):
        return Followed(Sum())
    raise _mixed(node, "multiplies rows in a way that has no rule")


def _batched_product(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    rows = batch.rows(bound["self"])
    if rows.dim != 0 or batch.form(bound["mat2"]) != rows:
        raise _mixed(node, "multiplies rows in a way that has no rule")
    return Followed(rows)


def _attended(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """Attention within each sequence of the batch; its rows must be whole sequences."""
    for source in input_nodes(node):
        if not isinstance(batch.form(source), OfChunk):
            batch.rows(source, 0)
    if any(bound.get(name) is not None for name in ("attn_mask", "attn_bias")) or bound.get("dropout_p"):
        raise _mixed(node, "has a mask or dropout")
    results = ops.value_of(node)
    has_rows = [isinstance(value, Tensor) and value.dim() > 2 for value in results]  # seeds and sizes have no rows
    return Followed(tuple(BatchDim(0) if is_split else OfChunk() for is_split in has_rows))


def _looked_up(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    if batch.form(bound["weight"]) is not None:
        raise _mixed(node, "looks rows up in the batch")
    return Followed(batch.rows(bound["indices"]))


def _gradient_of_table(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    if batch.rows(bound["grad_output"]) != batch.rows(bound["indices"]) or bound["scale_grad_by_freq"]:
        raise _mixed(node, "scales by counts over the batch")
    return Followed(Sum())


def _launched(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """Collectives, in which every rank splits its batch alike."""
    form = ops.launch_form(node.target)
    if form is None or form.coalesced or form.written or form.copied:
        raise _mixed(node, "is a collective of a form without a rule")
    rows = batch.rows(bound[form.tensors])
    if form.kind is Kind.ALL_REDUCE or (rows.dim and form.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)):
        return Followed(rows)
    size = bound.get("group_size", 0)
    if form.kind is Kind.ALL_GATHER:
        return Followed(BatchDim(0, rows.outer * size))
    if form.kind is Kind.REDUCE_SCATTER and rows.outer % size == 0:
        return Followed(BatchDim(0, rows.outer // size))
    raise _mixed(node, "exchanges rows of the batch between ranks")


def _zeros(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """Zeros: any part of them is zero."""
    size = bound["size"]
    if not size or not all(isinstance(n, int) for n in size):
        raise _mixed(node, "has no known size")
    return Followed(BatchDim(0), {"size": [batch.part(size[0]), *size[1:]]})


def _sorted(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """A sort of ids begins the way of rows to experts; other sorts go along another dim."""
    rows, rank = batch.rows(bound["self"]), len(_shape(bound["self"]))
    if bound["dim"] % rank != rows.dim:
        return Followed((rows, rows))
    made = routed_rows.sorted_ids(node) if rows == BatchDim(0) else None
    if made is None:
        raise _mixed(node, "sorts the batch")
    return Followed(made)


def _item(batch: BatchRows, node: Node, _bound: dict[str, Any]) -> Followed:
    source, index = node.args
    form = batch.form(source)
    if isinstance(form, tuple) and isinstance(index, int):
        return Followed(form[index])
    if isinstance(form, Loss):
        return Followed(form)
    raise _mixed(node, "is an item of a value without a rule")


def _same(batch: BatchRows, node: Node, _bound: dict[str, Any]) -> Followed:
    return Followed(batch.rows(next(iter(input_nodes(node)))))


def _lost(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """The mean loss over rows: chunks sum it up, so that rows to ignore may be anywhere."""
    for name in ("self", "target"):
        batch.rows(bound[name], 0)
    if bound["reduction"] != 1 or bound["weight"] is not None:
        raise _mixed(node, "has weights, or does not reduce to a mean")
    return Followed(Loss(), {"reduction": 2})


def _gradient_of_loss(batch: BatchRows, node: Node, bound: dict[str, Any]) -> Followed:
    """The gradient of a mean loss, over the weight of the whole batch."""
    for name in ("self", "target"):
        batch.rows(bound[name], 0)
    if bound["reduction"] != 1 or bound["weight"] is not None:
        raise _mixed(node, "has weights, or does not reduce to a mean")
    return Followed(BatchDim(0))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("t", "transpose.int", "permute"), _moved),
    **dict.fromkeys(("view", "_unsafe_view"), _viewed),
    **dict.fromkeys(("sum", "sum.dim_IntList", "mean", "mean.dim", "amax", "amin"), _reduced),
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "gather", "scatter_add", "scatter.src", "topk", "roll", "slice", "select.int"),
        _beside,
    ),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data", "cumsum"), _beside),
    **dict.fromkeys(LIKE, _elementwise),
    **dict.fromkeys(("sort", "sort.stable"), _sorted),
    **dict.fromkeys(("squeeze.dim", "squeeze.dims"), _squeezed),
    "histc": _counted,
    "new_zeros": _zeros,
    "expand": _expanded,
    "unsqueeze": _unsqueezed,
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    "constant_pad_nd": _padded,
    "slice_backward": _gradient_of_slice,
    "cat": _concatenated,
    "mm": _product,
    "bmm": _batched_product,
    **{
        f"_scaled_dot_product_{kind}_attention{end}": _attended
        for kind in ("flash", "efficient", "cudnn")
        for end in ("", "_backward", "_for_cpu", "_for_cpu_backward")
    },
    "embedding": _looked_up,
    "embedding_dense_backward": _gradient_of_table,
    "nll_loss_forward": _lost,
    "nll_loss_backward": _gradient_of_loss,
}


@functools.cache
def _rule_of(target: Any, name: str) -> Rule | None:
    if target is getitem:
        return _item
    if ops.is_wait(target):
        return _same
    if ops.launch_form(target) is not None:
        return _launched
    return RULES.get(name) or (_elementwise if is_pointwise(target) else None)
