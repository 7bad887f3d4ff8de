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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

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


def sorted_ids(node: Node) -> Routed | None:
    """The form of the results of a sort of ids: only the order is used."""
    bound = ops.bind(node)
    value = ops.value_of(bound["self"])
    ascending = not bound.get("descending") and value.dim() == 1
    return Routed("sort", bound["self"]) if ascending else None


def counted_ids(node: Node) -> Routed | None:
    """The form of a sum over rows if it counts the ids: `(ids[:, None] == arange(n)).sum(0)`."""
    bound = ops.bind(node)
    hits = bound["self"]
    if list(bound.get("dim") or ()) != [0] or bound.get("keepdim") or ops.name_of(hits.target) != "eq":
        return None
    ids, numbers = hits.args[0], hits.args[1]
    is_column = isinstance(ids, Node) and ops.name_of(ids.target) == "unsqueeze" and ids.args[1] in (1, -1)
    return Routed("counts", ids.args[0]) if is_column and _is_range(numbers) else None  # type: ignore[arg-type]


def follow(forms: Forms, node: Node, name: str, row_count: Callable[[Any], int | None]) -> Routed | None:
    """The form of a call with an input on a route; None if it does not continue the route.

    `row_count` gives the extent of dim 0 of a value with the batch's rows there, None for others. Role `rows`: the
    result has the batch's rows in dim 0.
    """
    found = [form for source in input_nodes(node) if isinstance(form := forms(source), Routed)]
    if len({form.ids for form in found}) != 1 or not isinstance(node.target, OpOverload | type(getitem)):
        return None
    ids = found[0].ids
    bound = ops.bind(node) if node.target is not getitem else {}
    first = forms(node.args[0]) if node.args else None
    role = first.role if isinstance(first, Routed) else ""
    if node.target is getitem:
        return _item(first, node)
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
    if name == "sym_size.int" and role in ("bag", "remote") and bound["dim"] == 0:
        return Routed("size", ids) if role == "remote" else Routed("bag-size", ids)
    if name == "sym_numel" and role in ("remote-order", "remote-back"):
        return Routed("size", ids)
    if name == "index_select":
        return _picked(forms, bound, ids, row_count)
    if name == "new_zeros":
        return _zeros(forms, bound, ids)
    if name == "index_add":
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
    sent = launch.args[0]
    is_sum = isinstance(sent, Node) and ops.name_of(sent.target) == "sum.dim_IntList"
    found = counted_ids(sent) if is_sum else None  # type: ignore[arg-type]
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


def _picked(forms: Forms, bound: dict[str, Any], ids: Node, row_count: Callable[[Any], int | None]) -> Routed | None:
    rows, index = bound["self"], forms(bound["index"])
    if not isinstance(index, Routed) or bound["dim"] != 0:
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
    first = bound["size"][0]
    if isinstance(first, int):
        return Routed("rows", ids)
    form = forms(first)
    return Routed("zeros", ids) if isinstance(form, Routed) and form.role in ("size", "bag-size") else None


def _added(forms: Forms, bound: dict[str, Any], ids: Node, row_count: Callable[[Any], int | None]) -> Routed | None:
    zeros, index, rows = forms(bound["self"]), forms(bound["index"]), forms(bound["source"])
    is_plain = ops.name_of(bound["self"].target) == "new_zeros" and bound["dim"] == 0 and bound.get("alpha", 1) == 1
    if not is_plain or not isinstance(index, Routed):
        return None
    num_slots, extent = row_count(ids), row_count(bound["self"])
    is_of_route = zeros == Routed("zeros", ids)
    role = rows.role if isinstance(rows, Routed) else "rows" if row_count(bound["source"]) == num_slots else ""
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


def _is_range(node: Any) -> bool:
    """Whether a node is `arange(n)`."""
    return isinstance(node, Node) and ops.name_of(node.target) == "arange" and isinstance(node.args[0], int)


def _is_repeated_range(node: Any) -> bool:
    """Whether a node is `arange(n).repeat(m)`."""
    is_repeat = isinstance(node, Node) and ops.name_of(node.target) == "repeat" and len(node.args[1]) == 1  # type: ignore[arg-type]
    return is_repeat and _is_range(node.args[0])
