"""IssueOrder: the launches and waits of a graph, in order.

    ar0: all_reduce sum f32 16 in 'dp'
    s0: send to 1 with tag 0, f32 8, in 'pp'
    w0 completes ar0

Contract: an order does not mention its rank, so ranks with the same graph have equal orders. Orders are values that can
be compared, hashed, and sent as JSON to the place where all ranks are checked. A size without a hint is None and is
never compared. A launch without a wait is complete when the graph ends. Communication of an unknown kind is complete
when it returns.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from operator import getitem
from typing import Any, NamedTuple, Self

from torch import Tensor
from torch.fx import GraphModule, Node

from weft.compat import HigherOrderOperator, hint_of
from weft.errors import VerificationError, compose
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.groups import Group, GroupTable, group_argument, read_groups
from weft.graph.listings.text import parse
from weft.graph.listings.types import DTYPE_NAMES
from weft.graph.operator_effects import graph_arguments, is_alias
from weft.graph.ops import Kind, LaunchForm
from weft.verification.inlining import inlined_graph
from weft.verification.rank import show
from weft.verification.rendezvous import RESHARD

END = "the end of the graph"


class LaunchSignature(NamedTuple):
    """The properties of a launch that must be equal on every rank that takes part in it."""

    kind: str
    form: str = "plain"
    reduction: str | None = None
    source: int | None = None
    pair_of_dims: tuple[int, int] | None = None
    number_of_tensors: int = 1
    dtype: str = ""
    number_of_elements: tuple[int | None, ...] | None = None
    """Elements of each tensor; None for an all-to-all, whose members send by splits."""


LABELS = (
    "kind",
    "form",
    "reduction",
    "source",
    "pair of dims",
    "number of tensors",
    "dtype",
    "number of elements",
)
"""The names of the fields of a `LaunchSignature` in messages."""


class Splits(NamedTuple):
    """Numbers of elements that an all-to-all sends to each member, and expects from each; None if unknown."""

    sent: tuple[int | None, ...]
    expected: tuple[int | None, ...]

    @property
    def are_even(self) -> bool:
        """Whether all numbers are equal."""
        return len({*self.sent, *self.expected}) == 1


class IssuedTransfer(NamedTuple):
    """One end of a transfer between two ranks."""

    is_send: bool
    peer: int
    """The position of the other rank in the group."""
    tag: int
    dtype: str
    number_of_elements: int | None


class IssuedLaunch(NamedTuple):
    """The launch of a collective or of transfers."""

    node: str
    group: str
    signature: LaunchSignature
    splits: Splits | None = None
    transfers: tuple[IssuedTransfer, ...] = ()


class IssuedWait(NamedTuple):
    """Blocks its rank until parts of launches are complete."""

    node: str
    parts: tuple[tuple[int, int], ...]
    """Number of each launch in the order, and number of the transfer in the launch; 0 for a collective."""


IssueEvent = IssuedLaunch | IssuedWait


@dataclass(frozen=True)
class IssueOrder:
    """The launches and waits of one graph, or of several graphs that run one after the other."""

    events: tuple[IssueEvent, ...]
    groups: Mapping[str, Group] = field(default_factory=dict[str, Group])
    """The groups of the launches, by canonical name."""

    @functools.cached_property
    def launches(self) -> tuple[IssuedLaunch, ...]:
        """The launches in order."""
        return tuple(event for event in self.events if isinstance(event, IssuedLaunch))

    @functools.cached_property
    def sequences(self) -> dict[str, tuple[IssuedLaunch, ...]]:
        """The collectives of each group in order, without transfers."""
        found: dict[str, list[IssuedLaunch]] = {name: [] for name in self.groups}
        for launch in self.launches:
            if not launch.transfers:
                found[launch.group].append(launch)
        return {name: tuple(launches) for name, launches in found.items()}

    @functools.cached_property
    def digest(self) -> str:
        """A digest that is equal exactly for equal orders."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    def then(self, other: IssueOrder) -> IssueOrder:
        """This order followed by another one. Different groups with the same name get different names."""
        offset = len(self.launches)
        groups = dict(self.groups)
        names: dict[str, str] = {}
        for name, group in other.groups.items():
            same = (n for n, held in groups.items() if held.key == group.key and n not in names.values())
            free = (n for n in (name, *(f"{name}_{i}" for i in range(1, len(groups) + 1))) if n not in groups)
            names[name] = next(same, None) or next(free)
            groups[names[name]] = group.called(names[name], group.identity)
        moved = [
            IssuedWait(event.node, tuple((number + offset, part) for number, part in event.parts))
            if isinstance(event, IssuedWait)
            else event._replace(group=names[event.group])
            for event in other.events
        ]
        return IssueOrder((*self.events, *moved), groups)

    def to_json(self) -> str:
        """The order as JSON, the same text for the same order."""
        events = [["launch" if isinstance(event, IssuedLaunch) else "wait", *event] for event in self.events]
        return json.dumps({"groups": [asdict(group) for group in self.groups.values()], "events": events})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read an order from JSON; raises if the text is not one."""
        try:
            data = json.loads(text)
            groups = [Group(g["name"], g["size"], g["stride"], _tuples(g["ranks"]), g["id"]) for g in data["groups"]]
            return cls(tuple(_event(*event) for event in data["events"]), {group.name: group for group in groups})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            text = f"this is not an issue order: {type(error).__name__}: {error}"
            raise VerificationError(compose("agreement", text, do="publish it again")) from None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _event(kind: str, node: str, *rest: Any) -> IssueEvent:
    if kind == "wait":
        return IssuedWait(node, *map(_tuples, rest))
    group, signature, splits, transfers = map(_tuples, rest)
    parts = tuple(IssuedTransfer(*transfer) for transfer in transfers)
    return IssuedLaunch(node, group, LaunchSignature(*signature), None if splits is None else Splits(*splits), parts)


def read_order(graph: GraphModule | str | IssueOrder, groups: GroupTable | None = None) -> IssueOrder:
    """The order of a graph or a listing; an order is returned unchanged."""
    if isinstance(graph, IssueOrder):
        return graph
    module = parse(graph) if isinstance(graph, str) else graph
    return _OrderReader(module, groups if groups is not None else read_groups(module)).read()


class _OrderReader:
    """Walks over a graph once, and tracks the storages that launches fill."""

    def __init__(self, module: GraphModule, table: GroupTable) -> None:
        self.module, self.table = module, table
        self.events: list[IssueEvent] = []
        self.groups: dict[str, Group] = {}
        self.num_launches = 0
        self.storages: dict[Node, Any] = {}
        self.open: dict[Any, list[tuple[int, int]]] = {}

    def read(self) -> IssueOrder:
        for node in inlined_graph(self.module).nodes:
            target: Any = node.target if node.op == "call_function" else None
            if ops.is_wait(target):
                (waited, *_) = ops.bind(node).values()
                self._wait(node.name, self._storages(waited))
                self.storages[node] = self._storage(waited)
            elif ops.is_communication(target):
                self._launch(node)
            elif isinstance(target, HigherOrderOperator) or node.op == "call_module":
                self._look_inside(node)
            elif target is not None and is_alias(node):
                self.storages[node] = self._renamed(node)
        self._wait(END, list(self.open))
        return IssueOrder(tuple(self.events), self.groups)

    # Storages: a wait on a view of a result, or on the buffer that a launch fills, completes the launch.

    def _storage(self, node: Any) -> Any:
        if isinstance(node, list | tuple):
            return [self._storage(item) for item in node]  # type: ignore[misc]
        return self.storages.get(node, node)

    def _storages(self, node: Any) -> list[Any]:
        found = self._storage(node)
        return list(found) if isinstance(found, list) else [found]

    def _renamed(self, node: Node) -> Any:
        held = self._storage(node.args[0] if node.args else None)
        if node.target is getitem and isinstance(held, list):
            number = node.args[1]
            return held[number] if isinstance(number, int) and -len(held) <= number < len(held) else held
        return held

    def _wait(self, name: str, storages: Sequence[Any]) -> None:
        parts = [part for storage in storages for part in self.open.pop(storage, ())]
        if parts:
            self.events.append(IssuedWait(name, tuple(sorted(set(parts)))))

    # Launches.

    def _launch(self, node: Node) -> None:
        argument = group_argument(node)
        if argument is None:  # no group is named, as in reads and writes of symmetric memory
            return
        group = self.table.group(argument)
        self.groups[group.name] = group
        form = ops.launch_form(node.target)
        if form is None:
            self._add(IssuedLaunch(node.name, group.name, self._unknown(node)))
            self.events.append(IssuedWait(node.name, ((self.num_launches - 1, 0),)))
            return
        bound = ops.bind(node)
        inputs = Collective(node).inputs
        results: list[Any] = [(node, number) for number in range(len(inputs))]
        if form.written is not None:
            results = self._storages(bound[form.written])
        launch = IssuedLaunch(node.name, group.name, _signature(node, form, bound), _splits(form, bound))
        if form.kind in ops.POINT_TO_POINT:
            transfers = tuple(_transfers(form, bound, inputs))
            launch = launch._replace(transfers=transfers)
            results = [
                self._storage(source) if not transfer.is_send else (node, number)
                for number, (source, transfer) in enumerate(zip(inputs, transfers, strict=True))
            ]
        self._add(launch)
        for number, storage in enumerate(results):
            part = number if launch.transfers else 0
            self.open.setdefault(storage, []).append((self.num_launches - 1, part))
        self.storages[node] = results if form.coalesced else results[0]

    def _add(self, launch: IssuedLaunch) -> None:
        self.events.append(launch)
        self.num_launches += 1

    def _unknown(self, node: Node) -> LaunchSignature:
        """Communication without a launch form: known by its operator and its tensors."""
        bound: dict[str, Any] = ops.bind(node)
        tensors = [a for a in bound.values() if isinstance(a, Node) and isinstance(ops.value_of(a), Tensor)]
        target: Any = node.target
        is_reshard = target.name() == RESHARD
        return LaunchSignature(
            Kind.ALL_TO_ALL.value if is_reshard else str(ops.name_of(target)),
            pair_of_dims=(bound["gather_dim"], bound["shard_dim"]) if is_reshard else None,
            number_of_tensors=len(tensors),
            dtype=_dtypes(tensors),
            number_of_elements=tuple(map(_elements, tensors)),
        )

    def _look_inside(self, node: Node) -> None:
        """Raise if a nested graph communicates: whether and how often it runs is unknown."""
        graphs = graph_arguments(node)
        if node.op == "call_module":
            graphs = [held] if isinstance(held := ops.attribute(self.module, str(node.target)), GraphModule) else []
        for inner in (
            n for graph in graphs for m in graph.modules() if isinstance(m, GraphModule) for n in m.graph.nodes
        ):
            if inner.op == "call_function" and (ops.is_communication(inner.target) or ops.is_wait(inner.target)):
                what = f"{node.name} communicates inside a nested call, by {ops.name_of(inner.target)}"
                do = "inline the call into the graph"
                raise VerificationError(compose("agreement", what, where=show(node, self.table), do=do))


def _signature(node: Node, form: LaunchForm, bound: Mapping[str, Any]) -> LaunchSignature:
    collective = Collective(node)
    inputs = collective.inputs
    return LaunchSignature(
        form.kind.value,
        "coalesced" if form.coalesced else "plain",
        collective.reduce_op,
        bound.get("src") if form.kind is Kind.BROADCAST else None,
        None,
        len(inputs),
        _dtypes(inputs),
        None if form.kind is Kind.ALL_TO_ALL else tuple(map(_elements, inputs)),
    )


def _splits(form: LaunchForm, bound: Mapping[str, Any]) -> Splits | None:
    if form.kind is not Kind.ALL_TO_ALL:
        return None
    value = ops.value_of(bound[form.tensors])
    row = _product(value.shape[1:]) if isinstance(value, Tensor) else None
    sides = (bound["input_split_sizes"], bound["output_split_sizes"])
    return Splits(*(tuple(_times(_number(split), row) for split in side) for side in sides))


def _transfers(form: LaunchForm, bound: Mapping[str, Any], inputs: Sequence[Node]) -> Iterator[IssuedTransfer]:
    if form.kind is Kind.BATCH_P2P:
        sends = [name == "isend" for name in bound["op_list"]]
        peers, tags = bound["peer_list"], bound["tag_list"]
    else:
        sends, tags = [form.kind is Kind.SEND], [bound["tag"]]
        peers = [bound["dst" if sends[0] else "src"]]
    for is_send, peer, tag, source in zip(sends, peers, tags, inputs, strict=True):
        yield IssuedTransfer(is_send, peer, tag, _dtypes([source]), _elements(source))


def _dtypes(nodes: Sequence[Node]) -> str:
    values = [ops.value_of(node) for node in nodes]
    return ", ".join(DTYPE_NAMES.get(v.dtype, str(v.dtype)) if isinstance(v, Tensor) else "?" for v in values)


def _elements(node: Node) -> int | None:
    value = ops.value_of(node)
    return _product(value.shape) if isinstance(value, Tensor) else None


def _product(sizes: Sequence[Any]) -> int | None:
    hints = [hint_of(size) for size in sizes]
    return None if None in hints else prod(hint for hint in hints if hint is not None)


def _number(split: Any) -> int | None:
    return hint_of(ops.value_of(split) if isinstance(split, Node) else split)


def _times(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first * second
