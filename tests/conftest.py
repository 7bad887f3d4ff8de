"""Options and fixtures that all tests share."""

import os
from collections.abc import Iterator

import pytest
import torch

from weft.verification.real_ranks.world import RealRanks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite the blocks of the golden files that run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("update") and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--update rewrites files in place: run it without -n")
    # Small tensors: a second thread in each of several processes costs three times what it computes.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RealRanks]:
    """One world of four gloo processes for the whole session; it starts with the first run."""
    with RealRanks(4) as world:
        yield world
