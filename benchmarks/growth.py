"""How time grows with the size of a graph."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float | None:
    """k of the best fit of seconds = c * size^k."""
    if len(sizes) < 2 or min(seconds) <= 0:
        return None
    xs, ys = [math.log(size) for size in sizes], [math.log(s) for s in seconds]
    mean_x, mean_y = statistics.mean(xs), statistics.mean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else None
