"""Processor seconds, which a busy machine disturbs less than wall time, and their growth with graph size."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float | None:
    """k of the best fit of seconds = c * size^k."""
    if len(sizes) < 2 or min(seconds) <= 0:
        return None
    xs, ys = [math.log(size) for size in sizes], [math.log(s) for s in seconds]
    mean_x, mean_y = statistics.mean(xs), statistics.mean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else None


@contextmanager
def processor_seconds() -> Iterator[None]:
    """The logs of Weft's pipelines count these instead of those on the wall."""
    with mock.patch("weft.passes.pipeline.time", SimpleNamespace(perf_counter=time.process_time)):
        yield
