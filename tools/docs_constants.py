"""The page of constants: each number of the cost model with its source, as the code states it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
COST = REPOSITORY / "src" / "weft" / "cost"
CODE = ("communication.py", "device.py", "calibration/robust_fit.py")
"""Modules whose numbers are part of the cost model; limits of readers are not."""
SHAPE = ("name", "spans", "num_nodes", "ranks_per_node", "kind", "num_ranks", "level", "wire", "input_bytes")
"""Keys that identify a cluster; they need no source."""
LABELS = ("name", "kind", "num_ranks")
"""Keys among them that distinguish sections of one kind."""
QUOTE = '"'
KEY = re.compile(r"(\w+) = (.+?)(?:\s+# (.*))?")
INTRODUCTION = """\
# Constants and their sources

Made of `src/weft/cost/`. [Cost model](cost-model.md) explains their use. Your own cluster comes
from measurements instead: [Calibration](calibration.md).
"""


@dataclass(frozen=True)
class Constant:
    """A number of the model."""

    name: str
    value: str
    source: str


def page() -> str:
    """The page."""
    parts = [INTRODUCTION]
    for path in sorted((COST / "clusters").glob("*.toml")):
        parts += [f"## {path.stem}\n", f"`src/weft/cost/clusters/{path.name}`: {opening(path.read_text())}\n"]
        parts += table(of_cluster(path.read_text()))
    for name in CODE:
        constants = list(of_module((COST / name).read_text()))
        doc = ast.get_docstring(ast.parse((COST / name).read_text())) or ""
        parts += [f"## In `{name}`\n", f"{last_paragraphs(doc)}\n", *table(constants)]
    return "\n".join(parts)


def table(constants: list[Constant]) -> list[str]:
    """Constants as a table."""
    rows = [f"| `{c.name}` | `{c.value}` | {c.source or 'as said above'} |" for c in constants]
    return ["| constant | value | source |", "|---|---|---|", *rows, ""]


def opening(text: str) -> str:
    """The comment at the head of a file."""
    lines = text.split("\n")
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line.removeprefix("#").strip() for line in lines[:end] if line != "#")


def last_paragraphs(doc: str) -> str:
    """The paragraph of a docstring about constants; else its first line."""
    found = [p for p in doc.split("\n\n") if "onstants" in p]
    return "\n\n".join(found) or doc.partition("\n")[0]


def of_cluster(text: str) -> list[Constant]:
    """The numbers of a cluster file. A comment after a number, or above its block, names its source."""
    found: list[Constant] = []
    section, above, was_comment = "", "", False
    for line in text.split("\n"):
        if line.startswith("#"):
            above = f"{above} {line[1:].strip()}".strip() if was_comment else line[1:].strip()
            was_comment = True
            continue
        was_comment = False
        if line.startswith("["):
            section = line.strip("[]")
        elif match := KEY.fullmatch(line.strip()):
            key, value, beside = match.groups()
            if key in SHAPE:
                section = f"{section} {value.strip(QUOTE)}" if section and key in LABELS else section
            else:
                found.append(Constant(f"{section}: {key}", value, (beside or above).replace("|", "or")))
        elif not line.strip():
            above = ""
    return found


def of_module(text: str) -> Iterator[Constant]:
    """The numbers of a module that are written in capitals, with the sentence under them."""
    body = ast.parse(text).body
    for statement, below in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        name, value = statement.targets[0].id, ast.unparse(statement.value)
        if not name.isupper() or name.startswith("MAX_") or not any(character.isdigit() for character in value):
            continue
        doc = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
        yield Constant(name, value, " ".join(str(doc).split()))
