"""Loops in place of scans and maps.

Contract: a scan is read exactly, or refused with a reason. The loop computes the same values in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from weft.compat import FakeTensorMode
from weft.graph import ops
from weft.graph.edit import Edit, finish
from weft.graph.operator_effects import graph_arguments, profile_of
from weft.graph.versions import dag_of
from weft.plan.decision import Reason, Refusal

SCAN, MAP, LOOP = (ops.op_of(f"higher_order.{name}") for name in ("scan", "map_impl", "while_loop"))
ITEM = ops.op_of("operator.getitem")


@dataclass(frozen=True)
class Scan:
    """A scan or a map: a nested graph that runs once for each row of its input tensors."""

    node: Node
    body: GraphModule
    carried: tuple[Node, ...]
    """The initial carried state; each iteration passes a new one to the next. A map has none."""
    rows: tuple[Node, ...]
    whole: tuple[Node, ...]
    """The inputs that every iteration receives whole."""
    num_rounds: int

    @property
    def body_path(self) -> str:
        """The name of the attribute that holds the nested graph."""
        return str(self.source.target)

    @property
    def source(self) -> Node:
        """The node that reads the nested graph."""
        return next(node for node in self.node.all_input_nodes if node is self.node.args[0])

    @property
    def results(self) -> Sequence[Any]:
        """The results of an iteration: the carried state, then one row of each stacked result."""
        (result,) = next(iter(reversed(self.body.graph.nodes))).args
        return result if isinstance(result, list | tuple) else ()


def is_scan(node: Node) -> bool:
    """Whether a node is a scan or a map."""
    return node.op == "call_function" and node.target in (SCAN, MAP)


def read_scan(node: Node) -> Scan | Refusal:
    """The scan that a node calls, or why it cannot become a loop."""
    name = node.name
    bodies = graph_arguments(node)
    given: list[Any] = [part for part in node.args[1:] if isinstance(part, list | tuple)]
    if len(bodies) != 1 or len(given) != (3 if node.target is SCAN else 2) or node.kwargs:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: its arguments are not those of a known scan or map")
    carried, rows, whole = map(tuple[Any, ...], given if node.target is SCAN else ((), *given))
    values = [ops.value_of(n) if isinstance(n, Node) else None for n in (*carried, *rows)]
    if not rows or not all(isinstance(value, Tensor) for value in values):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: an input of its iterations is not a tensor")
    if profile_of(node).opaque:
        return Refusal(Reason.HAS_EFFECT, f"{name} stays: its iterations have side effects")
    taker = next((u for u in node.users if u.target is not ITEM or not isinstance(u.args[1], int)), None)
    if taker is not None:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: {taker.name} uses all its results", taker.name)
    num_rounds = ops.value_of(rows[0]).shape[0]
    if not isinstance(num_rounds, int):
        return Refusal(Reason.UNKNOWN_SIZE, f"{name} stays: its number of iterations is not known")
    return _checked(Scan(node, bodies[0], carried, rows, whole, num_rounds))


def _checked(scan: Scan) -> Scan | Refusal:
    """The scan, if a loop can reproduce the layout of its inputs and results; otherwise why not."""
    name, inputs = scan.node.name, _inputs(scan.body.graph)
    if not all(isinstance(ops.value_of(one) if isinstance(one, Node) else None, Tensor) for one in scan.results):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: a result of its iterations is not a tensor")
    if any(isinstance(n, Tensor) and not n.is_contiguous() for n in ops.value_of(scan.node)[len(scan.carried) :]):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: a result is not contiguous")
    taken = inputs[len(scan.carried) : len(scan.carried) + len(scan.rows)]
    loose = next((row for row, one in zip(scan.rows, taken, strict=True) if not _is_plain(row, one)), None)
    if loose is not None:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: {loose.name} is not contiguous", loose.name)
    return scan


def _is_plain(row: Node, taken: Node) -> bool:
    whole, one = ops.value_of(row), ops.value_of(taken)
    return whole.is_contiguous() and isinstance(one, Tensor) and one.is_contiguous()


def put_loops(edit: Edit, nodes: Sequence[Node]) -> None:
    """Replace scans of one graph, and scans nested in them, with loops."""
    sources: dict[Node, set[Node]] = {}
    for node in nodes:
        scan = read_scan(node)  # again: its inputs may be results of another loop by now
        if isinstance(scan, Scan):
            _put_loop(edit, scan)
            sources.setdefault(scan.source, set()).add(node)
    for source, gone in sources.items():
        if all(user in gone for user in source.users):
            edit.erase(source)


def _put_loop(edit: Edit, scan: Scan) -> None:
    node, device = scan.node, ops.value_of(scan.rows[0]).device
    numbers = {"dtype": torch.int64, "device": device}
    name = f"{node.name}_count"
    count = edit.call(ops.op_of("full"), ([], 0), numbers, before=node, name=name, like=[node])
    stacked = list(ops.value_of(node)[len(scan.carried) :])
    buffers = [
        edit.call(
            ops.op_of("empty.memory_format"),
            (list(value.shape),),
            {"dtype": value.dtype, "device": value.device},
            before=node,
            name=f"{node.name}_result{k}",
            like=[node],
        )
        for k, value in enumerate(stacked)
    ]
    values = [ops.value_of(n) for n in (count, *scan.carried, *buffers, *scan.rows)]
    again = edit.nest(f"{node.name}_again", _again(edit.mode, scan, values), before=node)
    round_ = edit.nest(f"{node.name}_round", _round(edit.mode, scan, values), before=node)
    given = (again, round_, (count, *scan.carried, *buffers), (*scan.rows, *scan.whole))
    result = (ops.value_of(count), *ops.value_of(node))
    made = edit.call(LOOP, given, before=node, name=f"{node.name}_loop", like=[node], value=result)
    replacements = {
        user: edit.call(ITEM, (made, int(str(user.args[1])) + 1), before=node, name=f"{user.name}_loop", like=[user])
        for user in list(node.users)
    }
    edit.replace_each(replacements)
    for gone in (*replacements, node):
        edit.erase(gone)


def _again(mode: FakeTensorMode, scan: Scan, values: Sequence[Any]) -> GraphModule:
    """The nested graph that decides whether there is another iteration."""
    edit = Edit(Graph(), mode=mode)
    count = _parameters(edit, scan, values)[0]
    edit.output(edit.call(ops.op_of("lt.Scalar"), (count, scan.num_rounds), name="is_left", like=[scan.node]))
    return finish({}, edit.graph)


def _round(mode: FakeTensorMode, scan: Scan, values: Sequence[Any]) -> GraphModule:
    """The nested graph of one iteration: it reads its rows, and writes its results into the buffers."""
    edit = Edit(Graph(), mode=mode)
    count, *given = _parameters(edit, scan, values)
    num_carried, num_buffers = len(scan.carried), len(scan.results) - len(scan.carried)
    carried, buffers = given[:num_carried], given[num_carried : num_carried + num_buffers]
    rows = given[num_carried + num_buffers : num_carried + num_buffers + len(scan.rows)]
    whole = given[num_carried + num_buffers + len(scan.rows) :]
    at = edit.call(ops.op_of("view"), (count, [1]), name="at", like=[scan.node])
    taken: list[Node] = []
    inputs = _inputs(scan.body.graph)
    for row, one in zip(rows, inputs[num_carried:], strict=False):
        some = edit.call(ops.op_of("index_select"), (row, 0, at), name=f"{row.name}_at", like=[scan.node])
        taken.append(edit.call(ops.op_of("select.int"), (some, 0, 0), name=one.name, like=[scan.node]))
    copies = dict(zip(inputs, (*carried, *taken, *whole), strict=True))
    _copy(edit, scan.body.graph, copies)
    results = [copies[one] for one in scan.results]
    kept = _with_own_memory(edit, scan, results[:num_carried])
    put: list[Node] = []
    for buffer, one in zip(buffers, results[num_carried:], strict=True):
        row = edit.call(ops.op_of("unsqueeze"), (one, 0), name=f"{buffer.name}_row", like=[scan.node])
        args, name = (buffer, 0, at, row), f"{buffer.name}_put"
        put.append(edit.call(ops.op_of("index_copy"), args, name=name, like=[scan.node]))
    following = edit.call(ops.op_of("add"), (count, 1), name="following", like=[scan.node])
    edit.output((following, *kept, *put))
    made = finish(scan.body, edit.graph)
    with Edit(made.graph, mode=mode) as nested:
        put_loops(nested, [node for node in made.graph.nodes if is_scan(node)])
    return made


def _copy(edit: Edit, body: Graph, copies: dict[Node, Node]) -> None:
    """Copy the calls of a graph, and the attributes that they read."""
    for node in body.nodes:
        if node.op == "get_attr":
            copies[node] = edit.attribute(str(node.target), ops.value_of(node), name=node.name)
        elif node.op == "call_function":
            args, kwargs = map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
            value = node.meta["val"]
            copies[node] = edit.call(node.target, args, kwargs, name=node.name, like=[node], value=value)


def _with_own_memory(edit: Edit, scan: Scan, results: Sequence[Node]) -> list[Node]:
    """The carried state, copied where it shares memory with an input of the iteration or with itself."""
    dag = dag_of(scan.body.graph)
    held = {s for n in _inputs(scan.body.graph) for s in dag.effects.held(dag.index[n])}
    kept: list[Node] = []
    for one, made in zip(scan.results, results, strict=False):
        mine = set(dag.effects.held(dag.index[one]))
        if mine & held:
            made = edit.call(ops.op_of("clone"), (made,), name=f"{made.name}_own", like=[scan.node])
        kept.append(made)
        held |= mine
    return kept


def _parameters(edit: Edit, scan: Scan, values: Sequence[Any]) -> list[Node]:
    """The inputs of a nested graph of the loop: the counter, carried state, buffers, rows and whole inputs."""
    inputs = _inputs(scan.body.graph)
    num_carried = len(scan.carried)
    num_buffers = len(scan.results) - num_carried
    names = ["count", *(n.name for n in inputs[:num_carried]), *(f"result{k}" for k in range(num_buffers))]
    names += [f"{n.name}_rows" for n in inputs[num_carried : num_carried + len(scan.rows)]]
    made = [edit.placeholder(name, value) for name, value in zip(names, values, strict=True)]
    rest = inputs[num_carried + len(scan.rows) :]
    return [*made, *(edit.placeholder(one.name, ops.value_of(one)) for one in rest)]


def _inputs(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]
