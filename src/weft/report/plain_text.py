"""Text for terminals: aligned tables, and names without control characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
