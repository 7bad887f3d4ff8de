"""Links: every one of a page leads somewhere, to the heading that it names; and every path that a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from tests.docs.pages import REPOSITORY, name_of, paths

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:src|tests|docs|tools|examples|benchmarks)/[\w./-]*)`")
MADE = {"cli.md", "api.md", "keywords.md", "constants.md", "errors.md", "contributing.md", "changelog.md"}
"""Pages that the hook of mkdocs makes; `mkdocs build --strict` checks links to them and from them."""


@pytest.mark.parametrize("path", paths(), ids=name_of)
def test_every_link_resolves(path: Path):
    assert [link for link in links(path) if why_not(path, link)] == []


@pytest.mark.parametrize("path", paths(), ids=name_of)
def test_every_path_that_is_named_exists(path: Path):
    named = [name for name in NAMED.findall(path.read_text()) if "NAME" not in name]
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_a_link_to_nowhere_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A title here\n\n[a](#a-title-here) [b](#no) [c](gone.md) ![d](gone.png) `not [a](link.md)`\n")
    assert [link for link in links(page) if why_not(page, link)] == ["#no", "gone.md", "gone.png"]


def links(path: Path) -> list[str]:
    """What a page links to, outside of code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    return [first or second for first, second in LINK.findall(text)]


def why_not(page: Path, link: str) -> str:
    """Why a link leads nowhere; empty where it leads somewhere. The network is not asked."""
    if link.startswith(("https://", "http://")):
        return ""
    name, _, anchor = link.partition("#")
    if name in MADE or name.startswith("passes/"):
        return ""
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return f"{target} does not exist"
    if anchor and anchor not in anchors(target):
        return f"{target.name} has no heading {anchor!r}"
    return ""


def anchors(path: Path) -> set[str]:
    """The anchors of the headings of a page."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    return {slugify(re.sub(r"`", "", title), "-") for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}
