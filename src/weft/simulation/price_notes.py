"""Sentences about prices that rest on assumptions or leave something out, for reports and predictions."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from weft.cost.flops import has_assumed_mask
from weft.simulation.program import Program

MAX_NAMED = 4
"""Number of nodes that a note names."""


def notes_on_prices(program: Program, nodes: Iterable[Node]) -> tuple[str, ...]:
    """One sentence for the nodes that are priced too low, and one for masks that are not analysed."""
    masked = [node.name for node in nodes if has_assumed_mask(node)]
    low = [program.names[op] for op in program.underpriced]
    notes: list[str] = []
    if masked:
        notes.append(f"the mask of {_named(masked)} counts as causal: masks of FlexAttention are not analysed")
    if low:
        notes.append(f"the price of {_named(low)} may be too low: a size, what it computes, or its peak is unknown")
    return tuple(notes)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
