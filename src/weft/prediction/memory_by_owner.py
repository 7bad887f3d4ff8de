"""The memory of a simulated step by owner: parameters, gathered weights, activations, and so on, at each moment.

Contract: a storage belongs to the owner of the node that allocates it first (`owners.py`). At every point of the curve,
the bytes of all owners add up to the bytes in use. Where a graph writes none of its inputs, no input is known to be a
parameter, and all of them count as inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from weft.graph.dag import Dag
from weft.prediction.owners import MemoryPart, owners_of
from weft.simulation.memory import Footprint
from weft.simulation.program import Program

INPUTS = "inputs and constants"
"""Name of all inputs if none is known to be a parameter."""
NAMES: dict[MemoryPart | str, str] = {MemoryPart.GATHERED: "gathered or cast weights"}
"""Names of parts that are not exact enough without the words around them in a prediction."""


@dataclass(frozen=True)
class OwnedMemory:
    """The memory of one program in its own order."""

    owners: tuple[str, ...]
    """Names of the owners that have memory at some time."""
    given: tuple[int, ...]
    """Bytes that each owner has before the first operation."""
    changes: tuple[tuple[tuple[int, int], ...], ...]
    """For each later point of the timeline's curve, the owners (by index) whose bytes change, and by how much."""

    @cached_property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each owner when the most memory is in use."""
        peak = max(self.points(), key=sum, default=())
        return {owner: num_bytes for owner, num_bytes in zip(self.owners, peak, strict=False) if num_bytes}

    def points(self) -> Iterator[list[int]]:
        """Bytes of each owner at each point of the curve."""
        now = list(self.given)
        yield now.copy()
        for change in self.changes:
            for owner, num_bytes in change:
                now[owner] += num_bytes
            yield now.copy()


def memory_by_owner(dag: Dag, program: Program) -> OwnedMemory:
    """The memory of a program by owner; `dag` is what the program was built from."""
    part_of = _part_of_storages(dag, program)
    order = range(len(program.names))
    owners: list[str] = []
    given: list[int] = []
    made: list[list[int]] = []
    freed: list[list[int]] = []
    known = set(part_of.values())
    for part in (name for name in (*MemoryPart, INPUTS) if name in known):
        own = Footprint(replace(program, allocates=_only(program, part_of, part)))
        allocated, released = (each.tolist() for each in own.changes(order))
        if own.given_bytes or any(allocated):
            owners.append(NAMES.get(part, str(part)))
            given.append(own.given_bytes)
            made.append(allocated)
            freed.append(released)
    changes: list[tuple[tuple[int, int], ...]] = []
    for sign, each in _events(made, freed):
        changes.append(tuple((k, sign * num_bytes) for k, num_bytes in enumerate(each) if num_bytes))
    return OwnedMemory(tuple(owners), tuple(given), tuple(changes))


def _events(made: list[list[int]], freed: list[list[int]]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Bytes that operations allocate and free, by owner, in the order in which the curve of a timeline has them."""
    for allocated, released in zip(zip(*made, strict=True), zip(*freed, strict=True), strict=True):
        if any(allocated):
            yield 1, allocated
        if any(released):
            yield -1, released


def _only(
    program: Program, part_of: dict[int, MemoryPart | str], part: MemoryPart | str
) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(tuple(each for each in made if part_of[each[0]] == part) for made in program.allocates)


def _part_of_storages(dag: Dag, program: Program) -> dict[int, MemoryPart | str]:
    owners = owners_of([dag])
    written = dag.effects.memory.direct_writes
    inputs = {i for i, node in enumerate(dag.nodes) if node.op in ("placeholder", "get_attr")}
    has_updates = any(storage in written for i in inputs for storage in dag.effects.held(i))
    found: dict[int, MemoryPart | str] = {}
    for op, made in enumerate(program.allocates):
        part = INPUTS if op in inputs and not has_updates else owners[op][0]
        for storage, _ in made:
            found.setdefault(storage, part)
    return found
