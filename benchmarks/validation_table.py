"""The figures of `validate.py` as Markdown: every row with its signed error, the effects, and the summary."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from bench_table import table

Figures = dict[str, Any]
BEGIN, END = "<!-- validation: begin -->", "<!-- validation: end -->"
GIB = 1 << 30


def throughput_error(row: Figures) -> float | None:
    """Predicted over published tokens/s, minus one."""
    found = row.get("predicted", {}).get("tokens_per_second_per_gpu")
    return None if found is None else found / row["tokens_per_second"] - 1


def memory_error(row: Figures) -> float | None:
    """Predicted over published peak, minus one."""
    if row.get("predicted") is None or row["gib"] is None:
        return None
    return row["predicted"]["memory"]["reserved_bytes"] / GIB / row["gib"] - 1


def one_line(row: Figures) -> str:
    """A row for the log."""
    speed, memory = throughput_error(row), memory_error(row)
    if speed is None:
        return f"not predicted: {row['not_predicted']}"
    told = f"{row['predicted']['tokens_per_second_per_gpu']:8.0f} tokens/s ({speed:+.1%})"
    return told if memory is None else f"{told}, {_gib(row):.1f} GiB ({memory:+.1%})"


def page(found: Figures) -> str:
    """All tables, with a summary."""
    rows = found["rows"]
    parts = [about(found), summary(rows), table_of(rows)]
    if effects := effects_table(found):
        parts += ["### Effects", effects]
    if left := [row for row in rows if row.get("predicted") is None]:
        lines = (f"- {row['page']}/{row['name']}: {row['not_predicted']}" for row in left)
        parts += ["### Rows that are not predicted", "\n".join(lines)]
    return "\n\n".join(parts)


def about(found: Figures) -> str:
    """When, at which commit and with which versions the rows were predicted."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    here = found["date"], found["commit"]
    ran = Counter((row.get("date", here[0]), row.get("commit", here[1])) for row in found["rows"] if "predicted" in row)
    rest = "".join(
        f" {count} rows are from {date}, commit {commit}."
        for (date, commit), count in sorted(ran.items())
        if (date, commit) != here
    )
    return f"`make validate`, {here[0]}, commit {here[1]}, {versions}.{rest}"


def summary(rows: list[Figures]) -> str:
    """Median and worst absolute errors of the rows that are predictions."""
    told: list[str] = []
    for name, error in (("tokens/s", throughput_error), ("peak memory", memory_error)):
        errors = [(abs(each), row["name"]) for row in rows if not row["fit"] and (each := error(row)) is not None]
        if errors:
            worst, where = max(errors)
            median = statistics.median(each for each, _ in errors)
            told.append(f"{name}: median error {median:.1%}, worst {worst:.1%} ({where}), {len(errors)} predictions")
    return "\n".join(f"- {line}" for line in told) if told else "Nothing was predicted."


def table_of(rows: list[Figures]) -> str:
    head = ("page", "row", "tokens/s per GPU, published", "predicted", "error", "GiB, published", "predicted", "error")
    return table(head, (_cells(row) for row in rows if row.get("predicted") is not None))


def _cells(row: Figures) -> list[str]:
    speed, memory = throughput_error(row), memory_error(row)
    predicted = row["predicted"]["tokens_per_second_per_gpu"]
    name = f"{row['name']} (fitted)" if row["fit"] else row["name"]
    cells = [row["page"], name, f"{row['tokens_per_second']:,.0f}", f"{predicted:,.0f}", _signed(speed)]
    return [*cells, "" if row["gib"] is None else f"{row['gib']:.1f}", f"{_gib(row):.1f}", _signed(memory)]


AGREEMENTS = {(True, True): "yes", (True, False): "speed only", (False, True): "memory only", (False, False): "no"}
"""Whether a change of speed and of memory is as published."""
FACTOR = 2
"""A predicted change has the published size if it is at least this part of it, and at most this multiple."""


def effects_table(found: Figures) -> str:
    """How one change moves throughput and memory: published and predicted."""
    by_key = {f"{row['page']}/{row['name']}": row for row in found["rows"] if row.get("predicted") is not None}
    head = (
        "change",
        "tokens/s, published",
        "predicted",
        "GiB, published",
        "predicted",
        "same direction",
        "half to double",
    )
    rows: list[list[str]] = []
    for effect in found["effects"]:
        if effect["before"] not in by_key or effect["after"] not in by_key:
            continue
        before, after = by_key[effect["before"]], by_key[effect["after"]]
        real = after["tokens_per_second"] / before["tokens_per_second"] - 1
        rates = [row["predicted"]["tokens_per_second_per_gpu"] for row in (before, after)]
        predicted = rates[1] / rates[0] - 1
        has_memory = before["gib"] is not None and after["gib"] is not None
        grown = _gib(after) - _gib(before)
        changes = [(real, predicted), *([(after["gib"] - before["gib"], grown)] if has_memory else [])]
        # Without published memory, speed alone counts.
        directions = ([a * b > 0 for a, b in changes] * 2)[:2]
        sizes = ([_has_size(a, b) for a, b in changes] * 2)[:2]
        rows.append(
            [
                effect["name"],
                _signed(real),
                _signed(predicted),
                f"{after['gib'] - before['gib']:+.1f}" if has_memory else "",
                f"{grown:+.1f}",
                AGREEMENTS[directions[0], directions[1]],
                AGREEMENTS[sizes[0], sizes[1]],
            ]
        )
    return table(head, rows) if rows else ""


def _has_size(published: float, predicted: float) -> bool:
    """Whether a change has the published direction, and about the published size."""
    return published * predicted > 0 and abs(published) <= FACTOR * abs(predicted) <= FACTOR**2 * abs(published)


def _gib(row: Figures) -> float:
    return row["predicted"]["memory"]["reserved_bytes"] / GIB


def _signed(share: float | None) -> str:
    return "" if share is None else f"{share * 100:+.1f} %"
