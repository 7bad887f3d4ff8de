"""Collects golden Markdown: each section of each file is a test. `pytest --update tests/golden` rewrites the blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden.goldens import FOLDER, GoldenError, Section, check, read, update
from weft.errors import WeftError


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    is_golden = file_path.suffix == ".md" and file_path.parent == FOLDER  # folders in it have formats of their own
    return GoldenFile.from_parent(parent, path=file_path) if is_golden else None


class GoldenFile(pytest.File):
    """A Markdown file."""

    def collect(self) -> Iterator[pytest.Item]:
        try:
            found = read(self.path)
        except GoldenError as error:
            raise self.CollectError(str(error)) from None
        for section in found:
            yield GoldenItem.from_parent(self, name=section.title, section=section)


class GoldenItem(pytest.Item):
    """One section."""

    def __init__(self, *, section: Section, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.section = section

    def runtest(self) -> None:
        if self.config.getoption("update"):
            self.section = update(self.section)
        check(self.section)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> Any:
        if isinstance(excinfo.value, GoldenError | WeftError):
            return f"{self.path.name}:{self.section.line + 1}: {self.section.title}\n{excinfo.value}"
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.section.line, self.section.title
