"""Rows of a batch on their way to experts and back, as a mixture of experts without capacity routes them.

Every row of the batch has an id, its expert. A rank sorts its rows by id, exchanges the counts of rows of each id,
sends the rows to the ranks of their experts, sorts what it received by id, multiplies each group by the weight of its
expert, and sends the results back. So each result depends on its own row and id only, and a chunk of the batch can be
routed by itself.

Contract: every value between the sort and the rows that are back in order has a `Routed` form: its role, and the node
with the ids. A call that does not continue this route, node for node, has no rule. The roles:

    counts, received             rows of each id: of this rank, and of each rank for the experts of this one
    sent, taken                  rows for each rank, and from each rank: a tensor, or a number that the host has read
    order, back, tokens          the sort of the ids, its inverse, and the token of each sorted row
    bag                          rows in the order of their ids
    remote                       rows of all ranks for the experts of this one, in the order of rank and id
    remote-ids, remote-order, remote-back, ends   the ids of these rows, their sort, its inverse, the ends of its groups
    grouped, columns             these rows in the order of their ids, and the same transposed
    bag-ends, bag-columns        the same for rows that stay on their rank
    zeros                        zeros with as many rows as a bag or as remote rows
    size, bag-size               the number of remote rows, and of rows in a bag
    check                        whether such a number is not negative, and the assertion of it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import ge, getitem
from typing import Any

import torch
from torch.fx import Node

from weft.compat import OpOverload, input_nodes
from weft.graph import ops
from weft.graph.groups import group_argument, runtime_name
from weft.graph.operator_effects import is_pointwise


@dataclass(frozen=True)
class Routed:
    """A value on the route of the rows with these ids."""

    role: str
    ids: Node
    item: int | None = None
    """Index of a rank, for one of several numbers; number of rows of one token, for tokens."""


Forms = Callable[[Any], Any]
PERMUTED: Mapping[tuple[str, str], str] = {
    ("bag", "back"): "rows",
    ("remote", "remote-order"): "grouped",
    ("grouped", "remote-back"): "remote",
}
"""The role of picked rows, by the role of the rows and of the index."""
ADDED: Mapping[tuple[str, str], str] = {
    ("rows", "back"): "bag",
    ("remote", "remote-back"): "grouped",
    ("grouped", "remote-order"): "remote",
    ("bag", "tokens"): "rows",
    ("bag", "order"): "rows",
}
"""The role of rows that are added to zeros, by their role and that of the index: gradients of the above."""
EXCHANGED: Mapping[tuple[str, str, str], str] = {
    ("bag", "taken", "sent"): "remote",
    ("remote", "sent", "taken"): "bag",
}
"""The role of exchanged rows, by their role and those of the sizes received and sent."""


CHECKS = frozenset({"_assert_scalar", "sym_constrain_range_for_size"})
"""Operators that assert something about a number."""
UNIQUE = frozenset({"order", "back", "remote-order", "remote-back"})
"""Roles of indices that name every row once."""
COUNTING = (torch.int32, torch.int64, torch.float32, torch.float64)
"""Dtypes that hold ids and their counts exactly (f32 below 2**24)."""


def sorted_ids(node: Node) -> Routed | None:
    """The form of the results of a sort of ids: only the order is used."""
    bound = ops.bind(node)
    value = ops.value_of(bound["self"])
    ascending = not bound.get("descending") and value.dim() == 1
    return Routed("sort", _first_alike(bound["self"])) if ascending else None


def counted_ids(node: Node) -> Routed | None:
    """The form of a call if it counts the ids: `(ids[:, None] == arange(n)).sum(0)` or `histc(ids, n, 0, n)`."""
    bound = ops.bind(node)
    if ops.name_of(node.target) == "histc":
        has_unit_bins = (bound["min"], bound["max"]) == (0, bound["bins"])
        ids = _uncast(bound["self"])
        return Routed("counts", _first_alike(ids)) if has_unit_bins and ops.value_of(ids).dim() == 1 else None
    hits = _uncast(bound["self"])
    if list(bound.get("dim") or ()) != [0] or bound.get("keepdim") or ops.name_of(hits.target) != "eq":
        return None
    column, numbers = hits.args[0], hits.args[1]
    is_column = isinstance(column, Node) and ops.name_of(column.target) == "unsqueeze" and column.args[1] in (1, -1)
    ids = column.args[0] if is_column else None  # type: ignore[union-attr]
    is_count = isinstance(ids, Node) and ops.value_of(ids).dim() == 1 and _is_range(numbers)
    return Routed("counts", _first_alike(ids)) if is_count else None  # type: ignore[arg-type]


def has_total(node: Node, form: object) -> bool:
    """Whether a value is the counts of a chunk, whose sum over the chunks is exactly the counts of the whole batch."""
    return isinstance(form, Routed) and form.role == "counts" and ops.value_of(node).dtype in COUNTING


def _uncast(node: Node) -> Node:
    """A value before a cast that keeps ids, counts and truth values."""
    is_cast = ops.name_of(node.target) == "_to_copy" and ops.value_of(node).dtype in COUNTING
    return node.args[0] if is_cast else node  # type: ignore[return-value]


def _first_alike(node: Node) -> Node:
    """The first of several equal calls, such as views of the same ids. Ids are never written: a write declines."""
    sources = input_nodes(node)
    users = next(iter(sources)).users if sources else ()
    alike = (user for user in users if (user.target, user.args, user.kwargs) == (node.target, node.args, node.kwargs))
    return next(alike, node)


def follow(forms: Forms, node: Node, name: str, row_count: Callable[[Any], int | None]) -> Routed | None:
    """The form of a call with an input on a route; None if it does not continue the route.

    `row_count` gives the extent of dim 0 of a value with the batch's rows there, None for others. Role `rows`: the
    result has the batch's rows in dim 0.
    """
    found = [form for source in input_nodes(node) if isinstance(form := forms(source), Routed)]
    if len({form.ids for form in found}) != 1:
        return None
    ids = found[0].ids
    first = forms(node.args[0]) if node.args else None
    role = first.role if isinstance(first, Routed) else ""
    if node.target is getitem:
        return _item(first, node)
    if not isinstance(node.target, OpOverload):
        return _number(forms, node, first)
    bound = ops.bind(node)
    if name in CHECKS:
        return _checked(name, bound, first)
    if role == "counts" and name == "_to_copy":
        return first if ops.value_of(node).dtype in COUNTING else None  # type: ignore[return-value]
    if name == "sort" or name == "sort.stable":
        return _sorted(first, bound)
    if name in ("all_to_all", "wait"):
        return first if name == "wait" else _exchanged(forms, node, bound, first)
    if name in ("view", "sum.dim_IntList", "cumsum", "unbind.int", "select.int", "_local_scalar_dense"):
        return _counted(node, name, bound, first)
    if name == "floor_divide" and role == "order" and isinstance(node.args[1], int):
        return Routed("tokens", ids, node.args[1])
    if name == "repeat_interleave" and role == "received" and forms(bound["output_size"]) == Routed("size", ids):
        return Routed("places", ids)
    if name == "sym_size.int" and role in ("bag", "remote", "grouped") and bound["dim"] == 0:
        return Routed("bag-size" if role == "bag" else "size", ids)
    if name == "sym_numel" and role in ("remote-order", "remote-back"):
        return Routed("size", ids)
    if name in ("index_select", "index"):
        return _picked(forms, bound["self"], _row_index(bound), ids, row_count)
    if name in ("new_zeros", "zeros", "full"):
        return _zeros(forms, bound, ids)
    if name in ("index_add", "index_put"):
        return _added(forms, bound, ids, row_count)
    if name == "transpose.int":
        turned = {"grouped": "columns", "columns": "grouped", "bag": "bag-columns", "bag-columns": "bag"}.get(role)
        return Routed(turned, ids) if turned and {bound["dim0"] % 2, bound["dim1"] % 2} == {0, 1} else None
    if name == "_grouped_mm":
        return _multiplied(forms, bound, ids)
    is_by_element = is_pointwise(node.target) or name in ("_to_copy", "clone", "detach")
    if role in ("running", "bag-running") and name == "_to_copy":
        return Routed(role.replace("running", "ends"), ids)
    alike = {form for form in found if form.role in ("bag", "remote", "grouped")}
    others = [source for source in input_nodes(node) if forms(source) not in alike]
    return alike.pop() if is_by_element and len(alike) == 1 and not any(map(_has_dims, others)) else None


def _item(source: Any, node: Node) -> Routed | None:
    index = node.args[1]
    if not isinstance(source, Routed) or not isinstance(index, int):
        return None
    if source.role in ("sort", "remote-sort"):
        return Routed(source.role.replace("sort", "order"), source.ids) if index == 1 else None
    if source.role in ("back-sort", "remote-back-sort"):
        return Routed(source.role.removesuffix("-sort"), source.ids) if index == 1 else None
    return Routed(source.role, source.ids, index) if source.role in ("sent-list", "taken-list") else None


def _number(forms: Forms, node: Node, first: Any) -> Routed | None:
    """Arithmetic of the host: the sum of the numbers of all ranks, and checks that a number is not negative."""
    if node.target is ge:
        is_number = isinstance(first, Routed) and first.role in ("sent", "taken", "size", "bag-size")
        return Routed("check", first.ids) if is_number and node.args[1] == 0 else None
    if node.target is not torch.sym_sum or not isinstance(node.args[0], list | tuple):
        return None
    numbers = list(node.args[0])
    head = forms(numbers[0])
    if not isinstance(head, Routed) or head.role not in ("sent", "taken"):
        return None
    all_ranks = [Routed(head.role, head.ids, i) for i in range(_num_ranks(numbers[0]))]
    made = Routed("size" if head.role == "taken" else "bag-size", head.ids)
    return made if [forms(number) for number in numbers] == all_ranks else None


def _num_ranks(number: Any) -> int:
    """The number of ranks, from a number that the host has read: an item of the sums by rank."""
    sums = ops.value_of(number.args[0].args[0])
    return len(sums) if isinstance(sums, list | tuple) else sums.shape[0]


def _checked(name: str, bound: dict[str, Any], source: Any) -> Routed | None:
    """An assertion that a number is not negative. It holds for all chunks exactly if it holds for the whole batch."""
    if not isinstance(source, Routed):
        return None
    is_lower_bound = source.role in ("sent", "taken") and bound.get("min") in (None, 0) and bound.get("max") is None
    is_check = source.role == "check" if name == "_assert_scalar" else is_lower_bound
    return Routed("check", source.ids) if is_check else None


def _row_index(bound: dict[str, Any]) -> Any:
    """The index along dim 0; None if a call indexes another dim, or several."""
    if "indices" in bound:
        return bound["indices"][0] if len(bound["indices"]) == 1 else None
    return bound["index"] if bound["dim"] == 0 else None


def _sorted(source: Any, bound: dict[str, Any]) -> Routed | None:
    if bound.get("descending"):
        return None
    roles = {"order": "back-sort", "remote-ids": "remote-sort", "remote-order": "remote-back-sort"}
    return Routed(roles[source.role], source.ids) if source.role in roles else None


def _exchanged(forms: Forms, node: Node, bound: dict[str, Any], source: Any) -> Routed | None:
    received, sent = bound["output_split_sizes"], bound["input_split_sizes"]
    if not isinstance(source, Routed):
        return None
    if source.role == "counts":
        is_even = len({*received, *sent}) == 1 and isinstance(received[0], int)
        return Routed("received", source.ids) if is_even else None
    for (role, first, second), made in EXCHANGED.items():
        expected = [[Routed(name, source.ids, i) for i in range(len(received))] for name in (first, second)]
        if source.role == role and [[forms(n) for n in received], [forms(n) for n in sent]] == expected:
            return Routed(made, source.ids) if _same_group(node, source) else None
    return None


def _same_group(node: Node, source: Routed) -> bool:
    """Whether rows travel between the ranks that exchanged the counts."""
    launches = [
        n for n in node.graph.nodes if ops.launch_form(n.target) is not None and ops.name_of(n.target) == "all_to_all"
    ]
    counts = [n for n in launches if _counts_of(n) is source.ids]
    return any(runtime_name(group_argument(n)) == runtime_name(group_argument(node)) for n in counts)


def _counts_of(launch: Node) -> Node | None:
    sent = _uncast(launch.args[0])  # type: ignore[arg-type]
    found = counted_ids(sent) if ops.name_of(sent.target) in ("sum.dim_IntList", "histc") else None
    return None if found is None else found.ids


def _counted(node: Node, name: str, bound: dict[str, Any], source: Any) -> Routed | None:
    """Counts as a table of ranks and experts, their sums by rank and by expert, and the numbers that the host reads."""
    if not isinstance(source, Routed):
        return None
    role, ids = source.role, source.ids
    value = ops.value_of(node)
    if name == "view" and role in ("counts", "received") and value.dim() == 2:
        return Routed(f"{role}-table", ids, value.shape[0])
    if name == "sum.dim_IntList" and not bound.get("keepdim"):
        dims = [d % 2 for d in bound["dim"]] if role.endswith("-table") else []
        if dims == [1]:
            return Routed("sent-sums" if role == "counts-table" else "taken-sums", ids)
        return Routed("totals", ids) if dims == [0] and role == "received-table" else None
    if name == "cumsum" and role in ("totals", "counts"):
        return Routed("running" if role == "totals" else "bag-running", ids)
    if name == "unbind.int" and role in ("sent-sums", "taken-sums"):
        return Routed(role.replace("sums", "list"), ids)
    if name == "select.int" and role in ("sent-sums", "taken-sums") and bound["dim"] == 0:
        return Routed(role.replace("sums", "list"), ids, bound["index"])
    if name == "_local_scalar_dense" and role in ("sent-list", "taken-list") and source.item is not None:
        return Routed(role.removesuffix("-list"), ids, source.item)
    return None


def _picked(
    forms: Forms, rows: Any, index_node: Any, ids: Node, row_count: Callable[[Any], int | None]
) -> Routed | None:
    index = forms(index_node)
    if not isinstance(index, Routed):
        return None
    form, num_slots = forms(rows), row_count(ids)
    if isinstance(form, Routed):
        made = PERMUTED.get((form.role, index.role))
        return Routed(made, ids) if made else None
    count = row_count(rows)
    if index.role == "order" and count is not None and count == num_slots:
        return Routed("bag", ids)
    if index.role == "tokens" and count is not None and index.item and count * index.item == num_slots:
        return Routed("bag", ids)
    if index.role == "places" and form is None and _is_repeated_range(rows):
        return Routed("remote-ids", ids)
    return None


def _zeros(forms: Forms, bound: dict[str, Any], ids: Node) -> Routed | None:
    first, *others = bound["size"]
    if bound.get("fill_value", 0) != 0 or any(isinstance(forms(extent), Routed) for extent in others):
        return None
    if isinstance(first, int):
        return Routed("rows", ids)
    form = forms(first)
    return Routed("zeros", ids) if isinstance(form, Routed) and form.role in ("size", "bag-size") else None


def shared_zeros(node: Node) -> Node | None:
    """Zeros for all rows of the batch to which a call adds rows, if they do not depend on the batch themselves."""
    if ops.name_of(node.target) not in ("index_add", "index_put"):
        return None
    zeros = node.args[0]
    return zeros if isinstance(zeros, Node) and ops.name_of(zeros.target) in ("zeros", "full") else None


def _added(forms: Forms, bound: dict[str, Any], ids: Node, row_count: Callable[[Any], int | None]) -> Routed | None:
    base, added = bound["self"], bound["values"] if "values" in bound else bound["source"]
    zeros, index, rows = forms(base), forms(_row_index(bound)), forms(added)
    if not isinstance(index, Routed) or not _is_zeros(base) or bound.get("alpha", 1) != 1:
        return None
    if "values" in bound and not bound["accumulate"] and index.role not in UNIQUE:  # one of several rows would win
        return None
    if ops.value_of(added).dim() != ops.value_of(base).dim():  # one row is repeated
        return None
    num_slots = row_count(ids)
    extent = ops.value_of(base).shape[0] if zeros is None else row_count(base)
    is_of_route = zeros == Routed("zeros", ids)
    role = rows.role if isinstance(rows, Routed) else "rows" if row_count(added) == num_slots else ""
    made = ADDED.get((role, index.role))
    if made != "rows":
        is_fit = is_of_route or (made == "bag" and extent == num_slots)
        return Routed(made, ids) if made and is_fit else None
    per_token = (index.item or 0) if index.role == "tokens" else 1
    return Routed("rows", ids) if extent is not None and extent * per_token == num_slots else None


def _multiplied(forms: Forms, bound: dict[str, Any], ids: Node) -> Routed | None:
    left, right, ends = forms(bound["self"]), forms(bound["mat2"]), forms(bound["offs"])
    if bound.get("bias") is not None:
        return None
    for role, turned, its_ends in (("grouped", "columns", "ends"), ("bag", "bag-columns", "bag-ends")):
        rows, is_grouped = Routed(role, ids), ends == Routed(its_ends, ids)
        if is_grouped and left == rows and right is None:
            return rows
        if is_grouped and (left, right) == (Routed(turned, ids), rows):
            return Routed("sum", ids)
    return None


def _has_dims(node: Node) -> bool:
    value = ops.value_of(node)
    return bool(getattr(value, "shape", ()))


def _is_zeros(node: Node) -> bool:
    name = ops.name_of(node.target)
    return name in ("new_zeros", "zeros") or (name == "full" and bool(node.args[1] == 0))


def _is_range(node: Any) -> bool:
    """Whether a node is `arange(n)`."""
    return isinstance(node, Node) and ops.name_of(node.target) == "arange" and isinstance(node.args[0], int)


def _is_repeated_range(node: Any) -> bool:
    """Whether a node is `arange(n).repeat(m)`."""
    is_repeat = isinstance(node, Node) and ops.name_of(node.target) == "repeat" and len(node.args[1]) == 1  # type: ignore[arg-type]
    return is_repeat and _is_range(node.args[0])
