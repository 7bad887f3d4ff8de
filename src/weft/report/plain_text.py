"""Text for terminals: names in graphs and files come from anywhere, and a terminal obeys control characters."""

from __future__ import annotations


def plain_line(text: str) -> str:
    """The text without characters that are not printed: control characters, line ends, marks that turn text around."""
    return "".join(character for character in text if character.isprintable())


def plain(text: str) -> str:
    """The same for each line of a text."""
    return "\n".join(map(plain_line, text.split("\n")))
