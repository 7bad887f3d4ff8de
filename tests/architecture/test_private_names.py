"""Private torch names change without notice: they live in the package compat only.

A name is private if one of its parts begins with a single underscore: `torch._C`, `node._erased`. Names of operators
(`torch.ops.aten._to_copy`) are the vocabulary of graphs and not private; the namespaces of functional collectives are
for compat and graph/ops.py. A module may use the private names that it defines itself.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.architecture.source import Source, called_name, docstrings, dotted, imports, package_sources

HOME = "compat/__init__.py"
VOCABULARY = "graph/ops.py"
COLLECTIVE_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
FORBIDDEN = "torch._inductor.fx_passes"
NAMED_TUPLE = ("_asdict", "_fields", "_field_defaults", "_make", "_replace")
ENUMERATION = ("_missing_", "_name_", "_value_")
NAME_IN_A_STRING = re.compile(r"(torch|_c10d_functional\w*)([.:]+\w+)*")


@dataclass(frozen=True)
class Use:
    """A dotted name as it is used, its first part resolved through imports; `?` stands for a base that is no name."""

    line: int
    name: str


def test_private_torch_names_appear_only_in_compat():
    assert [finding for source in package_sources() for finding in private_names(source)] == []


def test_nothing_is_imported_from_the_passes_of_inductor():
    assert [finding for source in package_sources() for finding in forbidden_names(source)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch._C", "torch._C"),
        ("import torch._subclasses.fake_tensor as fake", "torch._subclasses"),
        ("from torch._subclasses import FakeTensor", "torch._subclasses"),
        ("from torch.fx.node import _side_effectful_functions", "torch.fx.node._side_effectful_functions"),
        ("def late():\n    from torch import _dynamo", "torch._dynamo"),
        ("import torch\ntorch._C._distributed_c10d", "torch._C"),
        ("from torch import fx\nfx._pytree.register", "torch.fx._pytree"),
        ("import torch\ncore = torch.nn\ncore._reduction", "torch.nn._reduction"),
        ("def key(tensor):\n    return tensor._cdata", "tensor._cdata"),
        ("def key(tensor):\n    return tensor.storage()._cdata", "?._cdata"),
        ("class Row:\n    def key(self):\n        return self._graph._codegen", "self._graph._codegen"),
        ("def key(tensor):\n    return getattr(tensor, '_cdata', None)", "tensor._cdata"),
        ("import torch\ntorch.ops._c10d_functional.wait_tensor", "torch.ops._c10d_functional"),
        ("NAMESPACE = '_c10d_functional'", "_c10d_functional"),
        ("NAME = '_c10d_functional::wait_tensor'", "_c10d_functional"),
        ("NAME = 'torch._dynamo.config'", "torch._dynamo"),
        ("from weft.graph.edit import _order", "weft.graph.edit._order"),
        ("from weft.graph import edit\nedit._order()", "weft.graph.edit._order"),
    ],
)
def test_a_private_name_is_reported(text: str, found: str):
    (finding,) = private_names(Source("graph/dag.py", text))
    assert finding.endswith(f" {found} is private")
    assert private_names(Source(HOME, text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.ops.aten._to_copy.default",
        "import torch\naten = torch.ops.aten\naten._to_copy.default",
        "class Row:\n    def same(self, other):\n        self._key = 1\n        return other._key == self._inherited",
        "class Row:\n    _key: int\ndef key(row):\n    return row._key",
        "_cache = {}\ndef clear():\n    _cache.clear()",
        "class Row(NamedTuple): ...\ndef shift(row):\n    return row._replace(start=0)",
        "def rename(member):\n    member._name_ = member._value_ = 'WEFT'",
        "import os\nos._exit(0)",
        "from __future__ import annotations\nx.__class__.__name__\n_, y = z",
        '"""Reads `torch._C` and _c10d_functional."""\nMESSAGE = "expected an op of _c10d_functional here"',
    ],
)
def test_a_name_that_is_public_or_our_own_is_not_reported(text: str):
    assert private_names(Source("graph/dag.py", text)) == []


def test_the_vocabulary_may_name_the_namespaces_of_collectives_and_no_other_private_name():
    text = "import torch\ntorch.ops._c10d_functional.wait_tensor\ntorch.ops._dtensor\nNAME = '_c10d_functional'"
    assert private_names(Source(VOCABULARY, text)) == []
    assert len(private_names(Source(VOCABULARY, "import torch\ntorch.ops._dynamo\ntorch._C"))) == 2


@pytest.mark.parametrize(
    "text",
    [
        "import torch._inductor.fx_passes.bucketing",
        "from torch._inductor import fx_passes",
        "from torch._inductor.fx_passes import bucketing",
        "import torch\ntorch._inductor.fx_passes.bucketing",
        "importlib.import_module('torch._inductor.fx_passes')",
    ],
)
def test_the_passes_of_inductor_are_reported_even_in_compat(text: str):
    assert len(forbidden_names(Source(HOME, text))) == 1


def private_names(source: Source) -> list[str]:
    if source.layer == "compat":
        return []
    own = own_names(source.tree)
    found = sorted({(use.line, name) for use in uses(source) if (name := private_part(use.name, source.path, own))})
    return [source.finding(line, f"{name} is private") for line, name in found]


def forbidden_names(source: Source) -> list[str]:
    lines = sorted({use.line for use in uses(source) if f"{use.name}.".startswith(f"{FORBIDDEN}.")})
    return [source.finding(line, f"{FORBIDDEN} is not used here") for line in lines]


def private_part(name: str, path: str, own: set[str]) -> str | None:
    """The name up to its first private part; None if nothing in it is private."""
    parts = name.split(".")
    if parts[0] in COLLECTIVE_NAMESPACES:
        return None if path == VOCABULARY else parts[0]
    if parts[:2] == ["torch", "ops"]:
        namespace = parts[2] if len(parts) > 2 else ""
        is_allowed = path == VOCABULARY and namespace in COLLECTIVE_NAMESPACES
        return f"torch.ops.{namespace}" if is_private(namespace) and not is_allowed else None
    is_ours = parts[0] not in ("torch", "weft")
    start = 2 if parts[0] in ("self", "cls") else 1
    for index, part in enumerate(parts[start:], start):
        if is_private(part) and not (is_ours and (part in (*own, *NAMED_TUPLE, *ENUMERATION))):
            return ".".join(parts[: index + 1])
    return None


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__") and part != "_"


def uses(source: Source) -> Iterator[Use]:
    """Imports, attributes, `getattr` by constant name, and strings that are a dotted name."""
    origins = resolve(source)
    for found in imports(source):
        yield Use(found.line, found.origin)
    skipped = docstrings(source.tree) | names_given_to_getattr(source.tree)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            yield from attribute_use(node.value, node.attr, origins, node.lineno)
        elif isinstance(node, ast.Call) and (name := constant_attribute(node)) is not None:
            yield from attribute_use(node.args[0], str(name.value), origins, node.lineno)
        elif isinstance(node, ast.Constant) and node not in skipped and NAME_IN_A_STRING.fullmatch(str(node.value)):
            yield Use(node.lineno, re.sub(r"[.:]+", ".", str(node.value)))


def attribute_use(base: ast.expr, attribute: str, origins: dict[str, str], line: int) -> Iterator[Use]:
    """The use of an attribute, unless it belongs to a library other than torch."""
    is_super = isinstance(base, ast.Call) and called_name(base) == "super"
    root, _, rest = ("self" if is_super else dotted(base) or "?").partition(".")
    owner = origins.get(root, root)
    if root not in origins or owner.split(".")[0] in ("torch", "weft"):
        yield Use(line, ".".join(part for part in (owner, rest, attribute) if part))


def constant_attribute(call: ast.Call) -> ast.Constant | None:
    """The name in `getattr(x, "name")` and its kin."""
    if called_name(call) not in ("getattr", "hasattr", "setattr", "delattr") or len(call.args) < 2:
        return None
    name = call.args[1]
    return name if isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def names_given_to_getattr(tree: ast.Module) -> set[ast.Constant]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {name for call in calls if (name := constant_attribute(call)) is not None}


def resolve(source: Source) -> dict[str, str]:
    """What local names stand for: imports, and assignments such as `aten = torch.ops.aten`."""
    origins = {
        found.local: found.local if found.local == found.origin.split(".")[0] else found.origin
        for found in imports(source)
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            root, _, rest = (dotted(node.value) or "").partition(".")
            if root in origins and rest:
                origins[node.targets[0].id] = f"{origins[root]}.{rest}"
    return origins


def own_names(tree: ast.Module) -> set[str]:
    """What a module defines: functions, classes, variables, fields, and attributes of `self` and `cls`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and dotted(node.value) in ("self", "cls")
        ):
            names.add(node.attr)
    return names
