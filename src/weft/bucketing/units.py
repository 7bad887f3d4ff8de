"""Units: the groups of parameters that FSDP2 gathers and reduces together.

A block is the outermost module whose name ends in a number: an element of a list of modules, such as `layers.7`. Each
visit of a block is a unit, so forward and backward never share one. Launches outside of blocks (embedding, last norm,
head) belong to the root, in one of two layouts:

    split   a unit before the blocks, a unit after them; the layout of torchtitan since July 2025
    one     a single unit; the layout before that

A gradient that the root reduces again in the same visit, as a loss in chunks does with that of the head, begins another
unit: each chunk is reduced by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch.fx import Node

from weft.graph import ops
from weft.graph.ops import Kind
from weft.graph.origins import module_paths

Root = Literal["one", "split"]


def block_of(node: Node) -> str | None:
    """The outermost module of a node whose name ends in a number; None if it has none."""
    return next((path for path in module_paths(node) if path.rpartition(".")[2].isdigit()), None)


def units_of(launches: Sequence[Node], root: Root) -> dict[Node, str]:
    """The unit of each launch; the launches come in order. Empty if the graph names no modules."""
    if not any(map(module_paths, launches)):
        return {}
    units: dict[Node, str] = {}
    visit, last = -1, None
    num_rounds, seen, reduced = 0, set[tuple[str, ...]](), set[tuple[str, ...]]()
    for launch in launches:
        block = block_of(launch)
        place = (block, launch.meta.get("partitioner_tag"))
        if place != last:
            visit, last = visit + 1, place
            reduced = set[tuple[str, ...]]()
        parameter = (*module_paths(launch)[-1:], str(tuple(ops.value_of(launch).shape)))
        if block is None and ops.kind_of(launch.target) is Kind.REDUCE_SCATTER:
            if parameter in reduced:
                visit, reduced = visit + 1, set[tuple[str, ...]]()
            reduced.add(parameter)
        if block is not None or root == "split":
            units[launch] = f"{block or 'root'} {visit}"
            continue
        if parameter in seen:  # the root is visited again: backward, or another microbatch
            num_rounds, seen = num_rounds + 1, set()
        seen.add(parameter)
        units[launch] = f"root {num_rounds}"
    return units
