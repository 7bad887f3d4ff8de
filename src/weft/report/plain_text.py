"""Text for terminals: aligned tables, and names without control characters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

WORD = re.compile(r"(?<![\w-])[A-Za-z_]\w*(?![\w-])")
"""A word of a sentence that may be the name of a node."""


def plain_line(text: str) -> str:
    """The text without control characters, line breaks and marks that reverse its direction.

    Names come from graphs and files that anyone may have written, and a terminal obeys such characters.
    """
    return "".join(character for character in text if character.isprintable())


def plain(text: str) -> str:
    """The same for each line of a text."""
    return "\n".join(map(plain_line, text.split("\n")))


def table(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Rows of text in aligned columns."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]


def with_modules(sentence: str, modules: Mapping[str, str], known: str = "") -> str:
    """The sentence with the module of each node that it names, the first time: `mm_3 [layers.1.up] needs it`.

    The reader already has the module of the node `known`.
    """
    told = {known}

    def tell(found: re.Match[str]) -> str:
        name = found[0]
        if name in told or name not in modules:
            return name
        told.add(name)
        return f"{name} [{modules[name]}]"

    return WORD.sub(tell, sentence) if modules else sentence
