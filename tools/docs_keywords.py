"""The keyword index: every public name, pass, preset, command and reason, with the sections that mention it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from markdown.extensions.toc import slugify

import weft
from tools.docs_passes import names as pass_names
from weft.cli.main import app
from weft.passes.presets import PRESETS
from weft.plan.decision import Reason

CODE = re.compile(r"```.*?```|`[^`\n]+`|^    .*$", re.MULTILINE | re.DOTALL)
MOST = 6
"""Maximum sections listed for one keyword; hand-written pages come first."""
MADE = ("api.md", "cli.md", "constants.md", "changelog.md", "errors.md")
"""Pages that name everything; only the section about the keyword itself counts."""
INTRODUCTION = """\
# Keyword index

Every public name, pass, preset, command and reason: where it is defined, and which sections speak of it.
"""


@dataclass(frozen=True)
class Keyword:
    """A word to look up, where its own section is, and how the text writes it."""

    name: str
    home: str
    pattern: str


def keywords() -> dict[str, list[Keyword]]:
    """All keywords by kind."""
    public = [name for name in sorted(weft.__all__, key=str.lower) if name != "__version__"]
    commands = [command.callback.__name__ for command in app.registered_commands if command.callback is not None]
    return {
        "Python": [
            Keyword(
                f"weft.{n}", f"api.md#{slugify(f'weft.{n}', '-')}", rf"\b{n}\b" if n[0].isupper() else rf"weft\.{n}\b"
            )
            for n in public
        ],
        "Passes": [Keyword(n, f"passes/{n}.md", rf"\b{n}\b(?!-)") for n in pass_names()],
        "Presets": [Keyword(n, "planning.md#presets", rf"`{n}`|pipeline=\"{n}\"|--pipeline {n}\b") for n in PRESETS],
        "Commands": [Keyword(f"weft {n}", f"cli.md#weft-{n}", rf"weft {n}\b") for n in commands],
        "Reasons": [Keyword(r.value, "debugging.md#reasons", rf"(?<![\w-]){r.value}(?![\w-])") for r in Reason],
    }


def page(pages: Mapping[str, str]) -> str:
    """The index over pages by path."""
    found = [
        (path, title, anchor, body)
        for path, text in pages.items()
        if path not in MADE and not path.startswith("passes/")
        for title, anchor, body in sections(text)
    ]
    parts = [INTRODUCTION]
    for kind, words in keywords().items():
        parts += [f"## {kind}\n", "| keyword | spoken of in |", "|---|---|"]
        for word in words:
            told = [
                f"[{path.removesuffix('.md')}: {title}]({path}#{anchor})"
                for path, title, anchor, body in found
                if speaks(word, kind, body)
            ]
            parts.append(f"| [`{word.name}`]({word.home}) | {', '.join(told[:MOST])} |")
        parts.append("")
    return "\n".join(parts)


def speaks(word: Keyword, kind: str, body: str) -> bool:
    """Whether a section names the keyword as code; many keywords are also common words."""
    text = body if kind == "Presets" else "\n".join(CODE.findall(body))
    return re.search(word.pattern, text) is not None


def sections(text: str) -> Iterator[tuple[str, str, str]]:
    """The title, anchor and text of each section of a page."""
    title, anchor, lines = "", "", list[str]()
    seen: dict[str, int] = {}
    fenced = False
    for line in text.split("\n"):
        fenced ^= line.startswith("```")
        heading = re.fullmatch(r"#{1,3} (.+)", line) if not fenced else None
        if heading is None:
            lines.append(line)
            continue
        if title:
            yield title, anchor, "\n".join(lines)
        title = heading[1].replace("`", "")
        slug = slugify(title, "-")
        anchor = f"{slug}_{seen[slug]}" if slug in seen else slug
        seen[slug] = seen.get(slug, 0) + 1
        lines = []
    if title:
        yield title, anchor, "\n".join(lines)
