"""Only graph/edit.py writes FX graphs; everything else asks an `Edit` for it."""

import ast

import pytest

from tests.architecture.source import Source, called_name, dotted, package_sources

WRITER = "graph/edit.py"

WRITES = frozenset(
    {
        "create_node",
        "eliminate_dead_code",
        "erase_node",
        "graph_copy",
        "insert_arg",
        "inserting_after",
        "inserting_before",
        "lint",
        "node_copy",
        "prepend",
        "recompile",
        "replace_all_uses_with",
        "replace_input_with",
        "set_codegen",
        "update_arg",
        "update_kwarg",
    }
)
"""Methods of fx.Graph, fx.Node and fx.GraphModule that write. `append` is left out: it is also a method of lists."""

INTERPRETER_WRITES = frozenset({"call_function", "call_method", "call_module", "get_attr", "output", "placeholder"})
"""Methods of fx.Graph that fx.Interpreter has too, where they run a node: fine on `self` and `super()`."""

FIELDS = frozenset({"args", "kwargs", "target"})


def test_only_the_edit_writes_graphs():
    assert [finding for source in package_sources() for finding in writes(source)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *[(f"graph.{name}(x)", f".{name}(") for name in sorted(WRITES | INTERPRETER_WRITES)],
        ("with gm.graph.inserting_before(node): pass", ".inserting_before("),
        ("self.graph.call_function(relu, (x,))", ".call_function("),
        ("launches[0].replace_all_uses_with(wait)", ".replace_all_uses_with("),
        ("node.args = (x,)", "assigns .args"),
        ("a, node.kwargs = 1, {}", "assigns .kwargs"),
        ("node.args += (x,)", "assigns .args"),
        ("nodes[0].target = relu", "assigns .target"),
        ("del node.args", "assigns .args"),
    ],
)
def test_a_write_is_reported_anywhere_but_in_the_edit(text: str, found: str):
    (finding,) = writes(Source("passes/base.py", text))
    assert found in finding
    assert writes(Source(WRITER, text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "super().call_function(f, (), {})",
        "self.output(x)",
        "def apply(edit, step):\n    edit.output(x)\n    self.edit.placeholder('x')",
        "self.args = args",
        "x = node.args[0]\ny = node.target",
        "names.append(node.name)",
    ],
)
def test_running_a_node_reading_it_and_asking_the_edit_are_not_reported(text: str):
    assert writes(Source("passes/base.py", text)) == []


def writes(source: Source) -> list[str]:
    if source.path == WRITER:
        return []
    calls = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
    attributes = (node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute))
    found = [
        *((call.lineno, f"calls .{name}(") for call in calls if (name := written_by(call))),
        *((attribute.lineno, f"assigns .{attribute.attr}") for attribute in attributes if is_assigned(attribute)),
    ]
    return [source.finding(line, f"{what}, which only {WRITER} may") for line, what in sorted(found)]


def written_by(call: ast.Call) -> str | None:
    """The method by which a call writes a graph, if it does."""
    if not isinstance(call.func, ast.Attribute) or is_edit(call.func.value):
        return None
    name = call.func.attr
    runs_a_node = name in INTERPRETER_WRITES and is_self_or_super(call.func.value)
    return name if name in WRITES | INTERPRETER_WRITES and not runs_a_node else None


def is_assigned(attribute: ast.Attribute) -> bool:
    """Whether such a field is assigned to. A name does not tell whether it is a node's, so all count but `self`'s."""
    is_written = attribute.attr in FIELDS and not isinstance(attribute.ctx, ast.Load)
    return is_written and not is_self_or_super(attribute.value)


def is_edit(receiver: ast.expr) -> bool:
    return (dotted(receiver) or "").rsplit(".", 1)[-1] == "edit"


def is_self_or_super(receiver: ast.expr) -> bool:
    return dotted(receiver) == "self" or (isinstance(receiver, ast.Call) and called_name(receiver) == "super")
