"""Dtypes by kind, and the pairs of casts that equal a single cast.

Contract: explicit sets; a dtype that is in none of them has no law. Torch converts a number of a narrow floating dtype
through f32, and an integer to an integer by dropping bits. A float that does not fit an integer dtype becomes whatever
the kernel makes of it, so a cast from floats to integers never replaces another cast.
"""

from __future__ import annotations

import functools

import torch

BOOL = frozenset({torch.bool})
SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
UNSIGNED = frozenset({torch.uint8, torch.uint16, torch.uint32, torch.uint64})
WHOLE = SIGNED | UNSIGNED
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Floating dtypes that have infinities and kernels for arithmetic."""
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
"""Dtypes that have a zero and a one, and a single number per element."""


def is_seen_through(before: torch.dtype | None, between: torch.dtype | None, after: torch.dtype) -> bool:
    """Whether a cast from `before` through `between` to `after` equals the direct cast from `before` to `after`."""
    if before is None or between is None or not _holds_all(before, between):
        return False
    return between in BOOL | WHOLE or after not in WHOLE or _holds_all(before, after)


@functools.cache
def _holds_all(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether `after` represents every value of `before`, including signed zeros, infinities and NaN."""
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
