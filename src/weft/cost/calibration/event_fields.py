"""Fields of a trace event, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from weft.cost.calibration.stalls import Interval

MAX_TS_US = 1e15
"""Largest time of an event that is read: nanoseconds then fit into 64 bits."""
NS_PER_US = 1000
ON_HOST = ("cuda_runtime", "cuda_driver")
"""Categories of the calls with which the host issues kernels."""


def arguments_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an event; empty if it has none."""
    args = event.get("args")
    return cast(dict[str, Any], args) if isinstance(args, dict) else {}


def whole(value: Any) -> int | None:
    """A whole number; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def span_of(event: Mapping[str, Any]) -> Interval | None:
    """Start and end in nanoseconds; None if they are malformed."""
    start, us = _number(event.get("ts"), -MAX_TS_US), _number(event.get("dur"), 0.0)
    if start is None or us is None:
        return None
    start_ns = round(start * NS_PER_US)
    return start_ns, start_ns + round(us * NS_PER_US)


def _number(value: Any, least: float) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and least <= value <= MAX_TS_US else None
