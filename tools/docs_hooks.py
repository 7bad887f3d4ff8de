"""The hook of mkdocs (`mkdocs.yml`): adds the pages generated from the code, and links page names.

Contract: nothing is written below docs/. A page name in the text, such as `planning.md`, becomes a link on the site, so
that the sources also read well as plain files.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [path for path in (str(REPOSITORY),) if path not in sys.path]  # mkdocs loads a hook by its path alone

from tools import docs_api, docs_cli, docs_constants, docs_errors, docs_keywords, docs_passes  # noqa: E402

NAMED_PAGE = re.compile(r"(?<![\[`\w])`([a-z-]+\.md)`(?!\])")
BORROWED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of the passes to the table of contents."""
    nav: list[Any] = config.nav or []
    pages = [{name: f"passes/{name}.md"} for name in docs_passes.names()]
    reference = next(i for i, entry in enumerate(nav) if "Reference" in entry)
    nav.insert(reference, {"Passes": ["passes/index.md", *pages]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    made = docs_passes.pages() | {"cli.md": docs_cli.page(), "constants.md": docs_constants.page()}
    made |= {name: borrowed(source) for name, source in BORROWED.items()}
    made |= {"api.md": docs_api.page(), "errors.md": docs_errors.page()}
    written = {f.src_uri: Path(f.abs_src_path).read_text() for f in files.documentation_pages() if f.abs_src_path}
    made["keywords.md"] = docs_keywords.page(written | made)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def borrowed(source: str) -> str:
    """A file of the repository's root as a page, with its links adjusted."""
    text = (REPOSITORY / source).read_text().replace("](docs/", "](")
    for page, name in BORROWED.items():
        text = text.replace(f"]({name})", f"]({page})")
    return text


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Link page names in the text; not in headings, which are link targets themselves."""

    def link(match: re.Match[str]) -> str:
        return f"[`{match[1]}`]({match[1]})" if files.get_file_from_path(match[1]) is not None else match[0]

    depth = page.file.src_uri.count("/")
    lines = markdown.split("\n")
    if depth == 0:
        lines = [line if line.startswith(("#", "    ")) else NAMED_PAGE.sub(link, line) for line in lines]
    return "\n".join(lines)
