"""Sizes: a module over 400 lines, a pass over 200 or a function over 60 wants splitting."""

import ast

import pytest

from tests.architecture.source import Source, is_pass_file, package_sources

MODULE_LINES = 400
PASS_LINES = 200
FUNCTION_LINES = 60


def test_no_module_pass_or_function_is_too_long():
    assert [
        finding for source in package_sources() for finding in [*long_module(source), *long_functions(source)]
    ] == []


@pytest.mark.parametrize(
    ("path", "limit"),
    [("graph/dag.py", 400), ("passes/base.py", 400), ("passes/rewrite/fuse_addmms.py", 200)],
)
def test_a_file_one_line_too_long_is_reported(path: str, limit: int):
    assert long_module(Source(path, "x = 1\n" * limit)) == []
    (finding,) = long_module(Source(path, "x = 1\n" * (limit + 1)))
    assert f"{limit + 1} lines, at most {limit}" in finding


@pytest.mark.parametrize("header", ["def long():\n", "async def long():\n", "class Row:\n def long(self):\n"])
def test_a_function_one_line_too_long_is_reported(header: str):
    assert long_functions(Source("graph/dag.py", header + "  x = 1\n" * 59)) == []
    (finding,) = long_functions(Source("graph/dag.py", header + "  x = 1\n" * 60))
    assert "long has 61 lines, at most 60" in finding


def long_module(source: Source) -> list[str]:
    limit = PASS_LINES if is_pass_file(source) else MODULE_LINES
    lines = len(source.text.splitlines())
    return [source.finding(1, f"{lines} lines, at most {limit}")] if lines > limit else []


def long_functions(source: Source) -> list[str]:
    functions = (node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    lengths = ((node, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions)
    return [
        source.finding(node.lineno, f"{node.name} has {lines} lines, at most {FUNCTION_LINES}")
        for node, lines in lengths
        if lines > FUNCTION_LINES
    ]
