"""The effects of nodes: reads and writes of storages, collectives in flight, random numbers, effects outside the graph.

Contract: two nodes may be reordered only if no path of edges of the Dag, which include `Effects.edges`, connects them.
Storages are followed through views by schema, so the chain of views between a write and a read does not matter. Inputs
and constants that share memory outside the graph are one storage. Those that only may share memory (see `aliasing`) are
ordered like one storage if one of them is written, and count as two everywhere else.

A collective reads its inputs and writes its results from its launch to its wait. So does a copy to host memory
(`weft::offload`) or back (`weft::fetch`). A wait therefore counts as a second read of the inputs and a second write
of the results: no other write to these buffers can move into or out of the flight, and the wait cannot sink past one.
Communication of an unknown kind, point-to-point communication and opaque calls are barriers for all communication.

A copy to the host with `non_blocking` writes its result until the host next waits for the device. Nodes that access the
result do not cross any node at which the host may wait. Nor do writes to the source of a copy from the host.

An unknown call that takes no tensor may change a mode or the current stream, so no call crosses it.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import getitem
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Node

from weft.compat import OpOverload, input_nodes, may_return_its_argument
from weft.graph import ops
from weft.graph.aliasing import Memory, memories
from weft.graph.groups import group_argument, runtime_name
from weft.graph.host import Wait, transfer_of
from weft.graph.memory import MemoryAccesses
from weft.graph.operator_effects import (
    OPAQUE,
    PLAIN,
    Profile,
    profile,
    profile_of,
    shares_storage,
    touched,
    waited_by,
    waited_inside,
)

# Pseudo-storages: they order nodes for reasons other than memory. Storages of tensors are numbered from 0.
GENERATOR, OUTSIDE, COMMUNICATION = -1, -2, -3
FIRST_WORKSPACE = -4
NUMBER_GUARDS = ("aten::_assert_scalar", "aten::sym_constrain_range", "aten::sym_constrain_range_for_size")
"""Calls that check a number which the host has read, before the number is used."""

Storage = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Flight:
    """One tensor in flight, from its launch to its first wait or to the end of the graph."""

    launch: int
    wait: int | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Effects:
    """The effects of a sequence of nodes, and the edges that keep them in order.

    `storages[i]` is the number of the storage that node i holds. `accesses` lists (node, storage, is_write) for the
    storages that some node writes and for the pseudo-storages. Accesses to other storages never conflict.
    """

    def __init__(self, nodes: Sequence[Node], index: dict[Node, int], succs: Sequence[Sequence[int]]) -> None:
        self.nodes, self.index, self._succs = nodes, index, succs
        self.storages: list[Storage | None] = [None] * len(nodes)
        self._next_storage = len(nodes)
        self._parents: dict[int, int] = {}
        self._doubts: dict[int, int] = {}
        self._shared: list[tuple[int, ...]] = []
        """Results of calls with nested graphs, each with the storages whose memory it may share."""
        self._named: dict[int, int] = {}
        self._memories = memories(nodes)
        self._given: dict[Node, Storage] = {}
        self.special: list[tuple[int, Profile]] = []
        self._transfers: list[int] = []
        self._number_storages()
        self.flights: list[Flight] = []
        self._waits: dict[int, list[int]] = {}
        self.waits_on: dict[int, list[int]] = {}
        """The waits on each storage (by `root`), in order. Only the first one completes something."""
        self._arrivals: list[tuple[int, int]] = []
        self._arrived: set[int] = set()
        self._follow_flights()
        self.landings: dict[int, tuple[int, ...]] = {}
        """Asynchronous copies to the host, each with the storages that it fills."""
        self.syncs: list[int] = []
        """Nodes after the first asynchronous copy at which the host waits for the device."""
        self.may_sync: list[int] = []
        """Nodes at which the host may wait for the device, besides opaque calls."""
        self.races: dict[int, int] = {}
        """Copies from the host whose source is written before a sync, each with the possible waits in between."""
        self._leaving: dict[int, tuple[int, ...]] = {}
        self._follow_host_copies()
        self.accesses = sorted(self._find_accesses())

    def find(self, storage: int) -> int:
        """The representative of a storage, where storages that may share memory are joined."""
        root = self.root(storage)
        return self._doubts.get(root, root)

    def root(self, storage: int) -> int:
        """The representative of a storage, where only storages that surely share memory are joined."""
        parents = self._parents
        while storage in parents:
            above = parents[storage]
            if above in parents:
                parents[storage] = parents[above]  # path halving: chains of opaque calls would make paths long
            storage = above
        return storage

    def held(self, i: int) -> tuple[int, ...]:
        """The storages that node i holds."""
        return tuple(map(self.find, self._listed(i)))

    def surely_held(self, i: int) -> tuple[int, ...]:
        """The storages that node i holds, not joined with those that only may share their memory."""
        return tuple(map(self.root, self._listed(i)))

    def _listed(self, i: int) -> tuple[int, ...]:
        storage = self.storages[i]
        if storage is None:
            return ()
        return storage if isinstance(storage, tuple) else (storage,)

    def edges(self) -> list[tuple[int, int]]:
        """Pairs (earlier, later) that must keep their order: read after write, write after read, write after write."""
        last_write: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        found: list[tuple[int, int]] = []
        for i, storage, is_write in self.accesses:
            before = last_write.get(storage)
            if not is_write:
                if before is not None and before != i:
                    found.append((before, i))
                readers.setdefault(storage, []).append(i)
                continue
            waiting = readers.pop(storage, [])
            found += [(reader, i) for reader in waiting if reader != i]
            if before is not None and before != i and not waiting:
                found.append((before, i))
            last_write[storage] = i
        return found + list(self._guarded()) + list(self._sides_of_fences())

    def _guarded(self) -> Iterable[tuple[int, int]]:
        """Edges from an assertion about a number to the later calls that take the number."""
        for i, p in self.special:
            if not p.ordered or ops.qualified_name(self.nodes[i].target) not in NUMBER_GUARDS:
                continue
            asserted, stack = dict.fromkeys(input_nodes(self.nodes[i])), [*input_nodes(self.nodes[i])]
            while stack:
                node = stack.pop()
                numbers = [s for s in input_nodes(node) if isinstance(ops.value_of(s), SymInt | SymFloat | SymBool)]
                stack += [source for source in numbers if source not in asserted]
                asserted.update(dict.fromkeys(numbers))
            users = (self.index.get(user, -1) for number in asserted for user in number.users)
            yield from ((i, k) for k in users if k > i)

    def _sides_of_fences(self) -> Iterable[tuple[int, int]]:
        """Edges that keep every call between its two neighbouring fences."""
        ends = [*self.fences, len(self.nodes)]
        for first, last in pairwise([-1, *ends] if self.fences else ()):
            for i in range(first + 1, last):
                if self.nodes[i].op.startswith("call"):
                    yield from ([(first, i)] if first >= 0 else []) + ([(i, last)] if last < len(self.nodes) else [])

    @functools.cached_property
    def fences(self) -> list[int]:
        """Unknown calls that take no tensor. They may change a mode of the process or the current stream."""
        return [i for i, p in self.special if p.opaque and not any(map(_may_be_tensor, input_nodes(self.nodes[i])))]

    def completes(self, i: int) -> bool:
        """Whether the wait at i completes a launch, of this graph or of an earlier one."""
        return i in self._waits or i in self._arrived

    @functools.cached_property
    def memory(self) -> MemoryAccesses:
        """The accesses by storage and by node."""
        return MemoryAccesses(self.accesses, self.special)

    def issue_order(self) -> list[tuple[int, int]]:
        """Pairs of consecutive launches of one group, in the order in which every rank issues them."""
        last: dict[str, int] = {}
        found: list[tuple[int, int]] = []
        for i, p in self.special:
            argument = group_argument(self.nodes[i]) if p.launch else None
            if argument is None:
                continue
            group = runtime_name(argument)
            if group in last:
                found.append((last[group], i))
            last[group] = i
        return found

    @functools.cached_property
    def held_by_outputs(self) -> frozenset[int]:
        """The storages that leave the graph."""
        outputs = [node for node in reversed(self.nodes) if node.op == "output"]
        sources = [source for node in outputs for source in input_nodes(node)]
        return frozenset(s for source in sources for s in self.held(self.index[source]))

    def accesses_in_flight(self) -> Iterable[tuple[Flight, int, int, bool]]:
        """Accesses (flight, node, storage, is_write) to the buffers of a launch between it and its wait."""
        for flight, i, storage, is_write in self._in_flight():
            shared = self._surely_touched(flight, i, is_write) if self._doubts else {storage}
            yield from ((flight, i, s, is_write) for s in sorted(shared)[:1])

    def doubtful_accesses_in_flight(self) -> Iterable[tuple[Flight, int]]:
        """Accesses (flight, node) to memory that may overlap the buffers of a launch."""
        if self._doubts:
            found = ((f, i) for f, i, _, is_write in self._in_flight() if not self._surely_touched(f, i, is_write))
            yield from dict.fromkeys(found)

    def _in_flight(self) -> Iterable[tuple[Flight, int, int, bool]]:
        ahead: dict[int, deque[Flight]] = {}
        received: dict[Flight, set[int]] = {}
        for flight in self.flights:  # in the order of their launches
            received[flight] = set(map(self.find, flight.writes))
            for storage in sorted({*map(self.find, flight.reads), *received[flight]}):
                ahead.setdefault(storage, deque()).append(flight)
        flying: dict[int, list[Flight]] = {}
        unknown = {i for i, p in self.special if p.opaque}  # their accesses order nodes but do not prove a fault
        for i, storage, is_write in self.accesses:
            now = [flight for flight in flying.get(storage, ()) if flight.wait is None or i < flight.wait]
            waiting = ahead.get(storage)
            while waiting and waiting[0].launch < i:
                flight = waiting.popleft()
                if flight.wait is None or i < flight.wait:
                    now.append(flight)
            flying[storage] = now
            if i not in unknown:
                yield from ((f, i, storage, is_write) for f in now if is_write or storage in received[f])

    def _surely_touched(self, flight: Flight, i: int, is_write: bool) -> set[int]:
        """The buffers of a launch that node i is known to read or to write."""
        p = self._profiles.get(i, PLAIN)
        if is_write and (p.writes or p.opaque):
            touched = self._surely_written(i, p)
        else:
            touched = {s for held in self._held_by(input_nodes(self.nodes[i])) for s in held}
            touched.update(self.surely_held(i) if p.launch else ())
        return touched.intersection((*flight.reads, *flight.writes) if is_write else flight.writes)

    # Filling the tables.

    def _number_storages(self) -> None:
        storages, special = self.storages, self.special
        self._number_given()
        for i, node in enumerate(self.nodes):
            if node.op == "call_function":
                found = profile(node.target)
                if found.opaque:
                    found = profile_of(node)
                if found.host:
                    self._transfers.append(i)
                if found.plain and not found.several:
                    storages[i] = i
                    continue
                if not found.plain:
                    special.append((i, found))
                if storages[i] is None:
                    storages[i] = self._storage(i, found)
            elif node.op in ("placeholder", "get_attr"):
                storages[i] = self._given.get(node, i)
            elif node.op != "output":
                special.append((i, OPAQUE))
                storages[i] = self._storage(i, OPAQUE)
        for together in self._shared:
            self._join_in_doubt(dict.fromkeys(map(self.root, together)))

    def _storage(self, i: int, found: Profile) -> Storage:
        node = self.nodes[i]
        if found.opaque or found.joins:
            sources = touched(node) if found.opaque else found.joins
            joined = [s for source in sources for s in self._held_raw(self.index[source])]
            if found.opaque or any(profile(source.target).launch for source in sources):
                return self._join([i, *joined, *_flat(self._given.get(node, ()))])
            self._shared.append((i, *joined))  # it may be new memory too: this orders nodes but does not prove a fault
            return i
        if node.target is getitem:
            return self._item(node)
        if found.may_share:
            return self._join([i, *self._may_hold(node, found)])
        if found.aliases and not (found.may_copy and not shares_storage(node)):
            if found.views_first and node.args and isinstance(node.args[0], Node):
                return self._raw(self.index[node.args[0]])
            sources = self.arguments(node, found.aliases)
            if len(sources) == 1 and isinstance(sources[0], Node):
                return self._raw(self.index[sources[0]])
            held = [self._held_raw(self.index[n]) for n in _flatten(sources)]
            if ops.kind_of(node.target) is ops.Kind.BATCH_P2P:
                received = [op == "irecv" for op in ops.bind(node)["op_list"]]
                return tuple(self._join(h) if r else self._fresh() for h, r in zip(held, received, strict=False))
            if found.several:
                return tuple(self._join(h) for h in held)
            return self._join([s for h in held for s in h])
        if not found.several:
            return i
        value = ops.value_of(node)
        count = len(value) if isinstance(value, list | tuple | Mapping) else 0
        return tuple(self._fresh() for _ in range(count)) or i

    def _item(self, node: Node) -> Storage:
        source: Any = node.args[0]
        position: Any = node.args[1]
        if not isinstance(source, Node):
            return self._fresh()
        storage = self._raw(self.index[source])
        if isinstance(storage, tuple):
            value = ops.value_of(source)
            if isinstance(value, Mapping) and position in value:
                position = list(value).index(position)
            inside = isinstance(position, int) and -len(storage) <= position < len(storage)
            return storage[position] if inside else self._join(storage)
        return storage

    def _number_given(self) -> None:
        """Number the storages of inputs and attributes. Those that share memory get one number."""
        spans: list[tuple[str, int, int, int]] = []
        for node, memory in self._memories.items():
            numbers: list[int] = []
            for part in memory.parts:
                number = self.index[node] if not numbers else self._fresh()
                numbers.append(self._join([*(self._named.setdefault(key, number) for key in part.keys)]))
                if part.span is not None:
                    spans.append((*part.span, numbers[-1]))
            self._given[node] = self._given_as(node, memory, numbers)
        end, before = 0, -1
        device = ""
        for where, start, stop, number in sorted(spans):
            if where == device and start < end:
                self._join([before, number])
            end = max(end, stop) if where == device else stop
            device, before = where, number

    def _given_as(self, node: Node, memory: Memory, numbers: list[int]) -> Storage:
        if not numbers:
            return self.index[node]
        return self._join(numbers) if memory.is_container or len(numbers) == 1 else tuple(numbers)

    def _raw(self, i: int) -> Storage:
        """The storage of node i, computed now if an earlier node asks for it before its turn."""
        storage = self.storages[i]
        if storage is None:
            node = self.nodes[i]
            storage = self._storage(i, profile_of(node)) if node.op.startswith("call") else self._given.get(node, i)
            self.storages[i] = storage
        return storage

    def _held_raw(self, i: int) -> tuple[int, ...]:
        storage = self._raw(i)
        return storage if isinstance(storage, tuple) else (storage,)

    def _may_hold(self, node: Node, found: Profile) -> list[int]:
        """The storages of the arguments whose memory the results of a call may share."""
        target = node.target
        if isinstance(target, OpOverload) and may_return_its_argument(target) and not shares_storage(node):
            return []  # composite operators run the same code on fake and on real tensors
        sources = [n for n in _flatten(self.arguments(node, found.may_share)) if not _lie_apart(node, n)]
        return [s for source in sources for s in self._held_raw(self.index[source])]

    def _fresh(self) -> int:
        self._next_storage += 1
        return self._next_storage - 1

    def _join(self, storages: Iterable[int]) -> int:
        first, *rest = [self.find(s) for s in storages] or [self._fresh()]
        for other in rest:
            if self.find(other) != first:
                self._parents[self.find(other)] = first
        return first

    def arguments(self, node: Node, names: Iterable[str]) -> list[Any]:
        """The arguments with these names, if the node has them."""
        bound = ops.bind(node)
        return [bound[name] for name in names if isinstance(bound.get(name), Node | list | tuple)]

    def _written(self, node: Node, found: Profile) -> list[Any]:
        """The arguments that a node writes. A batch of sends and receives writes only what it receives."""
        if ops.kind_of(node.target) is ops.Kind.BATCH_P2P:
            bound = ops.bind(node)
            return [t for op, t in zip(bound["op_list"], bound["tensors"], strict=False) if op == "irecv"]
        return self.arguments(node, found.writes)

    def _held_by(self, arguments: Iterable[Any]) -> list[tuple[int, ...]]:
        return [self.surely_held(self.index[node]) for node in _flatten(arguments)]

    @functools.cached_property
    def _profiles(self) -> dict[int, Profile]:
        return dict(self.special)

    def _follow_flights(self) -> None:
        """Pair each tensor of each launch with its first wait, by storage."""
        open_flights: dict[int, list[int]] = {}
        pending: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        ends: dict[int, int] = {}
        landed: set[int] = set()
        for i, p in self.special:
            node = self.nodes[i]
            form = ops.launch_form(node.target) if p.launch else None
            if p.host_copy:
                (written,) = self.surely_held(i)
                open_flights.setdefault(written, []).append(len(pending))
                pending.append((i, tuple(s for held in self._held_by(input_nodes(node)) for s in held), (written,)))
            elif form is not None:
                sent = self._held_by(self.arguments(node, (form.tensors,)))
                own = self.surely_held(i)
                results = [(s,) for s in own] if form.coalesced else [own]
                for k, writes in enumerate(results):
                    for storage in writes:
                        open_flights.setdefault(storage, []).append(len(pending))
                    pending.append((i, sent[k] if k < len(sent) else (), writes))
            elif waited := waited_by(node) if p.wait else waited_inside(node) if p.opaque else ():
                for storage in {s for held in self._held_by(waited) for s in held}:
                    self.waits_on.setdefault(storage, []).append(i)
                    for flight in open_flights.pop(storage, []):
                        ends[flight] = i
                        self._waits.setdefault(i, []).append(flight)
                    if storage not in landed and i not in self._waits:
                        self._arrivals.append((i, storage))
                        self._arrived.add(i)
                    landed.add(storage)
        self.flights = [Flight(i, ends.get(f), reads, writes) for f, (i, reads, writes) in enumerate(pending)]

    def _follow_host_copies(self) -> None:
        """Find the asynchronous copies, and order the nodes at which the host waits like effects outside the graph."""
        found = [(i, transfer) for i in self._transfers if (transfer := transfer_of(self.nodes[i])) is not None]
        early = [i for i, transfer in found if transfer.wait in (Wait.LANDS, Wait.LEAVES)]
        if not early:
            return
        profiles = dict(self.special)
        for i, transfer in found:
            if transfer.wait is Wait.LANDS:
                self.landings[i] = tuple(s for held in self._held_by(transfer.destinations) for s in held)
            elif transfer.wait is Wait.LEAVES:
                self._leaving[i] = tuple(s for held in self._held_by(transfer.sources) for s in held)
            elif i > early[0]:
                profiles[i] = replace(profiles.get(i, profile(self.nodes[i].target)), plain=False, ordered=True)
                (self.syncs if transfer.wait is Wait.SYNCS else self.may_sync).append(i)
        self.special = sorted(profiles.items(), key=lambda item: item[0])

    def _order_host_copies(self, found: set[tuple[int, int, bool]]) -> Iterable[tuple[int, int, bool]]:
        """Order the accesses to copies in flight against every node at which the host may wait for the device."""
        begins: dict[int, int] = {}
        for i, storages in self.landings.items():
            for storage in map(self.find, storages):
                begins[storage] = min(begins.get(storage, i), i)
        if begins:  # a view is ordered with its base
            found = found | {(i, storage, False) for i in range(len(self.nodes)) for storage in self.held(i)}
        writes: dict[int, list[int]] = {}
        for i, storage, is_write in found:
            if begins.get(storage, i + 1) <= i:
                yield i, OUTSIDE, False
            if is_write:
                writes.setdefault(storage, []).append(i)
        waits = [i for i, p in self.special if p.ordered or p.opaque]
        for i, storages in self._leaving.items():
            for storage in map(self.find, storages):
                later = sorted(j for j in writes.get(storage, ()) if j > i)
                yield from ((j, OUTSIDE, False) for j in (i, *later) if later)
                if later and bisect_right(self.syncs, i) == bisect_left(self.syncs, later[0]):
                    self.races[i] = bisect_left(waits, later[0]) - bisect_right(waits, i)

    def _find_accesses(self) -> set[tuple[int, int, bool]]:
        found: set[tuple[int, int, bool]] = set()
        surely = {i: self._surely_written(i, p) for i, p in self.special if p.opaque or p.writes}
        for i, storages in self.landings.items():
            surely.setdefault(i, set()).update(storages)
            k = bisect_right(self.syncs, i)
            if k < len(self.syncs):  # the copy writes until that sync
                surely.setdefault(self.syncs[k], set()).update(storages)
        self._doubt({*(s for storages in surely.values() for s in storages), *(s for _, s in self._arrivals)})
        find = self.find
        writes = {i: set(map(find, storages)) for i, storages in surely.items()}
        followed = {s for storages in writes.values() for s in storages}
        followed |= {find(s) for flight in self.flights if self._is_exposed(flight.launch) for s in flight.writes}
        for flight in self.flights:
            launch, wait = flight.launch, flight.wait
            received = followed.intersection(map(find, flight.writes))
            found |= {(launch, s, True) for s in received}
            if wait is not None:
                found |= {(wait, s, True) for s in received}
                found |= {(wait, s, False) for s in followed.intersection(map(find, flight.reads))}
        for i, storages in writes.items():
            found |= {(i, s, True) for s in storages}
        arrivals = {(i, find(storage), True) for i, storage in self._arrivals}
        followed |= {storage for _, storage, _ in arrivals}
        found |= arrivals
        found.update(self._reads_of(followed, writes))
        found |= set(self._order_host_copies(found))
        found.update(self._order_outside())
        return found

    def _surely_written(self, i: int, p: Profile) -> set[int]:
        """The storages that node i writes."""
        node = self.nodes[i]
        if not p.opaque:
            return {s for held in self._held_by(self._written(node, p)) for s in held}
        given = map(self.root, _flat(self._given.get(node, ())))  # of a module that is called
        return {*given, *(s for held in self._held_by(touched(node)) for s in held)}

    def _doubt(self, written: set[int]) -> None:
        """Join unknown memory with all memory that it may overlap, if any of it is written."""
        if all(memory.is_known for memory in self._memories.values()):
            return
        for place in sorted({place for memory in self._memories.values() for place in memory.devices}) or [""]:
            near = [(n, m) for n, m in self._memories.items() if not m.devices or place in m.devices]
            held = dict.fromkeys(self.root(s) for n, _ in near for s in _flat(self._given[n]))
            if all(m.is_known for _, m in near) or written.isdisjoint(held):
                continue
            self._join_in_doubt(held)

    def _join_in_doubt(self, held: Iterable[int]) -> None:
        """Join storages (by `root`) for the ordering of accesses only."""
        joined = set(map(self.find, held))
        first = min(joined)
        again = [storage for storage, above in self._doubts.items() if above in joined]
        self._doubts.update((storage, first) for storage in (*held, *joined, *again) if storage != first)

    def _is_exposed(self, launch: int) -> bool:
        """Whether a node other than a wait takes the result. Its reads then need effect edges besides data edges."""
        return any(
            not ops.is_wait(user.target)
            for k in self._succs[launch]
            for user in (
                [self.nodes[j] for j in self._succs[k]] if self.nodes[k].target is getitem else [self.nodes[k]]
            )
        )

    def _reads_of(self, followed: set[int], writes: dict[int, set[int]]) -> Iterable[tuple[int, int, bool]]:
        if not followed:
            return
        views = {i for i, p in self.special if p.is_view or p.wait or (p.may_copy and shares_storage(self.nodes[i]))}
        for i, storage in enumerate(self.storages):
            if storage is None or (not isinstance(storage, tuple) and self.find(storage) not in followed):
                continue
            for s in followed.intersection(self.held(i)):
                for user in self._succs[i]:
                    taker = self.nodes[user]
                    reads = user not in views and ops.reads_data(taker.target)
                    if reads and s not in writes.get(user, ()) and self.nodes[i] in touched(taker):
                        yield user, s, False

    def _order_outside(self) -> Iterable[tuple[int, int, bool]]:
        workspaces: dict[str, int] = {}
        for i, p in self.special:
            if p.random or p.opaque:
                yield i, GENERATOR, True
            if p.ordered or p.opaque:
                yield i, OUTSIDE, True
            if p.opaque or p.launch or p.wait:
                yield i, COMMUNICATION, self.is_barrier(i, p)
            if p.launch and ops.uses_workspace(self.nodes[i].target):
                group = runtime_name(group_argument(self.nodes[i]))
                workspaces.setdefault(group, FIRST_WORKSPACE - len(workspaces))
                yield i, workspaces[group], True
            for launch in (self.nodes[self.flights[f].launch] for f in self._waits.get(i, [])) if p.wait else ():
                if ops.uses_workspace(launch.target):  # in use until the wait
                    yield i, workspaces[runtime_name(group_argument(launch))], True

    def is_barrier(self, i: int, p: Profile) -> bool:
        """Whether the node is a barrier for all communication."""
        if p.wait:
            kinds = [ops.kind_of(self.nodes[self.flights[f].launch].target) for f in self._waits.get(i, [])]
        elif ops.is_fused(self.nodes[i].target):
            return False
        else:
            kinds = [ops.kind_of(self.nodes[i].target)] if p.launch else [ops.Kind.BARRIER]
        return any(kind is ops.Kind.BARRIER or kind in ops.POINT_TO_POINT for kind in kinds)


def _lie_apart(first: Node, second: Node) -> bool:
    """Whether two nodes hold tensors on different devices."""
    values = ops.value_of(first), ops.value_of(second)
    return all(isinstance(value, Tensor) for value in values) and values[0].device != values[1].device


def _may_be_tensor(node: Node) -> bool:
    return not isinstance(ops.value_of(node), int | float | SymInt | SymFloat | SymBool)


def _flat(storage: Storage) -> tuple[int, ...]:
    return storage if isinstance(storage, tuple) else (storage,)


def _flatten(arguments: Iterable[Any]) -> Iterable[Node]:
    for argument in arguments:
        if isinstance(argument, Node):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _flatten(argument)
