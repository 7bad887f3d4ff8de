"""Times, sizes and shares as people read them: `1.20 ms`, `112 MiB`, `12.3 %`. JSON carries raw numbers instead."""

from __future__ import annotations

import re
from decimal import Decimal

SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGTP]i?B|B)?", re.ASCII | re.IGNORECASE)
SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def duration_text(microseconds: float) -> str:
    """Three digits and a unit: `12.3 us`, `1.20 ms`, `2.01 s`."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size * 0.9995:
            return f"{_three_digits(microseconds / size)} {unit}"
    return f"{_three_digits(microseconds)} us"


def size_text(num_bytes: float) -> str:
    """Three digits and a unit: `512 B`, `1.50 MiB`."""
    unit = 0
    while num_bytes >= 1023.5 and unit < len(SIZE_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{_three_digits(num_bytes) if unit else int(num_bytes)} {SIZE_UNITS[unit]}"


def exact_size_text(num_bytes: int) -> str:
    """No digit is lost: `20 GiB`, `20 GB`, `1023 B`."""
    found: list[tuple[int, str]] = []
    for base, units in ((1024, SIZE_UNITS), (1000, DECIMAL_UNITS)):
        size, unit = num_bytes, 0
        while size and size % base == 0 and unit < len(units) - 1:
            size, unit = size // base, unit + 1
        found.append((size, units[unit]))
    return " ".join(map(str, min(found)))


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def share_text(share: float) -> str:
    """`12.3 %`."""
    return f"{share * 100:.1f} %"


def count_text(count: float) -> str:
    """`1,234`."""
    return f"{count:,.0f}"


def bytes_in(text: str) -> int:
    """The bytes of a size such as 24GiB (powers of 1024), 24GB (powers of 1000) or 25769803776; else `ValueError`.

    Decimals are allowed and rounded down to bytes, because reports show sizes such as 9.31 GiB.
    """
    found = SIZE.fullmatch(text.strip()[:100])
    if found is None:
        raise ValueError(f"{text!r} is not a size")
    unit = (found[2] or "B").upper()
    power = "BKMGTP".find(unit[:1])
    size = Decimal(found[1]) * (1024 if "I" in unit else 1000) ** power
    if size < 1 or (power <= 0 and size != int(size)):
        raise ValueError(f"{text!r} is not a whole number of bytes above 0")
    return int(size)
