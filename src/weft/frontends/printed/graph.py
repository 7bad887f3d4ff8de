"""Graphs as torch prints them, read back: a class with a `forward` whose lines are operators.

    class GraphModule(torch.nn.Module):
        def forward(self, x: "f32[2, 4][4, 1]cpu"):
            # File: model.py:12 in forward, code: y = torch.relu(x)
            relu: "f32[2, 4][4, 1]cpu" = torch.ops.aten.relu.default(x);  x = None
            return (relu,)

Contract: the reader walks the syntax tree and looks operators up in torch's registry; it executes nothing. Fake kernels
recompute each value, which must agree with the printed type. The printed type is used alone where torch has no fake
kernel for a call, or the call must not be run. Comments become stack traces. Groups keep their run-time names in the
module's table. Every fault is a ReadError with its line.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from weft.compat import HigherOrderOperator, lacks_fake_kernel
from weft.errors import GraphError, ReadError, compose
from weft.frontends.printed.inputs import Input, inputs_of
from weft.frontends.printed.text import PrintedText
from weft.frontends.printed.types import NumberType, PrintedTypes, TensorType, first_line
from weft.frontends.printed.values import OPERATIONS, ValueReader, operator_called
from weft.graph import metadata, ops
from weft.graph.dag import collector_paused
from weft.graph.edit import Edit, finish
from weft.graph.groups import TABLE_KEY, Group, GroupTable, group_argument, table_of
from weft.graph.listings.literals import dotted
from weft.graph.unknown_graph import UnknownGraph

Groups = Mapping[str, int | Sequence[Sequence[int]]]
Written = TensorType | NumberType
UNKNOWN = object()
"""Marks a call that has no computed value."""


class Scope(NamedTuple):
    """State shared by the lines of one function."""

    edit: Edit
    names: dict[str, Node]
    root: dict[str, Any]
    """Attributes of the module: constants and nested graphs."""
    nested: Mapping[str, GraphModule]
    items: Mapping[str, Mapping[Any, tuple[ast.AST, Written]]]
    """For each value that the function unpacks: the printed types of its items."""


class GraphReader:
    """Reads the printed classes of one text."""

    def __init__(
        self,
        text: PrintedText,
        *,
        hints: Mapping[str, int] | None = None,
        groups: Groups | None = None,
        sizes: Mapping[str, int] | None = None,
        inputs: Mapping[str, Any] | None = None,
        constants: Mapping[str, Tensor | UnknownGraph] | None = None,  # fake tensors and lost graphs by path
        types: PrintedTypes | None = None,
    ) -> None:
        self.text = text
        self.types = types or PrintedTypes(text, hints or {})
        self.values = ValueReader(text, self.types)
        self.given, self.sizes = groups or {}, sizes or {}
        self.inputs, self.constants = inputs or {}, constants or {}
        self.traces = text.stack_traces()
        self.groups: dict[str, tuple[ast.AST, list[int]]] = {}
        """By run-time name: the first use of the group, and the sizes that its launches state."""

    def read(self, at: ast.ClassDef) -> GraphModule:
        """The graph module of a class, with its table of groups."""
        try:
            with collector_paused():
                module = self._class(at)
        except RecursionError:
            self.text.fail(at, "the text is nested too deeply")
        module.meta[TABLE_KEY] = self._table()
        return module

    def _class(self, at: ast.ClassDef) -> GraphModule:
        functions = [s for s in at.body if isinstance(s, ast.FunctionDef) and s.name == "forward"]
        if len(functions) != 1 or at.decorator_list:
            self.text.fail(at, f"{at.name} has {len(functions)} functions called forward, one is needed", name=at.name)
        nested: dict[str, GraphModule] = {}
        for statement in at.body:
            if isinstance(statement, ast.ClassDef):
                nested[statement.name] = self._class(statement)
            elif not isinstance(statement, ast.FunctionDef) and not is_text(statement):
                self.text.fail(statement, "expected `def forward(self, ...)` or a nested class")
        return self._function(functions[0], nested)

    def _function(self, at: ast.FunctionDef, nested: Mapping[str, GraphModule]) -> GraphModule:
        found, body = inputs_of(self.text, at)
        if not body or not isinstance(body[-1], ast.Return):
            self.text.fail(body[-1] if body else at, "forward does not end with a return", "is the text complete?")
        scope = Scope(Edit(Graph(), mode=self.types.mode), {}, {}, nested, self._items(body))
        for each in found:
            value = self._input_value(each)
            scope.names[each.name] = self._unique(each.at, each.name, scope.edit.placeholder(each.name, value))
        for statement in body[:-1]:
            self._statement(statement, scope)
        scope.edit.output(self._result(body[-1], scope))
        try:
            return finish(scope.root, scope.edit.graph)
        except Exception as error:  # torch generates the module's code here and rejects names such as `forward`
            self.text.fail(at, f"torch cannot make a module of it: {type(error).__name__}: {first_line(error)}")

    def _items(self, body: Sequence[ast.stmt]) -> dict[str, dict[Any, tuple[ast.AST, Written]]]:
        items: dict[str, dict[Any, tuple[ast.AST, Written]]] = {}
        for at in body:
            if isinstance(at, ast.AnnAssign) and isinstance(at.value, ast.Subscript):
                whole, key = at.value.value, at.value.slice
                if isinstance(whole, ast.Name) and isinstance(key, ast.Constant) and type(key.value) in (int, str):
                    items.setdefault(whole.id, {})[key.value] = (at, self.types.written(at.annotation))
        return items

    def _input_value(self, each: Input) -> Any:
        if each.name in self.inputs:
            return self.inputs[each.name]
        if each.annotation is None:
            return None  # torch prints no type for generators, tokens and groups
        return self.types.value(each.at, self.types.written(each.annotation), each.name)

    # Lines.

    def _statement(self, at: ast.stmt, scope: Scope) -> None:
        if is_text(at) or isinstance(at, ast.Pass):
            return
        if isinstance(at, ast.Assign) and is_none(at.value):
            for target in at.targets:
                if not isinstance(target, ast.Name) or scope.names.pop(target.id, None) is None:
                    self.text.fail(at, "only a defined name can be set to None", name=ast.unparse(target))
            return
        target = at.target if isinstance(at, ast.AnnAssign) else None
        if isinstance(at, ast.Assign) and len(at.targets) == 1:
            target = at.targets[0]
        value = at.value if isinstance(at, ast.Assign | ast.AnnAssign) else None
        if not isinstance(target, ast.Name) or value is None:
            self.text.fail(at, "expected a line such as `relu = torch.ops.aten.relu.default(x)`")
        if target.id in scope.names:
            self.text.fail(at, f"{target.id} is defined twice", name=target.id)
        written = self.types.written(at.annotation) if isinstance(at, ast.AnnAssign) else None
        node = self._unique(at, target.id, self._node(target.id, value, written, scope))
        trace = self.traces[at.lineno - 1]
        if trace:
            node.meta["stack_trace"] = trace
        scope.names[target.id] = node

    def _unique(self, at: ast.AST, name: str, node: Node) -> Node:
        if node.name != name:
            self.text.fail(at, f"{name!r} cannot be the name of a node", name=name)
        return node

    def _node(self, name: str, at: ast.expr, written: Written | None, scope: Scope) -> Node:
        path = dotted(at) if isinstance(at, ast.Attribute) else None
        if path is not None and path.startswith("self."):
            return self._attribute(name, at, path.removeprefix("self."), written, scope)
        operands = operands_of(at)
        if operands is not None:
            target = ops.op_of(f"operator.{operands[0]}")
            return self._call(
                name, at, target, [self.values.read(a, scope.names) for a in operands[1]], {}, written, scope
            )
        if not isinstance(at, ast.Call):
            self.text.fail(at, "expected an operator, an item or an attribute of self on the right side", name=name)
        target = operator_called(self.text, at)
        args = [self.values.read(argument, scope.names) for argument in at.args]
        if any(word.arg is None for word in at.keywords):
            self.text.fail(at, "'**' is not supported here", name="**")
        kwargs = {str(word.arg): self.values.read(word.value, scope.names) for word in at.keywords}
        return self._call(name, at, target, args, kwargs, written, scope)

    def _attribute(self, name: str, at: ast.AST, path: str, written: Written | None, scope: Scope) -> Node:
        if path in scope.nested:
            scope.root[path] = scope.nested[path]
            return scope.edit.attribute(path, None, name=name)
        fake = self.constants.get(path)
        if isinstance(written, TensorType):
            fake = self.types.value(at, written, name)
        if isinstance(fake, UnknownGraph):
            scope.root[path] = fake
            return scope.edit.attribute(path, None, name=name)
        if fake is None:
            do = "read nested graphs from the post-grad graphs of a trace log; print constants with their types"
            self.text.fail(at, f"the text does not define self.{path}", do, path)
        if any(not isinstance(n, int) for n in [*fake.shape, *fake.stride()]):
            self.text.fail(at, f"the constant {path} has symbolic sizes", name=path)
        scope.root[path] = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        return scope.edit.attribute(path, fake, name=name)

    def _call(
        self,
        name: str,
        at: ast.AST,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        written: Written | None,
        scope: Scope,
    ) -> Node:
        items = scope.items.get(name, {})
        values, keywords = map_arg((tuple(args), dict(kwargs)), ops.value_of)
        value = self._computed(at, target, values, keywords, written is not None or bool(items))
        inputs = flat([*values, *keywords.values()])
        if value is UNKNOWN:
            value = self.types.value(at, written, name) if written is not None else self._of_items(items)
        elif written is not None:
            value = self.types.reconcile(at, name, written, value, inputs)
        elif items:
            # Inductor turns foreach operators into in-place ones, which return nothing, but still prints reads of their
            # items. The items are then those of the first argument.
            value = values[0] if value is None and values else value
            value = self._with_items(name, value, items, inputs)
        node = scope.edit.call(target, tuple(args), kwargs, name=name, value=() if value is None else value)
        node.meta["val"] = value
        if ops.is_communication(target):
            self._note_group(at, node)
        return node

    def _computed(self, at: ast.AST, target: Any, args: Any, kwargs: Any, has_type: bool) -> Any:
        is_nested = isinstance(target, HigherOrderOperator) and (has_type or not metadata.has_own_kernel(target))
        if is_nested or ops.kind_of(target) is ops.Kind.BARRIER:
            return UNKNOWN  # may have effects even on fake values
        if target is getitem and args and args[0] is None:
            do = "read the graph from a TORCH_TRACE log, which prints types and nested graphs"
            self.text.fail(at, "the text does not say what the call returns", do)
        try:
            return metadata.compute(target, args, kwargs, self.types.mode)
        except GraphError as error:
            is_unknown = lacks_fake_kernel(error.__context__)
            if has_type and is_unknown:
                return UNKNOWN
            do = "print the graph with its types, or give hints={'s0': 8} for the sizes of its inputs"
            self.text.fail(at, str(error), do if is_unknown else "")
        except (TypeError, IndexError, KeyError, AttributeError, ValueError, RuntimeError) as error:
            self.text.fail(at, f"{ops.name_of(target)}: {first_line(error)}")

    def _of_items(self, items: Mapping[Any, tuple[ast.AST, Written]]) -> Any:
        """The value of a call without a fake kernel, from the printed types of its items; None without them."""
        made = {key: self.types.value(at, written, f"item {key}") for key, (at, written) in items.items()}
        if not made or any(isinstance(key, str) for key in made):
            return made or None
        if max(made) > len(made) * 1000 or min(made) < 0:
            self.text.fail(items[max(made)][0], f"item {max(made)} does not exist")
        return tuple(made.get(i) for i in range(max(made) + 1))

    def _with_items(
        self, name: str, value: Any, items: Mapping[Any, tuple[ast.AST, Written]], inputs: Sequence[Any]
    ) -> Any:
        if not isinstance(value, list | tuple):
            return value
        made: list[Any] = list(value)
        for key, (at, written) in items.items():
            if not isinstance(key, int) or not 0 <= key < len(made):
                self.text.fail(at, f"{name} has {len(made)} items, so item {key!r} does not exist", name=name)
            made[key] = self.types.reconcile(at, f"item {key} of {name}", written, made[key], inputs)
        return made if isinstance(value, list) else tuple(made)

    def _result(self, at: ast.Return, scope: Scope) -> Any:
        value = at.value
        if isinstance(value, ast.Call) and dotted(value.func) == "pytree.tree_unflatten" and value.args:
            value = value.args[0]
        return self.values.read(value, scope.names) if value is not None else None

    # Groups.

    def _note_group(self, at: ast.AST, node: Node) -> None:
        name = group_argument(node)
        if not isinstance(name, str):
            return
        sizes = self.groups.setdefault(name, (at, []))[1]
        bound = ops.bind(node)
        splits = bound.get("output_split_sizes")  # of an all-to-all: one for each rank
        size = len(splits) if isinstance(splits, list | tuple) else bound.get("group_size")
        if isinstance(size, int) and size not in sizes:
            sizes.append(size)
        if len(sizes) > 1:
            self.text.fail(at, f"group {name!r} has {sizes[1]} ranks here and {sizes[0]} above", name=repr(name))

    def _table(self) -> GroupTable:
        found = {
            key: self._group(
                use, key if key.isidentifier() else "", key, next(iter(sizes), 0) or self.sizes.get(key, 0)
            )
            for key, (use, sizes) in self.groups.items()
        }
        return table_of(found, (key for key, group in found.items() if group.ranks is None))

    def _group(self, at: ast.AST, name: str, key: str, size: int) -> Group:
        given = self.given.get(key, size)
        try:
            ranks = None if isinstance(given, int) else tuple(tuple(int(rank) for rank in part) for part in given)
        except (TypeError, ValueError):
            do = "give a size, or the ranks of every group: groups={'1': [[0, 1], [2, 3]]}"
            raise ReadError(
                compose("groups", f"{given!r} is neither a size nor a list of ranks for group {key!r}", do=do)
            ) from None
        found = given if isinstance(given, int) else max(map(len, ranks or ()), default=0)
        if size and found != size:
            self.text.fail(
                at, f"group {key!r} has {size} ranks in its launches, but {found} were given", name=repr(key)
            )
        if found < 1:
            what = f"the text does not say how many ranks group {key!r} has"
            self.text.fail(at, what, f"give its size: groups={{{key!r}: 8}}", repr(key))
        return Group(name, found, 1, ranks)


def operands_of(at: ast.expr) -> tuple[str, list[ast.expr]] | None:
    """The function of module `operator` that an expression calls, and its operands; None for other expressions."""
    if isinstance(at, ast.Subscript):
        return "getitem", [at.value, at.slice]
    if isinstance(at, ast.BinOp) and type(at.op) in OPERATIONS:
        return OPERATIONS[type(at.op)], [at.left, at.right]
    if isinstance(at, ast.Compare) and len(at.ops) == 1 and type(at.ops[0]) in OPERATIONS:
        return OPERATIONS[type(at.ops[0])], [at.left, at.comparators[0]]
    if isinstance(at, ast.UnaryOp) and type(at.op) in OPERATIONS:
        return OPERATIONS[type(at.op)], [at.operand]
    return None


def flat(values: Sequence[Any]) -> list[Any]:
    """The values, with nested lists and tuples flattened."""
    return [item for value in values for item in (flat(value) if isinstance(value, list | tuple) else [value])]


def is_text(at: ast.stmt) -> bool:
    """Whether a statement is a bare constant, such as a docstring."""
    return isinstance(at, ast.Expr) and isinstance(at.value, ast.Constant)


def is_none(at: ast.expr) -> bool:
    """Whether an expression is the constant None."""
    return isinstance(at, ast.Constant) and at.value is None
