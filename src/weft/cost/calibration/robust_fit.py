"""Least squares on relative errors with non-negative coefficients, robust against a few outliers.

Contract: deterministic; a handful of columns; all times positive.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

HUBER = 1.345
"""Residuals above this many standard deviations count linearly: 95 % efficient for normal errors (Huber, 1981)."""
MAD = 1.4826
"""Ratio of the standard deviation of normal errors to their median absolute value."""
MAX_ROUNDS = 30


def fit_times(columns: Array, us: Array) -> Array:
    """The coefficients c >= 0 for which `columns @ c` fits the times best, by relative error."""
    relative = columns / us[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    relative = relative / scale
    weights = np.ones(len(us))
    found = _solve(relative, weights)
    for _ in range(MAX_ROUNDS):
        errors = np.abs(relative @ found - 1)
        spread = MAD * float(np.median(errors))
        if spread < 1e-9:
            break
        weights = np.minimum(1.0, HUBER * spread / np.maximum(errors, 1e-300))
        before, found = found, _solve(relative, weights)
        if np.allclose(before, found, rtol=1e-9, atol=0):
            break
    return found / scale


def _solve(relative: Array, weights: Array) -> Array:
    """Weighted least squares for every subset of columns; the best one without a negative coefficient.

    Trying all subsets is exact, and cheap for a handful of columns.
    """
    root = np.sqrt(weights)
    best, least = np.zeros(relative.shape[1]), np.inf
    for count in range(1, relative.shape[1] + 1):
        for chosen in itertools.combinations(range(relative.shape[1]), count):
            part = np.linalg.lstsq(relative[:, chosen] * root[:, None], root, rcond=None)[0]
            if (part < 0).any():
                continue
            error = float((weights * (relative[:, chosen] @ part - 1) ** 2).sum())
            if error < least * (1 - 1e-12):
                best, least = np.zeros(relative.shape[1]), error
                best[list(chosen)] = part
    return best
