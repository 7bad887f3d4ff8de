"""Exposed communication by layer: the table that says which part of the model waits, and why.

A bucket may hold tensors of several layers; its exposed time is divided among them by their bytes. Layers with
consecutive numbers are one row if they have the same phase, the same cause and similar times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft.graph.origins import CollectiveOrigin, fold_layers
from weft.plan.decision import Reason
from weft.quantities import duration_text
from weft.report.collective_record import CAUSES, CollectiveRecord
from weft.report.plain_text import plain_line, table

MAX_ROWS = 10
"""Maximum number of rows of the table as text; the data has all of them."""
SIMILAR = 2.0
"""Maximum ratio of the longest to the shortest exposed time among layers that share a row."""
OUTSIDE = "outside of modules"
HEADS = ("exposed by layer", "phase", "collectives", "exposed", "cause")
UNKNOWN_CAUSE = "unknown: schedule-overlap did not run"


@dataclass(frozen=True)
class ExposedLayers:
    """One row: a layer, or several alike, in one phase."""

    layers: tuple[str, ...]
    phase: str
    launches: tuple[str, ...]
    """Exposed launches that carry tensors of these layers."""
    exposed_us: float
    cause: Reason | None
    """The reason for most of it; None if no pass looked for it."""

    @property
    def name(self) -> str:
        """`layers.1-30`."""
        return ", ".join(fold_layers(self.layers)) or OUTSIDE

    @property
    def cause_text(self) -> str:
        return CAUSES[self.cause] if self.cause is not None else UNKNOWN_CAUSE

    @property
    def row(self) -> tuple[str, str, str, str, str]:
        """The cells of a table."""
        return self.name, self.phase, str(len(self.launches)), duration_text(self.exposed_us), self.cause_text


def exposed_by_layer(exposed: Iterable[tuple[CollectiveRecord, float]]) -> tuple[ExposedLayers, ...]:
    """The rows, the longest first, of collectives with their exposed times in microseconds."""
    found: dict[tuple[str, str], _Place] = {}
    for record, exposed_us in exposed:
        if exposed_us <= 0:
            continue
        for place, share in _shares(record.origins).items():
            found.setdefault(place, _Place()).add(record, exposed_us * share)
    rows = [place.row(layer, phase) for (layer, phase), place in found.items()]
    return tuple(sorted(_folded(rows), key=lambda row: -row.exposed_us))


def layer_lines(rows: Sequence[ExposedLayers]) -> list[str]:
    """The table as text."""
    lines = table([HEADS, *(row.row for row in rows[:MAX_ROWS])])
    rest = rows[MAX_ROWS:]
    more = f"  ... and {len(rest)} more, exposed for {duration_text(sum(row.exposed_us for row in rest))} in all"
    return [plain_line(line) for line in [*lines, *([more] if rest else [])]]


def why_slow(step_us: float, compute_us: float, exposed_us: float, rows: Sequence[ExposedLayers]) -> str:
    """One sentence that answers why the step takes so long."""
    told = f"Of the {duration_text(step_us)} step, compute takes {duration_text(compute_us)}"
    if exposed_us <= 0:
        return f"{told}, and no communication is exposed."
    told += f" and exposed communication {duration_text(exposed_us)} ({exposed_us / step_us * 100:.1f} %)"
    if not rows or not rows[0].layers:
        return f"{told}."
    first = rows[0]
    phase = f" in {first.phase}" if first.phase else ""
    cause = f": {first.cause_text}" if first.cause is not None else ""
    return f"{told}; the largest part is {first.name}{phase}, {duration_text(first.exposed_us)}{cause}."


def _shares(origins: Sequence[CollectiveOrigin]) -> dict[tuple[str, str], float]:
    """The share of each layer and phase in a launch, by bytes; by number if sizes are unknown."""
    sizes = [origin.num_bytes for origin in origins]
    known = [size for size in sizes if size is not None]
    weights = known if len(known) == len(sizes) and sum(known) else [1] * len(sizes)
    found: dict[tuple[str, str], float] = {}
    for origin, weight in zip(origins, weights, strict=True):
        place = (origin.layer, origin.phase)
        found[place] = found.get(place, 0.0) + weight / sum(weights)
    return found or {("", ""): 1.0}


class _Place:
    """The exposed collectives of one layer in one phase."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.us_by_cause: dict[Reason | None, float] = {}

    def add(self, record: CollectiveRecord, exposed_us: float) -> None:
        self.launches.append(record.name)
        self.us_by_cause[record.cause] = self.us_by_cause.get(record.cause, 0.0) + exposed_us

    def row(self, layer: str, phase: str) -> ExposedLayers:
        cause = max(self.us_by_cause, key=self.us_by_cause.__getitem__)
        exposed_us = sum(self.us_by_cause.values())
        return ExposedLayers((layer,) if layer else (), phase, tuple(self.launches), exposed_us, cause)


def _folded(rows: Iterable[ExposedLayers]) -> list[ExposedLayers]:
    """One row for consecutive layers that are alike."""
    found: list[ExposedLayers] = []
    shortest = longest = 0.0
    for row in sorted(rows, key=lambda row: (row.phase, *_place(row))):
        last = found[-1] if found else None
        low, high = min(shortest, row.exposed_us), max(longest, row.exposed_us)
        if last is not None and _follows(last, row) and high <= SIMILAR * low:
            shortest, longest = low, high
            found[-1] = replace(
                last,
                layers=(*last.layers, *row.layers),
                launches=tuple(dict.fromkeys((*last.launches, *row.launches))),
                exposed_us=last.exposed_us + row.exposed_us,
            )
        else:
            shortest = longest = row.exposed_us
            found.append(row)
    return found


def _place(row: ExposedLayers) -> tuple[str, int]:
    prefix, _, number = (row.layers[-1] if row.layers else "").rpartition(".")
    return (prefix, int(number)) if number.isdigit() else (f"{prefix}.{number}", -1)


def _follows(last: ExposedLayers, row: ExposedLayers) -> bool:
    (prefix, number), (next_prefix, next_number) = _place(last), _place(row)
    are_layers = number >= 0 and (next_prefix, next_number) == (prefix, number + 1)
    return are_layers and (last.phase, last.cause) == (row.phase, row.cause)
