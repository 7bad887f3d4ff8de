"""Contents of storages in a symbolic run: views that see later writes, and writes through views.

Contract: only storages that are written are tracked. A `StorageView` is a base, or a view of another one. Reading it
applies the view to the current contents of the storage; writing it replaces exactly the elements that it shows. If
several tensors share a storage in an unknown way (two inputs of one storage, a strided view, an opaque call), their
contents are named by everything that has been done to that storage so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import Node

from weft.compat import OpOverload
from weft.graph import ops
from weft.graph.dag import Dag
from weft.graph.operator_effects import PLAIN, is_alias, waited_by
from weft.verification.symbolic.tensors import Run, Terms, Undecided, Value, cut, join, product

# Operators that reach elements of the storage which the tensor itself does not show.
BEYOND_THE_TENSOR = frozenset(
    {
        "aten::as_strided",
        "aten::as_strided_",
        "aten::resize_",
        "aten::resize_as_",
        "aten::set_",
        "aten::set_.source_Storage",
        "aten::set_.source_Storage_storage_offset",
        "aten::set_.source_Tensor",
        "aten::set_.source_Tensor_storage_offset",
        "aten::set_data",
        "inductor::_alloc_from_pool",
        "inductor::_reinterpret_tensor",
        "inductor::resize_storage_bytes_",
    }
)

ViewFunction = Callable[[Value], Sequence[Value]]


class Lost(Exception):  # noqa: N818  # a signal to `prove`, which then proves nothing
    """The contents of a storage cannot be tracked."""


@dataclass(eq=False, slots=True)
class StorageView:
    """A tensor in a storage that is written: the base, or a view of another `StorageView`."""

    storage: int
    address: Value
    """The elements of the base that it shows, as a value over an atom that represents the base."""
    parent: StorageView | None = None
    view: ViewFunction | None = None
    item: int = 0
    seen: int = -1
    """The version of the storage for which `value` is valid."""
    value: Value | None = field(default=None, repr=False)


@dataclass(eq=False, slots=True)
class Tangle:
    """A tensor in a storage that is shared in an unknown way: it claims the storage, or is a view of another."""

    storage: int
    name: int
    """The number of `address`."""
    address: Value
    """Its elements, as a value over an atom that represents the tensor that claims the storage."""
    parent: Tangle | None = None
    view: ViewFunction | None = None
    item: int = 0
    seen: int | None = None
    """The history of the storage for which `value` is valid."""
    value: Value | None = field(default=None, repr=False)


class Contents:
    """The contents of all storages that one graph writes."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self._held: dict[int, Value] = {}
        self._versions: dict[int, int] = {}
        self._histories: dict[int, int] = {}

    def new(self, storage: int, value: Value) -> StorageView:
        """Create the base of a storage that holds `value`."""
        if storage in self._held:
            raise Lost(f"another tensor already claims the storage of {self.terms.node}")
        self._held[storage], self._versions[storage] = value, 0
        size = product(value.shape)
        base = self.terms.atom("base", size, value.dtype)
        return StorageView(storage, Value(value.shape, value.dtype, join([(base, 0, size)])))

    def tangle(self, storage: int, leaf: Value, copy: int) -> Tangle:
        """A tensor that claims a storage with others; `copy` counts the earlier ones that were made in the same way."""
        address = self.terms.whole(("tangled", self.terms.number(leaf), copy), leaf.shape, leaf.dtype)
        return Tangle(storage, self.terms.number(address), address)

    def tangled_views(self, parent: Tangle, view: ViewFunction) -> list[Tangle]:
        """The results of a view of a tangled tensor."""
        return [
            Tangle(parent.storage, self.terms.number(address), address, parent, view, item)
            for item, address in enumerate(view(parent.address))
        ]

    def history(self, storage: int) -> int:
        """An atom that represents everything that was done to a storage with tangled tensors."""
        return self._histories.get(storage, -1)

    def views(self, parent: StorageView, view: ViewFunction) -> list[StorageView]:
        """The results of a view of a `StorageView`."""
        seen: list[tuple[int, Sequence[Value]]] = [(-1, ())]

        def once_per_version(value: Value) -> Sequence[Value]:
            if seen[0][0] != self._versions[parent.storage]:
                seen[0] = (self._versions[parent.storage], view(value))
            return seen[0][1]

        return [
            StorageView(parent.storage, address, parent, once_per_version, item)
            for item, address in enumerate(view(parent.address))
        ]

    def read(self, place: StorageView | Tangle) -> Value:
        """The current elements of a view."""
        if isinstance(place, Tangle):
            return self._read_tangle(place)
        version = self._versions[place.storage]
        chain: list[StorageView] = []
        current: StorageView | None = place
        while current is not None and (current.seen != version or current.value is None):
            chain.append(current)
            current = current.parent
        value = self._held[place.storage] if current is None or current.value is None else current.value
        for step in reversed(chain):
            value = value if step.view is None else step.view(value)[step.item]
            step.seen, step.value = version, value
        return value

    def _read_tangle(self, place: Tangle) -> Value:
        history = self.history(place.storage)
        chain: list[Tangle] = [place]
        while (parent := chain[-1].parent) is not None and chain[-1].seen != history:
            chain.append(parent)
        value = chain[-1].value
        if chain[-1].seen != history or value is None:
            address = chain[-1].address
            value = self.terms.whole(("tangle", chain[-1].name, history), address.shape, address.dtype)
        for step in reversed(chain):
            if step.seen != history and step.view is not None:
                value = step.view(value)[step.item]
            step.seen, step.value = history, value
        return value

    def write(self, place: StorageView, value: Value) -> None:
        """Overwrite the elements that a view shows with those of `value`."""
        held = self._held[place.storage]
        try:
            runs = self._replaced(held, place.address, value)
            self._held[place.storage] = Value(held.shape, held.dtype, runs)
        except Undecided:
            numbers = tuple(self.terms.number(v) for v in (place.address, value, held))
            self._held[place.storage] = self.terms.whole("write", held.shape, held.dtype, numbers)
        self._versions[place.storage] += 1

    def happened(self, storage: int, event: Hashable) -> None:
        """Record an event on a storage with tangled tensors."""
        before = self._histories.get(storage, -1)
        self._histories[storage] = self.terms.atom(("event", event, before), 1, None)

    def _replaced(self, held: Value, address: Value, value: Value) -> tuple[Run, ...]:
        base = self.terms.atom("base", product(held.shape), held.dtype)
        if value.dtype != held.dtype or any(atom != base for atom, _, _ in address.runs):
            raise Undecided
        whole = product(held.shape)
        if len(address.runs) == 1 and address.runs[0][1:] == (0, whole):
            return value.runs
        if any(type(n) is not int for run in address.runs for n in run) or type(whole) is not int:
            raise Undecided
        pieces = cut(value.runs, [length for _, _, length in address.runs])
        ranges = sorted((start, length, k) for k, (_, start, length) in enumerate(address.runs))
        lengths: list[int] = []
        end = 0
        for start, length, _ in ranges:
            if start < end:
                raise Undecided
            lengths += [start - end, length]
            end = start + length
        strips: list[Sequence[Run]] = list(cut(held.runs, [*lengths, whole - end]))
        for position, (_, _, k) in enumerate(ranges):
            strips[2 * position + 1] = pieces[k]
        return join(run for strip in strips for run in strip)

    def overlap(self, first: StorageView, second: StorageView, *, same_is_fine: bool) -> bool:
        """Whether two views of one storage may overlap; with `same_is_fine`, equal views do not count."""
        if first.address.runs == second.address.runs:
            return not same_is_fine
        held = self._held[first.storage]
        base = self.terms.atom("base", product(held.shape), held.dtype)
        runs = [*first.address.runs, *second.address.runs]
        if any(atom != base or type(start) is not int or type(length) is not int for atom, start, length in runs):
            return True
        ranges = sorted((start, start + length) for _, start, length in runs)
        return any(after < end for (_, end), (after, _) in itertools.pairwise(ranges))


