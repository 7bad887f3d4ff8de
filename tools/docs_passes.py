"""The pages of the passes, generated from module docstrings, options and golden files."""

from __future__ import annotations

import re
import sys
from functools import cache
from inspect import cleandoc, getdoc

from tests.golden.goldens import FOLDER, Section, read
from weft.passes.base import Pass, all_passes

SHOWN = 6
"""Maximum sections of a golden file that a page shows; it names the others."""
LABEL = re.compile(r"(Why|Declines|Numerics|Memory|Bytes on the wire|Before|After|Sound): ?")
INTRODUCTION = """\
# Passes

Each page is made of the docstring of a pass, its options and its golden file (`tests/golden/`), which the tests run on
all ranks of a virtual cluster. `weft passes NAME` prints the same on a terminal. Pipelines are passes with commas, or
presets (`planning.md`); [Writing a pass](../writing-a-pass.md) explains how to write one.

| pass | what it does | numerics |
|---|---|---|
"""


@cache
def own_passes() -> dict[str, type[Pass]]:
    """The passes of Weft by name; those of other packages have pages of their own."""
    return {name: cls for name, cls in all_passes().items() if cls.__module__.startswith("weft.")}


def names() -> list[str]:
    """Every pass that has a page."""
    return list(own_passes())


def pages() -> dict[str, str]:
    """Every page by its path below docs/."""
    found = {f"passes/{name}.md": page(cls) for name, cls in own_passes().items()}
    return found | {"passes/index.md": index()}


def index() -> str:
    """The table of all passes."""
    rows = [f"| [`{name}`]({name}.md) | {summary(cls)} | {cls.numerics.value} |" for name, cls in own_passes().items()]
    text = INTRODUCTION.replace("`planning.md`", "[The planner](../planning.md#presets)")
    return text + "\n".join([*rows, ""])


def page(cls: type[Pass]) -> str:
    """The page of one pass."""
    parts = [f"# {cls.name()}", markdown_of(cleandoc(sys.modules[cls.__module__].__doc__ or ""))]
    parts += options_table(cls)
    golden = FOLDER / f"{cls.name()}.md"
    sections = read(golden)
    parts.append(f"## Behaviours\n\nThe first of `tests/golden/{golden.name}`, as the tests run them.")
    parts += [section_text(section) for section in sections[:SHOWN]]
    if sections[SHOWN:]:
        rest = "\n".join(f"- {section.title}" for section in sections[SHOWN:])
        parts.append(f"## {len(sections) - SHOWN} more in the golden file\n\n{rest}")
    return "\n\n".join([*parts, ""])


def summary(cls: type[Pass]) -> str:
    """The first line of a class docstring."""
    return (getdoc(cls) or "").partition("\n")[0]


def markdown_of(doc: str) -> str:
    """A docstring as Markdown: labels stand out, and listings are code."""
    lines: list[str] = []
    for paragraph in doc.split("\n\n"):
        if paragraph.startswith("    "):
            lines += ["```python", *(line.removeprefix("    ") for line in paragraph.split("\n")), "```", ""]
            continue
        for line in paragraph.split("\n"):
            text = line[:-1] if line.endswith("::") else line
            label = LABEL.match(text)
            lines += [""] if label else []
            lines.append(f"**{label[0].strip()}** {text[label.end() :]}".rstrip() if label else text)
        lines.append("")
    joined = "\n".join(lines).strip()
    return joined.replace("```\n\n```python\n", "\n")  # a listing with an empty line stays one block


def options_table(cls: type[Pass]) -> list[str]:
    """The options with their defaults, or a sentence if a pass has none. The docstring covers numerics."""
    rows = [f"| `{o.name}` | `{_either(o.type)}` | `{_either(o.default)}` | {_line(o.doc)} |" for o in cls.options()]
    if not rows:
        return ["It has no options."]
    head = "## Options\n\n| option | type | default | what it says |\n|---|---|---|---|\n"
    return [head + "\n".join(rows)]


def _either(value: object) -> str:
    return str(value).replace("|", "or").replace("typing.", "")  # a bar would end the cell of a table


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def section_text(section: Section) -> str:
    """One behaviour: the graph before and after."""
    parts = [f"### {section.title}", f"`{section.spec}`", f"```python\n{section.before}```"]
    if section.after:
        parts.append(f"becomes\n\n```python\n{section.after}```")
    if section.declined:
        parts.append(f"{'and is declined' if section.after else 'stays'}\n\n```text\n{section.declined}```")
    if section.error:
        parts.append(f"is refused\n\n```text\n{section.error}```")
    if not (section.after or section.declined or section.error):
        parts.append("stays as it is.")
    return "\n\n".join(parts)
