"""Names: none that say nothing, none used twice, and one per pass for file, class, golden file and CLI."""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.architecture.source import REPOSITORY, Source, dotted, is_pass_file, package_sources, read_sources

EMPTY_NAMES = ("utils", "util", "helpers", "helper", "common", "misc")
DOCSTRING_PARTS = ("Why:", "Before::", "After::", "Declines:", "Numerics:")
GOLDEN = REPOSITORY / "tests" / "golden"


def test_no_module_or_package_has_a_name_that_says_nothing():
    assert [finding for source in package_sources() for finding in empty_names(source)] == []


def test_no_package_shares_its_name_with_a_public_function():
    assert shared_names(package_sources()) == []


def test_every_pass_file_is_one_documented_pass_with_its_golden_file():
    assert wrong_passes(package_sources(), GOLDEN) == []


@pytest.mark.parametrize("path", ["graph/utils.py", "graph/_helpers.py", "common/dag.py", "misc/__init__.py"])
def test_a_name_that_says_nothing_is_reported(path: str):
    assert len(empty_names(Source(path, ""))) == 1


@pytest.mark.parametrize("path", ["simulate/__init__.py", "passes/simulate/base.py", "simulate.py"])
def test_a_package_named_like_a_public_function_is_reported(path: str):
    public = [Source("__init__.py", '__all__ = ["simulate"]'), Source("api.py", "def simulate(): ...")]
    assert shared_names([*public, Source("graph/simulate.py", "")]) == []
    (finding,) = shared_names([*public, Source(path, "")])
    assert "simulate is both a public function and a package" in finding


def test_a_public_package_is_no_public_function():
    init = Source("__init__.py", '__all__ = ["zoo", *more]\n__all__ += ["optimize"]')
    assert public_names([init]) == {"zoo", "optimize"}
    assert shared_names([init, Source("zoo/__init__.py", "def load(): ...")]) == []


GOOD_PASS = '''"""Sink waits.

Why: a wait blocks.

Before::

    w

After::

    w

Declines: none.
Numerics: exact.
"""

class Row: ...

class SinkWaits(base.Pass): ...
'''


def test_a_pass_file_that_keeps_the_rules_is_not_reported(tmp_path: Path):
    assert pass_findings(tmp_path, "sink_waits", GOOD_PASS) == []


@pytest.mark.parametrize(
    ("stem", "text", "found"),
    [
        ("sink_waits", GOOD_PASS.replace("SinkWaits", "SinkWait"), "expected one pass, SinkWaits, found SinkWait"),
        ("sink_waits", GOOD_PASS.replace("SinkWaits", "SinkWaitsPass"), "found SinkWaitsPass"),
        ("sink_waits", GOOD_PASS.replace("base.Pass", "object"), "expected one pass, SinkWaits, found none"),
        ("sink_waits", GOOD_PASS + "class SinkAll(Pass): ...", "found SinkWaits, SinkAll"),
        ("sink_waits", GOOD_PASS + "class SinkAll(SinkWaits): ...", "found SinkWaits, SinkAll"),
        ("sink_waits", GOOD_PASS.replace("Why:", "Because:"), "no line 'Why:' in the docstring"),
        ("sink_waits", GOOD_PASS.replace("Before::", "Before:"), "no line 'Before::' in the docstring"),
        ("sink_waits", GOOD_PASS.replace("Declines: none.\n", ""), "no line 'Declines:' in the docstring"),
        ("sink_pass", GOOD_PASS.replace("SinkWaits", "SinkPass"), "the suffix Pass says nothing"),
        ("hoist_launches", GOOD_PASS.replace("SinkWaits", "HoistLaunches"), "no golden file hoist-launches.md"),
    ],
)
def test_a_pass_file_that_breaks_a_rule_is_reported(tmp_path: Path, stem: str, text: str, found: str):
    (finding,) = pass_findings(tmp_path, stem, text)
    assert found in finding


def pass_findings(folder: Path, stem: str, text: str) -> list[str]:
    """Findings of a package with one pass file, where only the golden files of the sink passes exist."""
    passes = folder / "weft" / "passes" / "communication"
    passes.mkdir(parents=True)
    (passes / f"{stem}.py").write_text(text)
    (passes / "__init__.py").write_text("")
    for golden in ("sink-waits", "sink-pass"):
        (folder / f"{golden}.md").write_text("")
    return wrong_passes(read_sources(folder / "weft"), folder)


def empty_names(source: Source) -> list[str]:
    parts = source.path.removesuffix(".py").split("/")
    return [source.finding(1, f"the name {part} says nothing") for part in parts if part.strip("_") in EMPTY_NAMES]


def shared_names(sources: list[Source]) -> list[str]:
    definitions = {node.name for source in sources for node in source.tree.body if isinstance(node, ast.FunctionDef)}
    functions = public_names(sources) & definitions
    packages = {part for source in sources for part in source.package[1:]}
    beside_the_functions = {source.stem for source in sources if source.package == ["weft"]}
    shared = sorted(functions & (packages | beside_the_functions))
    return [f"{name} is both a public function and a package" for name in shared]


def public_names(sources: Iterable[Source]) -> set[str]:
    """The strings in whatever `weft/__init__.py` assigns or adds to `__all__`."""
    names: set[str] = set()
    for node in (node for source in sources if source.path == "__init__.py" for node in source.tree.body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if value is not None and any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            constants = (item.value for item in ast.walk(value) if isinstance(item, ast.Constant))
            names.update(name for name in constants if isinstance(name, str))
    return names


def wrong_passes(sources: list[Source], golden: Path) -> list[str]:
    pass_names = names_of_passes(sources)
    return [
        finding
        for source in sources
        if is_pass_file(source)
        for finding in [*wrong_class(source, pass_names), *wrong_docstring(source), *wrong_golden(source, golden)]
    ]


def names_of_passes(sources: list[Source]) -> set[str]:
    """Names of all classes that derive from Pass, directly or through others."""
    classes = [node for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    names = {"Pass"}
    while new := {node.name for node in classes if names & set(base_names(node))} - names:
        names |= new
    return names


def base_names(node: ast.ClassDef) -> list[str]:
    bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return [name.rsplit(".", 1)[-1] for base in bases if (name := dotted(base)) is not None]


def wrong_class(source: Source, pass_names: set[str]) -> list[str]:
    expected = "".join(part.capitalize() for part in source.stem.split("_"))
    classes = [node.name for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    found = [name for name in classes if name in pass_names]
    if found != [expected]:
        return [source.finding(1, f"expected one pass, {expected}, found {', '.join(found) or 'none'}")]
    return [source.finding(1, f"{expected}: the suffix Pass says nothing")] if expected.endswith("Pass") else []


def wrong_docstring(source: Source) -> list[str]:
    lines = (ast.get_docstring(source.tree) or "").splitlines()
    missing = [part for part in DOCSTRING_PARTS if not any(line.startswith(part) for line in lines)]
    return [source.finding(1, f"no line {part!r} in the docstring") for part in missing]


def wrong_golden(source: Source, golden: Path) -> list[str]:
    name = f"{source.stem.replace('_', '-')}.md"
    return [] if (golden / name).is_file() else [source.finding(1, f"no golden file {name}")]
