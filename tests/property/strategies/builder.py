"""Names the values of a random listing, and follows their storages and the collectives in flight.

A listing is valid by construction: the builder follows storages and flights with a model of its own, which knows
nothing of `weft.graph.effects`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

DTYPES = ("f32", "bf16", "f64")


@dataclass
class Value:
    name: str
    shape: tuple[int, ...]
    dtype: str
    storages: frozenset[int]
    contiguous: bool = True


@dataclass
class Flight:
    """A launch under way: the values to wait for, and the storages that nobody may touch until then."""

    pending: list[Value]
    reads: frozenset[int]
    writes: frozenset[int]


@dataclass
class Builder:
    """A listing that grows by one step at a time."""

    rng: Random
    groups: dict[str, tuple[int, int]]
    lines: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    waited: list[Value] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    returned: list[Value] = field(default_factory=list)
    counter: int = 0

    # Naming and choosing.

    def new(
        self, shape: tuple[int, ...], dtype: str, of: frozenset[int] | None = None, contiguous: bool = True
    ) -> Value:
        self.counter += 1
        storages = frozenset({self.counter}) if of is None else of
        return Value(f"n{self.counter}", shape, dtype, storages, contiguous)

    def like(self, value: Value, dtype: str | None = None) -> Value:
        """A new value of the same shape; elementwise operators keep strides."""
        return self.new(value.shape, dtype or value.dtype, contiguous=value.contiguous)

    def emit(self, value: Value, text: str) -> Value:
        self.lines.append(f"    {value.name} = {text}")
        self.values.append(value)
        return value

    @property
    def unreadable(self) -> frozenset[int]:
        return frozenset().union(*(f.writes for f in self.flights))

    @property
    def unwritable(self) -> frozenset[int]:
        return self.unreadable.union(*(f.reads for f in self.flights))

    def pick(self, **wanted: object) -> Value | None:
        """A readable value; newer ones more often, so that programs grow deep."""
        found = [
            v
            for v in self.values
            if not v.storages & self.unreadable and all(getattr(v, key) == value for key, value in wanted.items())
        ]
        if not found:
            return None
        return self.rng.choice(found[-6:] if self.rng.random() < 0.5 else found)

    def group(self) -> tuple[str, int]:
        name = self.rng.choice(sorted(self.groups))
        return name, self.groups[name][0]

    # Launches and disturbances.

    def sendable(self) -> Value | None:
        value = self.pick(contiguous=True)
        return value if value and value.shape and value.shape[0] <= 64 else None

    def fly(self, text: str, sent: list[Value], results: list[Value]) -> None:
        reads = frozenset().union(*(v.storages for v in sent))
        writes = frozenset().union(*(v.storages for v in results))
        self.lines.append(text)
        self.flights.append(Flight(list(results), reads, writes))

    def disturb(self, *values: Value) -> None:
        """Write to one of the values, at times: what was read before is then not what is read later."""
        value = self.rng.choice(values)
        if self.rng.random() < 0.25 and not value.storages & self.unwritable:
            written = self.new(value.shape, value.dtype, value.storages, value.contiguous)
            self.emit(written, f"mul_({value.name}, 0.5)")
