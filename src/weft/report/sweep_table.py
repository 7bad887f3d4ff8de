"""The cells of a sweep as a table.

Contract: names of clusters, pipelines and policies are untrusted text: control characters are removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from weft.quantities import count_text, duration_text, exact_size_text, share_text, size_text
from weft.report.plain_text import plain, plain_line, table
from weft.report.sweep import Cell

PLACES = ("source", "cluster", "pipeline", "memory limit", "buckets", "policy")
FIGURES = (
    *(
        "step",
        "run today",
        "exposed",
        "bound",
        "bound of choices",
        "gap",
        "peak memory",
        "recomputed",
        "gathered again",
    ),
    *("collectives", "passes", "MFU", "tokens/s"),
)
WHERE_KNOWN = (
    *(
        "source",
        "memory limit",
        "buckets",
        "policy",
        "run today",
        "bound of choices",
        "recomputed",
        "gathered again",
        "MFU",
        "tokens/s",
    ),
)
"""Columns that are omitted if no cell has a value for them."""


def sweep_text(cells: Iterable[Cell]) -> str:
    """The cells as a table, followed by their errors. Limits that miss the same peak share one error, the last one."""
    cells = with_different_sources(cells)
    head = [*PLACES, *FIGURES]
    rows = [head]
    errors: dict[object, str] = {}
    for cell in cells:
        rows.append([*map(plain_line, (*place_texts(cell), *_texts(cell)))])
        if cell.error is not None:
            message = plain(cell.error).replace("\n", "\n    ")
            place = ", ".join(map(plain_line, _told(cell)))
            alike = (cell.source, cell.cluster, cell.pipeline, cell.max_bucket_bytes, cell.fitting_bytes)
            errors[cell.index if cell.has_failed else alike] = f"\n{place}:\n    {message}"
    if len(rows) == 1:
        return "the sweep has no cells"
    known = [any(cell != "-" for cell in column[1:]) for column in zip(*rows, strict=True)]
    shown = [i for i, is_known in enumerate(known) if head[i] not in WHERE_KNOWN or is_known]
    return "\n".join([*table([[row[i] for i in shown] for row in rows]), *errors.values()])


def with_different_sources(cells: Iterable[Cell]) -> list[Cell]:
    """The cells, without their source if all have the same."""
    found = list(cells)
    return found if len({cell.source for cell in found}) > 1 else [replace(cell, source=None) for cell in found]


def place_texts(cell: Cell) -> tuple[str, str, str, str, str, str]:
    """The place of a cell on each axis: its source, its cluster, its pipeline, its limits and its policy."""
    sizes = cell.memory_limit_bytes, cell.max_bucket_bytes
    memory, bucket = ("-" if size is None else exact_size_text(size) for size in sizes)
    return cell.source or "-", cell.cluster, cell.pipeline, memory, bucket, cell.policy or "-"


def _told(cell: Cell) -> Iterator[str]:
    for text, told in zip(place_texts(cell), ("{}", "{}", "{}", "{} of memory", "buckets of {}", "{}"), strict=True):
        if text != "-":
            yield told.format(text)


def _texts(cell: Cell) -> list[str]:
    before, after = cell.before, cell.after
    if before is None or after is None:
        fitting = cell.fitting_bytes
        told = "failed" if fitting is None else f"needs {size_text(fitting)}"
        return [told, *["-"] * (len(FIGURES) - 1)]
    return [
        f"{duration_text(before.step_us)} -> {duration_text(after.step_us)}",
        "-" if cell.runtime_us is None else f"{duration_text(cell.runtime_us)} ({cell.runtime})",
        f"{duration_text(before.exposed_us)} -> {duration_text(after.exposed_us)}",
        "-" if after.lower_bound_us is None else duration_text(after.lower_bound_us),
        "-" if after.choices_bound_us is None else duration_text(after.choices_bound_us),
        "-" if after.gap is None else share_text(after.gap),
        "-" if after.peak_bytes is None else size_text(after.peak_bytes),
        "-" if cell.recomputed is None else count_text(cell.recomputed),
        "-" if cell.gathered_again is None else count_text(cell.gathered_again),
        f"{before.num_collectives} -> {after.num_collectives}",
        duration_text((cell.pass_seconds or 0) * 1e6),
        "-" if after.mfu is None else share_text(after.mfu),
        "-" if after.tokens_per_second is None else count_text(after.tokens_per_second),
    ]
