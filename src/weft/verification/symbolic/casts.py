"""Dtypes by kind, and which casts can be taken for one.

Contract: explicit sets; a dtype that is in none of them has no law. Torch converts a number of a narrow floating dtype
by way of f32, and an integer to an integer by dropping bits; a number that a dtype of integers does not hold becomes
whatever the kernel makes of it, so a cast from floats to integers is never taken for another.
"""

from __future__ import annotations

import functools

import torch

BOOL = frozenset({torch.bool})
SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
UNSIGNED = frozenset({torch.uint8, torch.uint16, torch.uint32, torch.uint64})
WHOLE = SIGNED | UNSIGNED
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Those with infinities and with kernels for arithmetic."""
NARROW = frozenset(
    {
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        torch.float8_e8m0fnu,
    }
)
COMPLEX = frozenset({torch.complex64, torch.complex128})
REAL = BOOL | WHOLE | FLOATS
ANY = REAL | NARROW | COMPLEX
FILLABLE = ANY - COMPLEX - {torch.float8_e8m0fnu}
"""Those with a zero and a one, of one number each."""


def is_seen_through(before: torch.dtype | None, between: torch.dtype | None, after: torch.dtype) -> bool:
    """Whether a cast from `before` by way of `between` to `after` is the cast from `before` to `after`."""
    if before is None or between is None or not _holds_all(before, between):
        return False
    return between in BOOL | WHOLE or after not in WHOLE or _holds_all(before, after)


@functools.cache
def _holds_all(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether every number of a dtype is a number of another, with its sign and what is no number."""
    if before is torch.bool:
        return after in FILLABLE | COMPLEX
    if before in WHOLE:
        whole = torch.iinfo(before)
        if after in FLOATS:
            exact = int(2 / torch.finfo(after).eps)
            return -whole.min <= exact and whole.max <= min(exact, torch.finfo(after).max)
        return after in WHOLE and torch.iinfo(after).min <= whole.min and whole.max <= torch.iinfo(after).max
    if before not in FLOATS | NARROW or after not in FLOATS:
        return False
    small, large = torch.finfo(before), torch.finfo(after)
    finer = large.eps <= small.eps and large.smallest_normal <= small.smallest_normal
    return finer and large.max >= small.max
