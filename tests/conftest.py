"""Options and fixtures that all tests share."""

from collections.abc import Iterator

import pytest

from weft.verification.real_ranks import RealRanks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite the blocks of the golden files that run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("update") and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--update rewrites files in place: run it without -n")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RealRanks]:
    """One world of four gloo processes for the whole session; it starts with the first run."""
    with RealRanks(4) as world:
        yield world
