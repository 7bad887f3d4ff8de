"""Run a graph on symbolic values, node by node in program order.

Contract: a call of unknown meaning becomes an atom. It is named by the operator, its constant arguments, the numbers of
the values it takes, and their strides (a kernel may add in memory order). The n-th draw from a generator is also named
by n. Sizes, dtypes, devices and strides come from metadata; nothing is computed with data.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from weft.compat import OpOverload
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.effects import Flight
from weft.graph.groups import GroupTable, group_argument
from weft.graph.host import transfer_of
from weft.graph.operator_effects import PLAIN, Profile, draws, is_alias
from weft.verification.symbolic import collectives
from weft.verification.symbolic.arguments import SymbolicArguments, Token, containers, leaves, name_of
from weft.verification.symbolic.index_maps import Call, fetched, offloaded, read_by_host
from weft.verification.symbolic.laws import laws_of
from weft.verification.symbolic.storage import (
    BEYOND_THE_TENSOR,
    Lost,
    StorageView,
    Tangle,
    find_arrivals,
    find_tangles,
    without,
)
from weft.verification.symbolic.tensors import Size, Terms, Undecided, Value


@dataclass(frozen=True)
class Setting:
    """The table that both runs share, and the keys of the groups and constants of one module."""

    terms: Terms
    side: int
    groups: Mapping[str, Hashable]
    """The key of each group, by canonical name."""
    constants: Mapping[str, Hashable]
    """The key of each attribute of the module, by path."""
    reassociates: bool


class SymbolicRun(SymbolicArguments):
    """One graph, run once. The results are in `outputs`, `inputs`, `events` and `draws`."""

    def __init__(self, module: GraphModule, dag: Dag, table: GroupTable, setting: Setting) -> None:
        super().__init__(setting.terms, ignores_strides=setting.reassociates)
        self.module, self.dag, self.table, self.setting = module, dag, table, setting
        self.effects = dag.effects
        self.outputs: Any = None
        self.containers: Hashable = None
        """The nesting of containers in the output."""
        self.in_flight: list[bool] = []
        """For each tensor of the output, in order, whether it leaves the graph before its wait."""
        self.inputs: dict[Hashable, Any] = {}
        """The contents of inputs and constants; after the run, their final contents."""
        self.written: dict[Hashable, int | None] = {}
        """The written inputs and constants, with the storage of those that are tangled."""
        self.events: list[int] = []
        self.draws: list[Hashable] = []
        self._profiles = dict(self.effects.special)
        inputs = [node for node in dag.nodes if node.op == "placeholder"]
        constants = [node for node in dag.nodes if node.op == "get_attr"]
        self._keys: dict[Node, tuple[str, Hashable]] = {node: ("input", k) for k, node in enumerate(inputs)}
        self._keys.update((node, ("constant", setting.constants[str(node.target)])) for node in constants)
        self._bases: dict[int, tuple[int, Hashable]] = {}
        self._copies: dict[tuple[int, int], int] = {}
        """The number of tangled tensors of a storage that were made in the same way, minus one."""
        self._fences = frozenset(self.effects.fences)
        self._mode: int | None = None
        """The last call that may have changed a mode or a stream; it may change the meaning of later operators."""
        self._syncs = frozenset(self.effects.syncs)
        self._on_the_way: list[tuple[StorageView | Tangle, Value, Value]] = []
        """Copies to the host that may be incomplete: the destination, its final value, and its current value."""
        self._arrivals = find_arrivals(dag)
        self.followed = self.effects.memory.written | {s for found in self._arrivals.values() for s in found}
        self.tangled = find_tangles(dag, self.followed)
        self._flights: dict[int, list[Flight]] = {}
        for flight in self.effects.flights:
            for storage in sorted(set(map(self.effects.find, (*flight.reads, *flight.writes)))):
                self._flights.setdefault(storage, []).append(flight)
        self.races: dict[Hashable, str] = {}
        """Accesses to memory that a launch may have in flight, each with a sentence that describes it."""
        self._racing: dict[int, list[int]] = {}
        for flight, i in self.effects.doubtful_accesses_in_flight():
            self._racing.setdefault(i, []).append(flight.launch)
        self._launched: dict[int, Hashable] = {
            launch: None for launches in self._racing.values() for launch in launches
        }

    def tangled_keys(self) -> set[Hashable]:
        """The inputs and constants that lie in tangled storages."""
        return {key for node, key in self._keys.items() if self.tangled.intersection(self._storages(node))}

    def run(self, shared: Set[Hashable]) -> None:
        """Run every node. Inputs and constants in `shared` are tangled on one side, so both sides treat them so."""
        self.terms.side = self.setting.side
        held = {s for node, key in self._keys.items() if key in shared for s in self._storages(node)}
        self.tangled |= held & self.followed
        for i, node in enumerate(self.dag.nodes):
            self.terms.node = node.name
            if node.op == "placeholder" or node.op == "get_attr":
                self._take_input(i, node)
            elif node.op == "output":
                self._finish(node)
            else:
                if i in self._syncs:
                    self._land()
                self.held[node] = self._call(i, node, self._profiles.get(i, PLAIN))
                if i in self.effects.landings or i in self.effects.races:
                    self._take_off(i, node)
                if self._racing:
                    self._note_races(i, node)

    def _note_races(self, i: int, node: Node) -> None:
        if i in self._launched:
            self._launched[i] = self._numbers(node)
        for launch in self._racing.get(i, ()):
            sentence = f"{node.name} may touch memory that {self.dag.nodes[launch].name} has in flight"
            self.races[self._launched[launch], self._numbers(node)] = sentence

    def _numbers(self, node: Node) -> Hashable:
        found = [self.read(leaf) for leaf in leaves(self.held[node])]
        return node.op, name_of(node.target), *(self.terms.number(v) for v in found if isinstance(v, Value))

    def _storages(self, node: Node) -> tuple[int, ...]:
        return self.effects.held(self.dag.index[node])

    # Inputs and outputs.

    def _take_input(self, i: int, node: Node) -> None:
        value = ops.value_of(node)
        key = self._keys[node]
        if node.op == "placeholder":
            self.learn(value)
        else:
            value = value if value is not None else ops.attribute(self.module, str(node.target))
        atom = self.terms.atom((key, self.layout(node)), None, None)
        self.held[node] = self._own(i, self.result(value, atom))
        self.inputs[key] = self.held[node]
        for leaf in leaves(self.held[node]):
            if isinstance(leaf, StorageView | Tangle):
                self.written[key] = leaf.storage if isinstance(leaf, Tangle) else None

    def _finish(self, node: Node) -> None:
        flying = {s for flight in self.effects.flights if flight.wait is None for s in flight.writes}

        def leaf(source: Node) -> Node:
            self.in_flight.append(bool(flying.intersection(self.effects.surely_held(self.dag.index[source]))))
            return source

        map_arg(node.args, leaf)
        self.outputs = self.resolve(node.args[0])
        self.containers = containers(node.args[0])
        self.inputs = {key: self.read(held) for key, held in self.inputs.items()}

    # Calls.

    def _call(self, i: int, node: Node, profile: Profile) -> Any:
        if profile.opaque:
            return self._call_unknown(i, node)
        if profile.ordered or (profile.launch and not _is_followed(node)):
            self.events.append(self._name_call(node, self._order()))
        if profile.writes:
            return self._write(i, node, profile)
        if is_alias(node):
            return self._view(i, node)
        return self._own(i, self._compute(node, profile))

    def _order(self) -> Hashable:
        """Distinguishes a call with external effects from the same call at another time."""
        return "order", len(self.events)

    def _compute(self, node: Node, profile: Profile) -> Any:
        """The result of a call that writes nothing and returns no views."""
        if profile.launch:
            return self._communicate(node) if _is_followed(node) else self._unknown(node, self._order())
        if profile.random and draws(node):
            return self._draw(node)
        if self._mode is not None:
            return self._unknown(node, ("under", self._mode, self._names(node)))
        if isinstance(node.target, OpOverload):
            try:
                if profile.host_copy:
                    return self._copied_over_host_link(node)
                if node.target is ops.READ_NUMBER:
                    return self._read_number(node)
                found = self._follow(node, node.target)
                if found is not None:
                    return found
            except Undecided:
                pass
        return self._unknown(node, ("shares", self._names(node)) if profile.joins or profile.may_share else ())

    def _follow(self, node: Node, target: OpOverload) -> Any:
        """The result of an operator by its laws; None if no law applies."""
        laws = laws_of(target, real=self.setting.reassociates)
        if not laws:
            return None
        call = self.call(node)
        for law in laws:
            found = law.follow(call, target)
            if found is not None:
                return found[0] if isinstance(ops.value_of(node), Tensor) else found
        return None

    def _copied_over_host_link(self, node: Node) -> Value:
        """A copy to or from host memory: both together give the original value."""
        call, source = self.call(node), ops.value_of(next(iter(node.all_input_nodes)))
        if ops.host_copy(node.target) is ops.HostCopy.FROM_HOST:
            return fetched(self.terms, call.source, call.device)
        return offloaded(self.terms, call.source, str(source.device))

    def _read_number(self, node: Node) -> Any:
        """A number that the host reads: the same from a copy in host memory as from the device."""
        (source,) = node.all_input_nodes
        value = self.read(self.held[source])
        if not isinstance(value, Value):
            raise Undecided
        number = self.terms.number(read_by_host(self.terms, value))
        return self.result(
            ops.value_of(node), self.terms.atom(("call", name_of(node.target)), None, None, values=(number,))
        )

    def _draw(self, node: Node) -> Any:
        # A draw fills memory in memory order, so the result depends on its strides.
        atom = self._name_call(node, ("draw", len(self.draws), self.layout(node), _kind_of_draw(node)))
        self.draws.append(atom)
        return self.result(ops.value_of(node), atom)

    def _unknown(self, node: Node, extra: Hashable) -> Any:
        atom = self._name_call(node, extra)
        return self.result(ops.value_of(node), atom)

    def _name_call(self, node: Node, extra: Hashable) -> int:
        """The atom that represents a call."""
        numbers: list[int] = []
        frozen: Hashable = self.freeze((node.args, dict(sorted(node.kwargs.items()))), numbers)
        if not isinstance(node.target, OpOverload):  # operators treat lists and tuples alike, Python functions may not
            frozen = frozen, containers((node.args, dict(sorted(node.kwargs.items()))))
        extra = (extra, nested) if (nested := self._inside(node)) else extra
        target: Hashable = name_of(node.target)
        if not isinstance(node.target, OpOverload):  # two closures may share a name
            target = target, id(node.target)
        if node.op != "call_function":  # the code of a module is known only by its identity
            target = node.op, str(node.target), id(ops.attribute(self.module, str(node.target)))
        return self.terms.atom(("call", target, frozen, extra, self._met(node)), None, None, values=tuple(numbers))

    def _met(self, node: Node) -> Hashable:
        """The key of the group in which a call meets other ranks; the name alone may mean another group elsewhere."""
        is_launch = node.op == "call_function" and ops.is_communication(node.target)
        argument = group_argument(node) if is_launch else None
        name = None if argument is None else self.table.canonical(argument)
        return None if name is None else self.setting.groups.get(name, name)

    def _inside(self, node: Node) -> tuple[int, ...]:
        """The histories of the tangled storages that a call reaches through modules and nested graphs."""
        modules = [n for n in node.all_input_nodes if n.op == "get_attr" and isinstance(self.held[n], Token)]
        modules += [node] if node.op == "call_module" else []
        found = [s for module in modules for s in self._storages(module) if s in self.tangled]
        return tuple(map(self.contents.history, found))

    def _call_unknown(self, i: int, node: Node) -> Any:
        """A call that may write its arguments, draw random numbers, and have external effects."""
        order = ("order", len(self.events), len(self.draws), self._names(node), self._flying(i, node))
        atom = self._name_call(node, order)
        self.events.append(atom)
        self.draws.append(atom)
        for storage in self.tangled.intersection(self._storages(node)):
            self.contents.happened(storage, atom)
        self._land(atom)
        self._mode = atom if i in self._fences else self._mode
        return self._own(i, self.result(ops.value_of(node), atom))

    def _names(self, node: Node) -> tuple[Hashable, ...]:
        """The tangled tensors that a call takes: writing one of them does not write another with equal contents."""
        found = [leaf for source in node.all_input_nodes for leaf in leaves(self.held[source])]
        return tuple(leaf.name if isinstance(leaf, Tangle) else -1 for leaf in found)

    def _flying(self, i: int, node: Node) -> tuple[Hashable, ...]:
        """Which arguments of a call are in flight: the contents that the call sees are uncertain."""
        find = self.effects.find
        return tuple(
            tuple(
                storage in map(find, flight.writes)
                for storage in self._storages(source)
                for flight in self._open(storage, i)
            )
            for source in node.all_input_nodes
        )

    def _open(self, storage: int, i: int) -> list[Flight]:
        """The launches that have a storage in flight at a node."""
        flights = self._flights.get(storage, ())
        return [flight for flight in flights if flight.launch < i and (flight.wait is None or i < flight.wait)]

    # Views and writes.

    def _view(self, i: int, node: Node) -> Any:
        if node.target is getitem:
            source: Any = self.places(node.args[0])
            position: Any = node.args[1]
            known = isinstance(source, list) and type(position) is int
            return source[position] if known else self._own(i, self._unknown(node, ()))
        if ops.is_wait(node.target):
            return self._wait(i, node)
        bound = ops.bind(node)
        name = next(iter(self._profiles[i].aliases))
        source = self.held[bound[name]] if isinstance(bound[name], Node) else None
        if name_of(node.target) in BEYOND_THE_TENSOR:
            return self._own(i, self._unknown(node, ("storage", self._storage_of(node), self._names(node))))
        if not isinstance(source, StorageView | Tangle):
            return self._own(i, self._compute(node, PLAIN))
        several = isinstance(ops.value_of(node), list | tuple)
        arguments = self.call(node)

        def view(value: Value) -> Sequence[Value]:
            return self._viewed(node, arguments, name, value)

        contents = self.contents
        places = contents.tangled_views(source, view) if isinstance(source, Tangle) else contents.views(source, view)
        return places if several else places[0]

    def _viewed(self, node: Node, call: Call, name: str, value: Value) -> Sequence[Value]:
        """A view of the current contents of a storage."""
        target: Any = node.target
        changed = replace(call, arguments={**call.arguments, name: value})
        for law in laws_of(target, real=False) if isinstance(target, OpOverload) else ():
            try:
                found = law.follow(changed, target)
            except Undecided:
                break
            if found is not None:
                return found
        others: list[int] = [self.terms.number(value)]
        frozen = self.freeze([(k, v) for k, v in ops.bind(node).items() if k != name], others)
        label = ("call", name_of(node.target), frozen, "view")
        return [
            self.terms.whole((label, k), shape, dtype, tuple(others)) for k, (shape, dtype) in enumerate(call.results)
        ]

    def _wait(self, i: int, node: Node) -> Any:
        held = [self.held[source] for source in node.all_input_nodes]
        for storage in self._arrivals.get(i, ()):
            if storage in self.tangled:
                self.contents.happened(storage, "wait")
                continue
            base = next(
                leaf for h in held for leaf in leaves(h) if isinstance(leaf, StorageView) and leaf.storage == storage
            )
            while base.parent is not None:
                base = base.parent
            value = self.contents.read(base)
            number = self.terms.number(value)
            self.contents.write(base, self.terms.whole("arrived", value.shape, value.dtype, (number,)))
        if isinstance(node.args[0], Node):
            return held[0]
        return [self.held[source] for source in node.args[0]]  # type: ignore[union-attr]

    # Copies between host and device.

    def _take_off(self, i: int, node: Node) -> None:
        """Mark the destination of a copy as unknown until the host waits for the device."""
        label = ("raced", self.effects.races[i]) if i in self.effects.races else "in flight"
        transfer = transfer_of(node)
        for leaf in [leaf for end in transfer.destinations for leaf in leaves(self.held[end])] if transfer else []:
            if isinstance(leaf, Tangle):
                self.contents.happened(leaf.storage, label)
            value = self.read(leaf)
            mark = self.terms.whole(label, value.shape, value.dtype, (self.terms.number(value),))
            if isinstance(leaf, StorageView):
                self.contents.write(leaf, mark)
            elif isinstance(leaf, Value):
                self.held[node] = mark
            if i in self.effects.landings and not isinstance(leaf, Value):
                self._on_the_way.append((leaf, value, mark))

    def _land(self, past: int | None = None) -> None:
        """The host waits for the device; at an unknown call (`past`) it only may wait."""
        still: list[tuple[StorageView | Tangle, Value, Value]] = []
        for leaf, value, mark in self._on_the_way:
            if isinstance(leaf, Tangle):
                self.contents.happened(leaf.storage, ("waited", past))
                landed = mark
            elif self.terms.number(self.contents.read(leaf)) != self.terms.number(mark):
                continue  # the destination was overwritten in between and keeps that value
            else:
                number = (self.terms.number(mark),)
                landed = value if past is None else self.terms.whole(("waited", past), value.shape, value.dtype, number)
                self.contents.write(leaf, landed)
            if past is not None:
                still.append((leaf, value, landed))
        self._on_the_way = still

    def _write(self, i: int, node: Node, profile: Profile) -> Any:
        bound = ops.bind(node)
        targets = [leaf for name in profile.writes for leaf in leaves(self.places(bound.get(name)))]
        sends = [op != "irecv" for op in bound.get("op_list", ())]  # a batch writes only the tensors that it receives
        targets = [leaf for leaf, is_sent in zip_longest(targets, sends) if not is_sent]
        extra: Hashable = self._order() if profile.launch and not _is_followed(node) else ()
        if self._mode is not None:
            extra = extra, "under", self._mode
        values = None if profile.random or self._mode is not None else self._written(node, bound, targets)
        if self._clashes(bound, targets, is_known=values is not None):
            extra, values = (extra, "overlap", self.setting.side, node.name), None
        if profile.random:
            extra = (extra, "draw", len(self.draws), self.layout(node), _kind_of_draw(node))
        atom = self._name_call(node, (extra, self._names(node)))
        if profile.random:
            self.draws.append(atom)
        for k, target in enumerate(targets):
            if isinstance(target, Tangle):
                self.contents.happened(target.storage, (atom, k))
            elif isinstance(target, StorageView):
                shape, dtype = target.address.shape, target.address.dtype
                label = ("written", atom, k)
                self.contents.write(target, values[k] if values else self.terms.whole(label, shape, dtype))
            elif target is not None:
                raise Lost("it writes a tensor without metadata")
        if not profile.aliases:
            return self._own(i, self.result(ops.value_of(node), atom))
        shared = [self.places(bound.get(name)) for name in profile.aliases]
        if any(sends):
            new = self.result(ops.value_of(node), atom)
            return [made if is_sent else old for made, old, is_sent in zip(new, shared[0], sends, strict=True)]
        return shared[0] if len(shared) == 1 else shared

    def _clashes(self, bound: Mapping[str, Any], targets: Sequence[Any], *, is_known: bool) -> bool:
        """Whether a tensor that a call writes overlaps with another argument.

        A single known write may also read its target: `x += x` reads each element before writing it.
        """
        taken: dict[int, list[StorageView]] = {}
        for leaf in leaves(list(map(self.places, bound.values()))):
            if isinstance(leaf, StorageView):
                taken.setdefault(leaf.storage, []).append(leaf)
        written = [leaf for leaf in targets if isinstance(leaf, StorageView)]
        same_is_fine = is_known and len(targets) == 1
        return any(
            self.contents.overlap(leaf, other, same_is_fine=same_is_fine)
            for leaf in written
            for other in without(taken[leaf.storage], leaf)
        )

    def _written(self, node: Node, bound: Mapping[str, Any], targets: Sequence[Any]) -> Sequence[Value] | None:
        """The values that a known write stores in its targets, or None."""
        target: Any = node.target
        try:
            if _is_followed(node):
                found = self._communicate(node)
                return found if isinstance(found, list) else [found]
            if not target.name().startswith("aten::"):
                return None
            found = self._follow(node, target)
            return found if isinstance(found, list) or found is None else [found]
        except (Undecided, AttributeError):
            return None

    def _storage_of(self, node: Node) -> Hashable:
        """The storage of the tensor that a strided view takes, and the offset in it."""
        source = next(iter(node.all_input_nodes))
        value: Any = ops.value_of(source)
        bases = tuple(self._bases.get(s) for s in self._storages(source))
        return bases, str(value.storage_offset()) if isinstance(value, Tensor) else ""

    def _own(self, i: int, result: Any) -> Any:
        """The result of a node as the node holds it: a `StorageView` if its storage is written anywhere."""
        storages = self.effects.storages[i]
        if isinstance(storages, tuple) and isinstance(result, list) and len(storages) == len(result):
            return [self._placed(i, item, s) for item, s in zip(result, storages, strict=True)]
        if isinstance(storages, tuple) or storages is None:
            storages = next(iter(self.effects.held(i)), -1)
        return self._placed(i, result, storages)

    def _placed(self, i: int, leaf: Any, storage: int) -> Any:
        if isinstance(leaf, list):
            return [self._placed(i, item, storage) for item in leaf]
        if not isinstance(leaf, Value):
            return leaf
        storage = self.effects.find(storage)
        if storage not in self._bases:
            self._bases[storage] = (self.terms.number(leaf), self.layout(self.dag.nodes[i]))
        if storage in self.tangled:
            name = self.terms.number(leaf)
            copy = 0
            if not is_alias(self.dag.nodes[i]):  # equal new tensors stay distinct, since one may be written
                copy = self._copies[storage, name] = self._copies.get((storage, name), -1) + 1
            return self.contents.tangle(storage, leaf, copy)
        return self.contents.new(storage, leaf) if storage in self.followed else leaf

    # Communication.

    def _communicate(self, node: Node) -> Any:
        """The results of a collective of a known kind, whether waited for or not."""
        collective = Collective(node)
        name = self.table.canonical(collective.group_argument)
        group = self.setting.groups.get(name, name)
        size, known = ops.bind(node).get("group_size"), self.table.groups.get(name)
        if known is not None and known.size and size is not None and size != known.size:
            raise Lost(f"it has group_size {size}, but group {name!r} has {known.size} ranks")
        value, target = ops.value_of(node), node.target
        results = value if isinstance(value, list | tuple) else [value]
        sent = [self.read(self.held[source]) for source in collective.inputs]
        arguments = {**self.by_name(node), "group": group}
        try:
            found = [
                self._delivered(target, {**arguments, collectives.SENT: v}, self.type_of(result))
                for v, result in zip(sent, results, strict=True)
            ]
        except Undecided:
            return self._unknown(node, group)
        return found if collective.form.coalesced else found[0]

    def _delivered(
        self, target: Any, arguments: Mapping[str, Any], kind: tuple[tuple[Size, ...], torch.dtype]
    ) -> Value:
        """The tensor that a rank receives for one tensor that it sends."""
        call = Call(self.terms, arguments, [kind], same_device=True)
        for law in laws_of(target, real=self.setting.reassociates):
            found = law.follow(call, target)
            if found is not None:
                return found[0]
        raise Undecided


def _kind_of_draw(node: Node) -> str:
    """Type and device of a draw: they determine which generator advances, and by how much."""
    value = ops.value_of(node)
    return f"{value} {value.device}" if isinstance(value, Tensor) else str(value)


def _is_followed(node: Node) -> bool:
    """Whether a call is a collective that can be followed element by element."""
    form = ops.launch_form(node.target)
    return form is not None and form.kind not in ops.POINT_TO_POINT
