"""Quantities with units in cluster files: `bandwidth = "400 Gbit/s"`, `latency = "5 us"`, `memory = "80 GB"`.

Contract: a key without a unit in its name takes a text with a number and a unit. It stands for the key of the model,
which has the unit in its name; stating both, or a bare number, is a fault. `bit` and `B` distinguish bits and bytes.
`stated` writes a number so that it reads back unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

QUANTITY = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?(?:e[+-]?\d{1,2})?)\s*([A-Za-z/]{1,10})\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {f"{prefix}i": 1024.0**k for k, prefix in enumerate(("K", "M", "G", "T", "P"), 1)}
TIMES = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
"""Microseconds, by unit."""
SIZES = {f"{prefix}B": factor for prefix, factor in (_PREFIXES | _BINARY).items()}
"""Bytes, by unit."""
RATES = {f"{unit}/s": factor / 1e9 for unit, factor in SIZES.items()} | {
    unit: factor / 8e9 for prefix, factor in _PREFIXES.items() for unit in (f"{prefix}bit/s", f"{prefix}bit")
}
"""1e9 bytes per second, by unit. Adapters are named by their bits alone: 400Gbit is 400 Gbit/s."""


class StatedKey(NamedTuple):
    """A key that takes a quantity with its unit."""

    stands_for: str
    units: Mapping[str, float]
    unit: str
    """The unit of the model."""
    example: str

    @property
    def whole(self) -> bool:
        return self.unit == "B"


KEYS = {
    "bandwidth": StatedKey("bandwidth_gbps", RATES, "GB/s", '"50 GB/s" or "400 Gbit/s"'),
    "latency": StatedKey("latency_us", TIMES, "us", '"5 us"'),
    "hop": StatedKey("hop_us", TIMES, "us", '"3.4 us"'),
    "memory": StatedKey("memory_bytes", SIZES, "B", '"80 GB"'),
    "memory_bandwidth": StatedKey("memory_gbps", RATES, "GB/s", '"3350 GB/s"'),
    "launch_gap": StatedKey("launch_gap_us", TIMES, "us", '"2 us"'),
    "limit": StatedKey("limit_bytes", SIZES, "B", '"100 GB"'),
}
STATED_AS = {stated.stands_for: key for key, stated in KEYS.items()}
"""The key that takes a unit, by the key of the model."""
BY_RANKS = "by_ranks"
"""The table of bandwidths by number of ranks: its values are rates, its keys numbers."""


DEPTH = 4
"""Depth of the deepest table that has such keys: the file, its levels, a level, and its links."""


def converted(table: Any, path: str = "", depth: int = DEPTH) -> tuple[Any, list[str]]:
    """The table with the model's keys in place of those with units, and the faults found on the way."""
    if isinstance(table, list) and depth:
        pairs = [converted(each, f"{path}[{k}]", depth - 1) for k, each in enumerate(table)]
        return [made for made, _ in pairs], [fault for _, faults in pairs for fault in faults]
    if not isinstance(table, dict) or not depth:
        return table, []
    made: dict[str, Any] = {}
    faults: list[str] = []
    for key, value in table.items():
        place = f"{path}.{key}".removeprefix(".")
        stated = KEYS.get(key)
        if key == BY_RANKS and isinstance(value, dict):
            rates = {ranks: quantity(each, RATES) if isinstance(each, str) else each for ranks, each in value.items()}
            made[key] = {ranks: 1.0 if rate is None else rate for ranks, rate in rates.items()}
            wrong = [ranks for ranks, rate in rates.items() if rate is None]
            faults += [_fault(f"{place}.{ranks}", KEYS["bandwidth"], value[ranks]) for ranks in wrong]
        elif stated is None or isinstance(value, dict):
            made[key], found = converted(value, place, depth - 1)
            faults += found
        elif stated.stands_for in table:
            faults.append(f"{place}: {stated.stands_for} states it too; leave one of them out")
        else:
            number = quantity(value, stated.units)
            if number is None:
                faults.append(_fault(place, stated, value))
                number = 1.0  # it is stated, if wrongly
            made[stated.stands_for] = round(number) if stated.whole else number
    return made, faults


def _fault(place: str, stated: StatedKey, value: Any) -> str:
    return f"{place}: expected a number with its unit, such as {stated.example}, found {value!r}"


def without_units(table: Any, path: str = "", depth: int = DEPTH) -> list[tuple[str, str]]:
    """The places of numbers whose unit is only in their key, each with the line to write instead."""
    found: list[tuple[str, str]] = []
    if isinstance(table, list) and depth:
        return [each for k, item in enumerate(table) for each in without_units(item, f"{path}[{k}]", depth - 1)]
    if not isinstance(table, dict) or not depth:
        return found
    for key, value in table.items():
        place = f"{path}.{key}".removeprefix(".")
        if key in STATED_AS and _is_number(value):
            found.append((place, stated(key, value)))
        elif key == BY_RANKS and isinstance(value, dict):
            numbers = {ranks: each for ranks, each in value.items() if _is_number(each)}
            found += [(f"{place}.{ranks}", f"{ranks} = {rate_text(each)}") for ranks, each in numbers.items()]
        else:
            found += without_units(value, place, depth - 1)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def stated(key: str, value: float) -> str:
    """The line of a cluster file that states a number of the model with its unit."""
    name = STATED_AS[key]
    if not KEYS[name].whole:
        return f'{name} = "{_number(value)} {KEYS[name].unit}"'
    prefix = next(prefix for prefix in ("T", "G", "M", "k", "") if value % _PREFIXES[prefix] == 0)
    return f'{name} = "{_number(int(value) // int(_PREFIXES[prefix]))} {prefix}B"'


def rate_text(gbps: float) -> str:
    """A rate of the model as a value of a cluster file."""
    return f'"{_number(gbps)} GB/s"'


def _number(value: float) -> str:
    return repr(value).removesuffix(".0")


def quantity(value: Any, units: Mapping[str, float]) -> float | None:
    """The number that a text states, in the unit of the model; None if it is not a number with one of these units."""
    found = QUANTITY.fullmatch(value) if isinstance(value, str) else None
    return float(found[1]) * units[found[2]] if found is not None and found[2] in units else None
