"""The pages that people read, as data: their blocks of code, commands and output, and their links.

A block is a program (`python`), commands (`sh`, or indented lines of which the first is a command), data (`toml`) or
output (`text`, no language, or other indented lines). The paragraph *The tests do not run this block: REASON* right
above a block, or above several that follow each other, says that nothing of them is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "docs"
NOT_RUN = "The tests do not run this block: "
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(weft|make|python|torchrun|pytest|git|pip)\b")
FENCE = "```"


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    page: str
    line: int
    """Of its first line, from 1."""
    kind: str
    """`python`, `commands`, `toml` or `output`."""
    text: str
    not_run: str = ""
    """Why it is not run; empty where it is."""
    follows: bool = False
    """Whether only empty lines are between it and the block before."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of a block, without comments; a line that ends with a backslash goes on."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.split("\n")]
        return [line for line in lines if line]


def paths() -> list[Path]:
    """Every page: those of the site that are written, and the files of the repository's root and examples."""
    roots = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")]
    return [*roots, *sorted(FOLDER.glob("*.md"))]


def name_of(path: Path) -> str:
    """A path as tests and messages name it."""
    return path.relative_to(REPOSITORY).as_posix()


@cache
def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    return list(blocks_of(page, (REPOSITORY / page).read_text()))


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """The blocks of a text."""
    lines = text.split("\n")
    reason, follows, i = "", False, 0
    while i < len(lines):
        line = lines[i]
        if line.startswith(FENCE):
            language, start = line.removeprefix(FENCE).strip(), i + 1
            i = next(k for k in range(start, len(lines)) if lines[k].startswith(FENCE))
            yield _block(page, start, language, lines[start:i], reason, follows)
            follows = True
        elif line.startswith("    ") and line.strip() and (i == 0 or not lines[i - 1].strip()):
            start = i
            while i + 1 < len(lines) and (lines[i + 1].startswith("    ") or not lines[i + 1].strip()):
                i += 1
            yield _block(page, start, "", [each[4:] for each in lines[start : i + 1]], reason, follows)
            follows = True
        elif line.strip():
            follows = False
            if line.startswith(NOT_RUN):
                reason = line.removeprefix(NOT_RUN)
            else:
                reason = f"{reason} {line}" if reason and lines[i - 1].strip() else ""
        i += 1


def _block(page: str, start: int, language: str, lines: list[str], reason: str, follows: bool) -> Block:
    text = "\n".join(lines).rstrip() + "\n"
    if language in ("python", "toml"):
        kind = language
    elif language == "sh" or (language == "" and COMMAND.match(text)):
        kind = "commands"
    else:
        kind = "output"
    return Block(page, start + 1, kind, text, reason.rstrip("."), follows)


def spoken(text: str) -> list[str]:
    """The commands that sentences and tables of a text name, `like this one`; a name that wraps is one."""
    lines, inside = [], False
    for line in text.split("\n"):
        inside ^= line.startswith(FENCE)
        if not inside and not line.startswith((FENCE, "    ")):
            lines.append(line)
    found = re.findall(r"`([^`]+)`", "\n".join(lines))
    return [command for each in found if COMMAND.match(command := " ".join(each.split()))]


def all_blocks(kind: str | None = None) -> list[Block]:
    """The blocks of all pages."""
    return [block for path in paths() for block in blocks(name_of(path)) if kind in (None, block.kind)]


def differs(expected: str, found: str) -> str:
    """Why a text is not as a page shows it; empty where it is. Three dots stand for anything; alone, for lines."""
    parts = [r"(?:.*\n)*?" if line.strip() == "..." else _line(line) for line in expected.rstrip().split("\n")]
    text = "".join(f"{line.rstrip()}\n" for line in found.rstrip().split("\n"))
    if re.fullmatch("".join(parts), text):
        return ""
    return f"the page shows\n{expected}\nfound was\n{found}"


def _line(line: str) -> str:
    return ".*".join(re.escape(part) for part in line.rstrip().split("...")) + r"\n"
