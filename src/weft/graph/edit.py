"""Edit: the only writer of FX graphs in Weft.

Contract: an edit is a transaction. Nodes are created and arguments replaced at once; moves and erasures are noted and
carried out by `commit`, which sorts once, checks, and either changes the graph or leaves it exactly as it was.

The place where a node is created defines its meaning: its reads and writes are ordered against the nodes before and
after that place. A move is only a preference for a position. So `commit` derives dependencies from the places and puts
every node as near to its preferred position as these dependencies allow.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from weft.compat import (
    FakeTensor,
    FakeTensorMode,
    codegen_of,
    input_nodes,
    lazy_graph_module,
    revive_node,
    set_node_order,
)
from weft.errors import GraphError, compose
from weft.graph import check, metadata, ops
from weft.graph.dag import Dag, collector_paused
from weft.graph.listings.writer import excerpt
from weft.graph.operator_effects import profile
from weft.graph.orders import check_order, contracted, displaced, placed, settled
from weft.graph.output_names import note_results
from weft.graph.versions import begin_edit, end_edit

IN_POLICY_KEY = "weft.in_policy"
"""In `Node.meta`, True: in eager execution, torch asks a checkpointing policy in Python about this operator."""
PROVENANCE = (
    "stack_trace",
    "nn_module_stack",
    "source_fn_stack",
    "original_aten",
    "from_node",
    "seq_nr",
    "partitioner_tag",
    IN_POLICY_KEY,
)
ANNOTATIONS = "custom"
"""In `Node.meta`: the dict that `torch.fx.traceback.annotate` attached to a node."""
MEMBERS_KEY = "weft.members"
"""In `Node.meta`: the names of the original nodes that a new node replaces."""
ORIGINS_KEY = "weft.origins"
"""In `Node.meta` of a node that replaces several: the provenance and the annotations of each of them."""


class Edit:
    """One transaction on a graph. As a context manager it commits at the end and rolls back on an exception."""

    def __init__(self, graph: Graph, *, keep_issue_order: bool = True, mode: FakeTensorMode | None = None) -> None:
        self.graph = graph
        self.keep_issue_order = keep_issue_order
        """False only for a pass that decides the order of launches for all ranks."""
        self._mode = mode
        self._created: list[Node] = []
        self._arguments: dict[Node, tuple[Any, Any]] = {}
        self._stale: dict[Node, None] = {}
        self._erased: dict[Node, None] = {}
        self._anchors: dict[Node, tuple[Node, bool]] = {}
        self._original: list[Node] = []
        self._inside: dict[str, tuple[GraphModule, Edit]] = {}
        self._nested: list[str] = []
        self.changed = False
        """After `commit`: whether the graph changed."""
        self._kept = begin_edit(graph)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.rollback()

    @property
    def mode(self) -> FakeTensorMode:
        """The fake mode of the graph."""
        if self._mode is None:
            self._mode = metadata.mode_of(self.graph.nodes)
        return self._mode

    @functools.cached_property
    def dag(self) -> Dag:
        """The Dag of the graph as it was when the edit began; ask for it before the first change."""
        return self._kept or Dag(self.graph)

    # Creating.

    def call(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        before: Node | None = None,
        name: str | None = None,
        like: Sequence[Node] = (),
        annotated: Sequence[Node] = (),
        value: Any = None,
    ) -> Node:
        """Create a call before a node (by default at the end of the graph) with the provenance of the nodes in `like`.

        Each key of the provenance, and each annotation, comes from the first of these nodes that has it. Annotations
        of the nodes in `annotated` take precedence. `value` is the call's fake value if the caller knows it in closed
        form; otherwise it is computed.
        """
        if value is None:
            values, keywords = map_arg((args, dict(kwargs or {})), ops.value_of)
            value = metadata.compute(target, values, keywords, self.mode)
        node = self._create("call_function", target, args, dict(kwargs or {}), before, name)
        node.meta["val"] = value
        if like:
            node.meta.update({key: n.meta[key] for n in reversed(like) for key in PROVENANCE if key in n.meta})
            node.meta.update(_annotations((*annotated, *like)))
            node.meta[MEMBERS_KEY] = tuple(m for n in like for m in n.meta.get(MEMBERS_KEY, (n.name,)))
            if len(like) > 1 or ORIGINS_KEY in like[0].meta:
                node.meta[ORIGINS_KEY] = tuple(o for n in like for o in n.meta.get(ORIGINS_KEY, (_provenance(n),)))
        return node

    def placeholder(self, name: str, value: Any) -> Node:
        """Create an input after the existing inputs."""
        node = self._create("placeholder", name, (), {}, None, name)
        node.meta["val"] = value
        return node

    def attribute(self, path: str, value: Any, *, name: str | None = None, before: Node | None = None) -> Node:
        """Create a read of an attribute of the owning module."""
        node = self._create("get_attr", path, (), {}, before, name)
        if value is not None:
            node.meta["val"] = value
        return node

    def nest(self, name: str, module: GraphModule, *, before: Node) -> Node:
        """Add a nested graph to the owning module under an unused name, and create a read of it."""
        owner: Any = self.graph.owning_module
        path = next(n for k in itertools.count() if not hasattr(owner, n := f"{name}_{k}" if k else name))
        setattr(owner, path, module)
        self._nested.append(path)
        return self.attribute(path, None, name=path, before=before)

    def output(self, result: Any) -> Node:
        """Create the output."""
        return self._create("output", "output", (result,), {}, None, None)

    def _create(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: Node | None, name: str | None
    ) -> Node:
        if before is None:
            node = self.graph.create_node(op, target, args, kwargs, name)
        else:
            with self.graph.inserting_before(before):
                node = self.graph.create_node(op, target, args, kwargs, name)
        self._created.append(node)
        return node

    # Changing.

    def set_arguments(self, node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        """Replace the arguments of a node."""
        self._arguments.setdefault(node, (node.args, node.kwargs))
        self._stale[node] = None
        node.args = args
        if kwargs is not None:
            node.kwargs = dict(kwargs)

    def replace(self, old: Node, new: Node) -> None:
        """Let every user of `old` use `new` instead."""
        self.replace_each({old: new})

    def replace_each(self, heirs: Mapping[Node, Node]) -> None:
        """Let every user of each node use its replacement instead; replacements of replacements are followed."""
        last = {old: _last_heir(old, heirs) for old in heirs}
        users = dict.fromkeys(user for old, new in last.items() for user in old.users if user is not new)
        for user in users:
            if user in self._erased or user in heirs:
                continue
            self._arguments.setdefault(user, (user.args, user.kwargs))
            if any(_changes_value(user, old, last[old]) for old in input_nodes(user) if old in last):
                self._stale[user] = None
            user.args, user.kwargs = map_arg((user.args, dict(user.kwargs)), lambda n: last.get(n, n))

    def erase(self, node: Node) -> None:
        """Erase a node; it must have no users left when the edit is committed."""
        self._erased[node] = None

    def move_before(self, nodes: Iterable[Node], anchor: Node) -> None:
        """Ask for nodes to stand right before another, in the order given."""
        for node in nodes:
            self._anchor(node, anchor, False)

    def move_after(self, nodes: Iterable[Node], anchor: Node) -> None:
        """Ask for nodes to stand right after another, in the order given."""
        for node in nodes:
            self._anchor(node, anchor, True)

    def _anchor(self, node: Node, anchor: Node, after: bool) -> None:
        self._anchors.pop(node, None)
        origin: Node | None = anchor
        while origin is not None:
            if origin is node:
                raise GraphError(
                    compose(
                        "edit",
                        f"{node.name} cannot be moved next to itself",
                        where=excerpt(node),
                        do="choose another anchor",
                    )
                )
            origin = self._anchors[origin][0] if origin in self._anchors else None
        self._anchors[node] = (anchor, after)

    def bring_together(self, groups: Sequence[Sequence[Node]]) -> None:
        """Reorder the graph so that the nodes of each group are adjacent, at the position of their last node or later.

        Call this first: positions define the meaning of nodes that are created later.
        """
        nodes = list(self.graph.nodes)
        order = contracted(self.dag, groups)
        self._original = nodes
        set_node_order(self.graph, order, displaced(order, {node: i for i, node in enumerate(nodes)}, {}))

    def arrange(self, order: Sequence[Node]) -> None:
        """Put all nodes into another order at once. An order that breaks a dependency is refused.

        Call this first, like `bring_together`. With `keep_issue_order` the launches of a group keep their order.
        """
        nodes = list(self.graph.nodes)
        check_order(self.dag, order, self.keep_issue_order)
        self._original = nodes
        set_node_order(self.graph, list(order), displaced(list(order), {node: i for i, node in enumerate(nodes)}, {}))

    def inside(self, path: Sequence[str]) -> Edit:
        """The edit of a nested graph, found by the attribute names that lead to it. Both are committed together.

        The nested graph is copied first, because other modules may share it.
        """
        owner: Any = self.graph.owning_module
        name, *rest = path
        if name not in self._inside:
            nested = getattr(owner, name, None)
            if not isinstance(nested, GraphModule):
                raise GraphError(compose("edit", f"no nested graph is called {name!r}"))
            made = copy_module(nested)
            setattr(owner, name, made)
            self._inside[name] = (nested, Edit(made.graph, mode=self._mode))
        edit = self._inside[name][1]
        return edit.inside(rest) if rest else edit

    # Ending.

    def rollback(self) -> None:
        """Leave the graph as it was."""
        for node, (args, kwargs) in self._arguments.items():
            node.args, node.kwargs = args, kwargs
        for node in reversed(self._created):
            self.graph.erase_node(node)
        if self._original:
            set_node_order(self.graph, self._original, set(self._original))
        for name, (nested, _) in self._inside.items():
            setattr(self.graph.owning_module, name, nested)
        for name in self._nested:
            delattr(self.graph.owning_module, name)
        self._forget()
        end_edit(self.graph, self._kept)

    def commit(self) -> None:
        """Sort, check and carry out the edit; on an error roll back and raise it."""
        if not (self._created or self._arguments or self._erased or self._anchors or self._original or self._inside):
            end_edit(self.graph, self._kept)  # an empty edit: most passes find nothing, and sorting takes time
            return
        with collector_paused():
            self._commit()

    def _commit(self) -> None:
        old_values: list[tuple[Node, Any]] = []
        try:
            for _, edit in self._inside.values():
                edit.commit()
            live = [node for node in self.graph.nodes if node not in self._erased]
            self._check_erased()
            old_values = metadata.update(live, self._stale_nodes(), self.mode) if self._stale else []
            placed_dag = Dag(live)
            order = self._sorted(placed_dag)
            same_as_before = order == live and not self._original
            if not self._erased and not self._created and not self._arguments and same_as_before:
                self.changed = any(edit.changed for _, edit in self._inside.values())
                self._forget()
                end_edit(self.graph, None if self.changed else self._kept)
                return
            dag = placed_dag if order == live else Dag(order)
            check.validate(dag)
        except BaseException:
            for node, value in old_values:
                node.meta["val"] = value
            self.rollback()
            raise
        positions = {node: i for i, node in enumerate(live)}
        for node in reversed(list(self._erased)):
            self.graph.erase_node(node)
        set_node_order(self.graph, order, displaced(order, positions, self._anchors))
        if order[-1] in self._arguments:
            note_results(self._arguments[order[-1]][0], order[-1].args)
        self.changed = True
        self._forget()
        end_edit(self.graph, dag)

    def _forget(self) -> None:
        self._created, self._arguments, self._stale, self._erased, self._anchors = [], {}, {}, {}, {}
        self._original, self._inside, self._nested = [], {}, []

    def _stale_nodes(self) -> list[Node]:
        return [node for node in self._stale if node not in self._erased and node.op == "call_function"]

    def _check_erased(self) -> None:
        for node in self._erased:
            user = next((user for user in node.users if user not in self._erased), None)
            if user is not None:
                what = f"{node.name} cannot be erased, {user.name} uses it"
                raise GraphError(compose("edit", what, where=excerpt(user), do=f"replace {node.name} first"))
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        self._erased = dict.fromkeys(sorted(self._erased, key=order.__getitem__))

    def _sorted(self, dag: Dag) -> list[Node]:
        wanted = placed(self.graph.nodes, self._anchors)  # nodes to be erased may still be anchors
        return settled(dag, [n for n in wanted if n not in self._erased], self.keep_issue_order)


def _provenance(node: Node) -> dict[str, Any]:
    """The provenance and the annotations of one node."""
    return {key: node.meta[key] for key in (*PROVENANCE, ANNOTATIONS) if key in node.meta}


def _annotations(nodes: Iterable[Node]) -> dict[str, Any]:
    """The merged annotations of several nodes; where two disagree, the first one wins."""
    found: dict[str, Any] = {}
    for node in nodes:
        own = node.meta.get(ANNOTATIONS)
        found = {**own, **found} if isinstance(own, dict) else found
    return {ANNOTATIONS: found} if found else {}


def _last_heir(node: Node, heirs: Mapping[Node, Node]) -> Node:
    while node in heirs:
        node = heirs[node]
    return node


def _changes_value(user: Node, old: Node, new: Node) -> bool:
    """Whether replacing one node by another changes the fake value of their user."""
    before, after = ops.value_of(old), ops.value_of(new)
    if before is after or user.target is ops.READ_NUMBER:  # the same number keeps its symbol
        return False
    return user.op != "call_function" or not profile(user.target).plain or not metadata.same(before, after)


class Snapshot:
    """A snapshot of a graph and its module's attributes, to restore if a series of edits fails halfway."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._nodes = [
            (node, node.target, node.args, node.kwargs, dict(node.meta), dict(node.users))
            for node in module.graph.nodes
        ]
        self._attributes = {name: dict(held) if name in _ATTRIBUTES else held for name, held in module.__dict__.items()}

    def restore(self) -> None:
        """Restore the graph and the attributes, with the same nodes in the same order."""
        graph, kept = self._module.graph, [node for node, *_ in self._nodes]
        added = [node for node in graph.nodes if node not in set(kept)]
        for node, target, args, kwargs, meta, _ in self._nodes:
            revive_node(node)
            node.target, node.args, node.kwargs = target, args, kwargs
            node.meta.clear()
            node.meta.update(meta)
        for node in added:
            node.args, node.kwargs = (), {}
        for node in added:
            graph.erase_node(node)
        set_node_order(graph, kept, set(kept))
        for node, *_, users in self._nodes:
            node.users = users
        for name in [name for name in self._module.__dict__ if name not in self._attributes]:
            del self._module.__dict__[name]
        for name, held in self._attributes.items():
            if name in _ATTRIBUTES:
                self._module.__dict__[name].clear()
                self._module.__dict__[name].update(held)
            else:
                self._module.__dict__[name] = held


