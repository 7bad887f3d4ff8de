"""Generate docs/tutorial.md from docs/tutorial.py: run each piece and put its output below it.

    python tools/docs_tutorial.py           # writes docs/tutorial.md

A piece begins with `# %%`. Pieces marked [markdown] are text in comments; all others are code of one program.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "docs" / "tutorial.py"
PAGE = REPOSITORY / "docs" / "tutorial.md"
MARK = "# %%"
NEWLINE = "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(SOURCE.read_text()))
    print(f"{PAGE.relative_to(REPOSITORY)}: written", file=sys.stderr)


def page(source: str) -> str:
    """The page of a program: its text, its code, and the output of running it now."""
    names: dict[str, object] = {"__name__": "tutorial"}
    parts: list[str] = []
    for is_text, start, body in pieces(source):
        if is_text:
            parts.append("\n".join(line.removeprefix("#").removeprefix(" ") for line in body.strip().split("\n")))
            continue
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * start + body, str(SOURCE), "exec"), names)  # as python docs/tutorial.py would
        parts.append(f"```python\n{body.strip()}\n```")
        if printed.getvalue().strip():
            parts.append(f"```text\n{printed.getvalue().strip(NEWLINE).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def pieces(source: str) -> Iterator[tuple[bool, int, str]]:
    """For each piece: whether it is text, the number of its first line, and its lines."""
    lines = source.split("\n")
    starts = [i for i, line in enumerate(lines) if line.startswith(MARK)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield "[markdown]" in lines[start], start + 1, "\n".join(lines[start + 1 : end])


if __name__ == "__main__":
    main()
