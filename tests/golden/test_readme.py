"""The README of the golden files: every section that it names exists."""

from __future__ import annotations

from tests.golden.goldens import FOLDER, sections

HEADER = "file: section"


def test_every_section_that_the_readme_names_exists():
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| ")]
    named = [row.split("|", 2)[2].removesuffix("|").strip() for row in rows]
    known = {section.id for section in sections()}
    assert len(named) > 100
    assert [name for name in named if name not in {*known, HEADER}] == []
