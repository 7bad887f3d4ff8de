"""A module imports only from its own layer and the layers above it in this list."""

import pytest

from tests.architecture.source import Source, imports, package_sources

LAYERS = (
    "version",
    "errors",
    "quantities",
    "files",
    "process",
    "core",
    "compat",
    "graph",
    "cost",
    "simulation",
    "bounds",
    "plan",
    "scheduling",
    "bucketing",
    "retention",
    "streaming",
    "rewriting",
    "passes",
    "verification",
    "prediction",
    "report",
    "arguments",
    "api",
    "frontends",
    "zoo",
    "integrations",
    "advice",
    "cli",
    "__init__",
)
ALSO_KNOWN = {"__main__": "cli"}
COMPILERS = "weft.compat.compilers"
"""Names of Dynamo, AOTAutograd and Inductor: for frontends only, since no other layer may depend on a compiler."""


def test_every_module_imports_only_from_its_own_layer_and_the_layers_above_it():
    assert [finding for source in package_sources() for finding in wrong_imports(source)] == []


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("graph/dag.py", "from weft.passes.base import Pass", "graph imports weft.passes.base.Pass"),
        ("graph/dag.py", "from weft import api", "graph imports weft.api"),
        ("graph/dag.py", "import weft.cost.cluster", "graph imports weft.cost.cluster"),
        ("graph/dag.py", "from ..cost import cluster", "graph imports weft.cost.cluster"),
        ("graph/__init__.py", "from ..cost import cluster", "graph imports weft.cost.cluster"),
        ("api.py", "from .cli.main import main", "api imports weft.cli.main.main"),
        ("errors.py", "def show():\n    from weft.graph import dag", "errors imports weft.graph.dag"),
        ("errors.py", "if TYPE_CHECKING:\n    import weft.compat", "errors imports weft.compat"),
        ("cli/main.py", "import weft", "cli imports weft"),
        ("passes/base.py", "importlib.import_module('weft.api')", "passes imports weft.api"),
        ("tools/main.py", "import ast", "'tools' is not in the list of layers"),
        ("graph/dag.py", "from weft.compat import compilers", "weft.compat.compilers is for frontends"),
        ("api.py", "from weft.compat.compilers import count", "weft.compat.compilers is for frontends"),
    ],
)
def test_an_import_from_a_layer_below_is_reported(path: str, text: str, found: str):
    findings = wrong_imports(Source(path, text))
    assert len(findings) == 1
    assert found in findings[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("graph/dag.py", "from weft.graph.effects import effects\nfrom weft import compat, errors\nimport torch"),
        ("graph/dag.py", "from .effects import effects\nfrom . import ops\nfrom ..errors import WeftError"),
        ("cli/main.py", "def demo():\n    from weft import api"),
        ("__main__.py", "from weft.cli.main import main"),
        ("__init__.py", "from weft.api import optimize\nfrom . import zoo"),
        ("graph/dag.py", "import weftless"),
        ("frontends/session.py", "from weft.compat import compilers as compat"),
    ],
)
def test_an_import_from_the_same_layer_or_one_above_is_not_reported(path: str, text: str):
    assert wrong_imports(Source(path, text)) == []


def wrong_imports(source: Source) -> list[str]:
    layer = ALSO_KNOWN.get(source.layer, source.layer)
    if layer not in LAYERS:
        return [source.finding(1, f"{layer!r} is not in the list of layers")]
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    findings = [
        source.finding(found.line, f"{layer} imports {found.origin}, which is in a layer below it")
        for found in imports(source)
        if (imported := layer_of(found.origin)) is not None and imported not in allowed
    ]
    if layer not in ("compat", "frontends"):
        findings += [
            source.finding(found.line, f"{COMPILERS} is for frontends")
            for found in imports(source)
            if f"{found.origin}.".startswith(f"{COMPILERS}.")
        ]
    return findings


def layer_of(origin: str) -> str | None:
    """The layer a dotted name belongs to; None if it is not in the package."""
    package, _, rest = origin.partition(".")
    if package != "weft":
        return None
    first = rest.split(".")[0]
    return first if first in LAYERS else "__init__"
