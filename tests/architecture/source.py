"""The source of the package as text and syntax trees: what every architecture test walks. Nothing is imported."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "src" / "weft"


@dataclass(frozen=True)
class Source:
    """One Python file. Its path is relative to the package and written with slashes: `graph/edit.py`."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @property
    def package(self) -> list[str]:
        """The dotted parts of the package the file is in, itself if it is an `__init__.py`."""
        return ["weft", *self.path.split("/")[:-1]]

    @property
    def layer(self) -> str:
        """The first part of the path: `graph`, `compat`, `__init__`."""
        return self.path.split("/")[0].removesuffix(".py")

    @property
    def stem(self) -> str:
        return self.path.rsplit("/", 1)[-1].removesuffix(".py")

    def finding(self, line: int, message: str) -> str:
        return f"src/weft/{self.path}:{line}: {message}"


@dataclass(frozen=True)
class Import:
    """One imported name: the local name it binds and the dotted name it comes from."""

    line: int
    local: str
    origin: str


def read_sources(package: Path) -> list[Source]:
    """All Python files of a package, ordered by path."""
    paths = sorted(package.rglob("*.py"))
    return [Source(path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


@cache
def package_sources() -> list[Source]:
    """The files of Weft. None at all would let every check pass, so that is an error."""
    sources = read_sources(PACKAGE)
    if not sources:
        raise FileNotFoundError(f"no Python files under {PACKAGE}")
    return sources


def is_pass_file(source: Source) -> bool:
    return source.package[1:] in (["passes", "communication"], ["passes", "rewrite"]) and source.stem != "__init__"


def imports(source: Source) -> Iterator[Import]:
    """Every import of a file, at any depth, relative ones resolved, `import_module("x")` included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.asname or alias.name.split(".")[0], alias.name)
        elif isinstance(node, ast.ImportFrom):
            start = source.package[: len(source.package) - node.level + 1] if node.level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(node.lineno, alias.asname or alias.name, f"{origin}.{alias.name}")
        elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__"):
            for name in node.args[:1]:
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield Import(node.lineno, "", name.value)


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` of an expression that is a chain of names, else None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def called_name(call: ast.Call) -> str | None:
    """The last name of what is called: `f` for `f()` and for `a.b.f()`."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else None


def docstrings(tree: ast.Module) -> set[ast.Constant]:
    """Strings that stand alone as a statement: docstrings of modules, classes, functions and fields."""
    expressions = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {value for value in expressions if isinstance(value, ast.Constant) and isinstance(value.value, str)}
