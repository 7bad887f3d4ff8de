"""The Python of each page runs, block by block as one program, and prints what the page shows below it."""

from __future__ import annotations

import io
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import Block, all_blocks, blocks, differs, name_of, paths
from tests.docs.setting import given_names, prepared
from tests.tiers import quick_only
from weft.cost.cluster import Cluster

MADE = "docs/tutorial.md"
"""Made of a program, of which test_made_pages says that it is as it would be made now."""
PAGES = [name for name in map(name_of, paths()) if name != MADE and any(b.kind == "python" for b in blocks(name))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", quick_only(PAGES, "README.md"))
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = ModuleType(f"page_{page.replace('/', '_').removesuffix('.md').replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    wrong: list[str] = []
    with prepared(tmp_path, monkeypatch):
        module.__dict__.update(given_names(page))
        printed: str | None = None
        for block in blocks(page):
            if block.kind == "output" and block.follows and printed is not None:
                wrong += [f"{block}: {why}" for why in [differs(block.text, printed)] if why]
            printed = run(block, module, tmp_path) if block.kind == "python" and not block.not_run else None
    assert not wrong, "\n".join(wrong)


def run(block: Block, module: ModuleType, folder: Path) -> str:
    """Run a block in a module; a traceback shows the lines of the page."""
    file = folder / f"{module.__name__}_{block.line}.py"
    source = "\n" * (block.line - 1) + block.text
    file.write_text(source)  # where `inspect` finds the source of what is defined
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, str(file), "exec"), module.__dict__)
    return printed.getvalue()


@pytest.mark.parametrize("block", all_blocks("toml"), ids=str)
def test_toml_is_what_it_says(block: Block, tmp_path: Path):
    found = tomllib.loads(block.text)
    if "levels" in found:
        (tmp_path / "cluster.toml").write_text(block.text)
        assert Cluster.load(tmp_path / "cluster.toml").name == found["name"]
    else:
        assert list(found["project"]["entry-points"]) == ["weft.passes"]