_ATTRIBUTES = ("_modules", "_parameters", "_buffers")


# Graph modules.


def copy_module(module: GraphModule) -> GraphModule:
    """A module with a graph of its own, node for node and name for name; parameters and constants are shared.

    Tracers may leave out the fake values of attributes; the copy has them.
    """
    made = finish(module, _copied(module.graph))
    untyped = [node for node in made.graph.nodes if node.op == "get_attr" and node.meta.get("val") is None]
    found = {node: ops.attribute(module, str(node.target)) for node in untyped}
    tensors = {node: value for node, value in found.items() if isinstance(value, Tensor)}
    if tensors:
        mode = metadata.mode_of(made.graph.nodes)
        for node, value in tensors.items():
            node.meta["val"] = value if isinstance(value, FakeTensor) else mode.from_tensor(value)
    return made


def copy_graph(graph: Graph) -> Graph:
    """A scratch copy of a graph, node for node and name for name, which shares the attributes of the module."""
    owner, made = graph.owning_module, _copied(graph)
    return finish(owner, made).graph if isinstance(owner, GraphModule) else made


def _copied(graph: Graph) -> Graph:
    made = graph_of((n, n.op, n.target, n.args, n.kwargs, n.name, n.type, copy.copy(n.meta)) for n in graph.nodes)
    made.set_codegen(copy.copy(codegen_of(graph)))
    return made


