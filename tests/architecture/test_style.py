"""What no source file holds: bare asserts, unfinished work, and anything that runs text or unpickles a file."""

import ast
import re

import pytest

from tests.architecture.source import Source, dotted, imports, package_sources

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
RUNS_TEXT = ("exec", "eval", "builtins.exec", "builtins.eval")
UNPICKLES = ("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve")


def test_no_file_asserts_is_unfinished_runs_text_unpickles_or_prints():
    assert [finding for source in package_sources() for finding in style_findings(source)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("assert x", "assert: raise a WeftError"),
        ("x = 1  # TODO: more", "TODO"),
        ('"""FIXME"""', "FIXME"),
        ("# XXX", "XXX"),
        ("raise NotImplementedError", "raise NotImplementedError"),
        ("raise NotImplementedError('later')", "raise NotImplementedError"),
        ("exec(text)", "exec("),
        ("eval(text)", "eval("),
        ("import builtins\nbuiltins.eval(text)", "eval("),
        ("import pickle", "pickle"),
        ("def f():\n    from pickle import loads", "pickle"),
        ("import torch\ntorch.load(path)", "torch.load("),
        ("from torch import load", "torch.load"),
        ("print(x)", "print("),
    ],
)
def test_each_of_them_is_reported(text: str, found: str):
    (finding,) = style_findings(Source("graph/dag.py", text))
    assert found in finding


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "ast.literal_eval(text)",
        "json.load(file)",
        "return_value = NotImplemented",
        "try: ...\nexcept NotImplementedError: ...",
        "console.print(x)",
    ],
)
def test_what_only_looks_like_them_is_not_reported(text: str):
    assert style_findings(Source("graph/dag.py", text)) == []


def test_the_command_line_may_print():
    assert style_findings(Source("cli/main.py", "print(x)")) == []


def style_findings(source: Source) -> list[str]:
    nodes = (node for node in ast.walk(source.tree) if isinstance(node, ast.Assert | ast.Raise | ast.Call))
    found = [
        *((line, what) for line, text in enumerate(source.text.splitlines(), 1) for what in UNFINISHED.findall(text)),
        *((node.lineno, what) for node in nodes if (what := fault(node, source.layer == "cli"))),
        *((found.line, found.origin) for found in imports(source) if is_forbidden_import(found.origin)),
    ]
    return [source.finding(line, what) for line, what in sorted(found)]


def fault(node: ast.Assert | ast.Raise | ast.Call, may_print: bool) -> str | None:
    if isinstance(node, ast.Assert):
        return "assert: raise a WeftError"
    if isinstance(node, ast.Call):
        name = dotted(node.func)
        is_fault = name in RUNS_TEXT or name == "torch.load" or (name == "print" and not may_print)
        return f"{name}(" if is_fault else None
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    is_unfinished = raised is not None and dotted(raised) == "NotImplementedError"
    return "raise NotImplementedError" if is_unfinished else None


def is_forbidden_import(origin: str) -> bool:
    return origin.split(".")[0] in UNPICKLES or origin == "torch.load"
