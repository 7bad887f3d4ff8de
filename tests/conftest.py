"""Options and fixtures that all tests share."""

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from weft.graph import versions
from weft.verification.real_ranks.world import RealRanks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite the blocks of the golden files that run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("update") and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--update rewrites files in place: run it without -n")
    # Small tensors: a second thread in each of several processes costs three times what it computes.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    os.environ["WEFT_PLAN_CACHE"] = "0"  # a test that plans twice must search twice
    versions.CHECKS_EVERY_USE = True
    # A busy machine stops a process for seconds now and then; that must not fail an example. Tests have timeouts.
    hypothesis.settings.register_profile("weft", deadline=None)
    hypothesis.settings.load_profile("weft")


QUICK_CASES = 1
"""Number of cases of a test over random graphs that the quick loop runs. Most cases have many graphs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a test over random graphs as slow, except the first."""
    counts: dict[str, int] = {}
    for item in items:
        test, bracket, _ = item.nodeid.partition("[")
        if bracket and test.startswith(("tests/property/", "tests/distributed/test_random")):
            counts[test] = counts.get(test, 0) + 1
            if counts[test] > QUICK_CASES:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RealRanks]:
    """One world of four gloo processes for the whole session; it starts with the first run."""
    with RealRanks(4) as world:
        yield world
