"""The README of the golden files, and the table of rewrites: everything that they name exists."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.golden.goldens import FOLDER, sections
from weft.passes.base import all_passes

ROOT = FOLDER.parent.parent
LEFT = "left to the compiler below"
MAY_BE_LEFT = {5, 15, 23}
MECHANISMS = {3, 4, 14, 18, 19, 20, 22, 24, 32}
"""Rows that a lower layer may answer instead of a pass."""

HEADER = "file: section"


def test_every_section_that_the_readme_names_exists():
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| ")]
    named = [row.split("|", 2)[2].removesuffix("|").strip() for row in rows]
    known = {section.id for section in sections()}
    assert len(named) > 100
    assert [name for name in named if name not in {*known, HEADER}] == []


def rows_of_the_pipeline() -> list[tuple[int, str, str]]:
    """Number, what does it, and what shows it: the table that follows the heading in the docs."""
    text = (
        (ROOT / "docs" / "rewrites.md")
        .read_text()
        .partition("\n## PyTorch's post-grad steps, one by one\n")[2]
        .partition("\n## ")[0]
    )
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if re.match(r"\| \d", line)]
    return [(int(row.split()[0]), done, shown) for row, done, shown in cells]


def exists(name: str) -> bool:
    """Whether a name in the table is a pass, a file, a test or something of the package."""
    path, _, test = name.partition("::")
    if path.startswith("weft."):
        module, _, attribute = path.rpartition(".")
        return hasattr(importlib.import_module(module), attribute)
    if not path.startswith("tests/"):
        return path in all_passes()
    file = Path(ROOT / path)
    return file.is_file() and (not test or test in functions(file.read_text()))


def functions(text: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}


def test_every_row_of_the_pipeline_is_answered_and_shown():
    rows = rows_of_the_pipeline()
    assert sorted({number for number, _, _ in rows}) == list(range(1, 33))
    for number, done, shown in rows:
        names = re.findall(r"`([^`]+)`", done)
        if not names:
            assert (done, number in MAY_BE_LEFT, shown) == (LEFT, True, ""), f"row {number}"
            continue
        assert number in MECHANISMS or not any(name.startswith("weft.") for name in names), f"row {number}: {done}"
        missing = [name for name in (*names, *re.findall(r"`([^`]+)`", shown)) if not exists(name)]
        assert (missing, "`tests/" in shown) == ([], True), f"row {number}"


@pytest.mark.parametrize(
    "name",
    ["remove-nothing", "tests/golden/none.md", "tests/golden/test_readme.py::test_none", "weft.graph.edit.NoEdit"],
)
def test_a_name_of_nothing_is_missed(name: str):
    assert not exists(name)


def test_every_pass_of_rewrites_is_in_a_table_of_the_page():
    text = (ROOT / "docs" / "rewrites.md").read_text()
    known = [name for name, cls in all_passes().items() if cls.__module__.startswith("weft.passes.rewrite.")]
    assert [name for name in known if f"`{name}`" not in text] == []