def graph_of(records: Iterable[tuple[Node, str, Any, Any, Any, str, Any, dict[str, Any]]]) -> Graph:
    """A graph with a copy of each recorded node: the node, its op, target, args, kwargs, name, type and metadata."""
    made = Graph()
    copies: dict[Node, Node] = {}
    for node, op, target, args, kwargs, name, kind, meta in records:
        args, kwargs = map_arg((args, dict(kwargs)), copies.__getitem__)
        copies[node] = copied = made.create_node(op, target, args, kwargs, name, kind)
        copied.meta = meta
    return made


def append_copy(graph: Graph, node: Node, values: Mapping[Node, Any], prefix: str = "") -> Node:
    """Append a copy of a node that uses `values` in place of its inputs; the path of an attribute gets the prefix."""
    made = graph.node_copy(node, values.__getitem__)
    if node.op == "get_attr":
        made.target = prefix + str(node.target)
    return made


def finish(root: GraphModule | Mapping[str, Any], graph: Graph) -> GraphModule:
    """A graph module over a graph, with the attributes of `root`."""
    made = lazy_graph_module(root if isinstance(root, GraphModule) else dict(root), graph)
    if isinstance(root, GraphModule):
        made.meta = dict(root.meta)
    return made


def recompile(module: GraphModule) -> None:
    """Regenerate the module's Python code from its graph."""
    module.recompile()
