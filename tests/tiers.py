"""Tiers of the tests: `make test` runs some cases of a test that has many, `make test-all` runs every case."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_first(cases: Iterable[Any], quick: int = 1) -> list[Any]:
    """Cases for `parametrize`, of which the quick loop runs the first ones; the others are slow."""
    return [case if k < quick else slow(case) for k, case in enumerate(cases)]


def quick_only(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Cases for `parametrize`, of which the quick loop runs the named ones; the others are slow."""
    listed = list(cases)
    unknown = [case for case in quick if case not in listed]
    if unknown:
        raise ValueError(f"not among the cases: {unknown}")
    return [case if case in quick else slow(case) for case in listed]


def slow(case: Any) -> Any:
    """One case that the quick loop leaves out; a tuple has a value for each argument."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