def find_arrivals(dag: Dag) -> dict[int, set[int]]:
    """Waits for launches from before the graph began, each with the storages that it completes."""
    ends: dict[int, set[int]] = {}
    for flight in dag.effects.flights:
        if flight.wait is not None:
            ends.setdefault(flight.wait, set()).update(flight.writes)
    landed: set[int] = set()
    found: dict[int, set[int]] = {}
    for i, profile in dag.effects.special:
        if profile.wait:
            waited = {s for source in waited_by(dag.nodes[i]) for s in dag.effects.surely_held(dag.index[source])}
            new = waited - ends.get(i, set()) - landed
            if new:
                found[i] = set(map(dag.effects.find, new))
            landed |= waited
    return found


def find_tangles(dag: Dag, followed: Set[int]) -> set[int]:
    """Written storages whose tensors are not all views of one base."""
    if not followed:
        return set()
    profiles = dict(dag.effects.special)
    bases: set[int] = set()
    tangled: set[int] = set()
    for i, node in enumerate(dag.nodes):
        held = followed & set(dag.effects.held(i))
        if not held:
            continue
        profile = profiles.get(i, PLAIN)
        beyond = isinstance(node.target, OpOverload) and node.target.name() in BEYOND_THE_TENSOR
        if profile.opaque or beyond or (node.op == "get_attr" and not _is_tensor(node)):
            tangled |= held
        elif not (profile.writes and profile.aliases) and not is_alias(node):
            tangled |= held & bases
            bases |= held
    return tangled


def _is_tensor(node: Node) -> bool:
    """Whether an attribute is a tensor; a nested graph, for example, has tensors of its own."""
    held = ops.value_of(node)
    return isinstance(held if held is not None else ops.attribute(node.graph.owning_module, str(node.target)), Tensor)


def without(places: Sequence[StorageView], one: StorageView) -> list[StorageView]:
    """The views without one occurrence of one of them."""
    position = next(k for k, place in enumerate(places) if place is one)
    return [*places[:position], *places[position + 1 :]]
