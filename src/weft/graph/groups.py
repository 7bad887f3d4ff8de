"""Process groups by names that every rank agrees on.

Run-time names differ by rank ('1' here, '2' there), so listings, plans and digests use canonical names: the axis of the
mesh where it is known, else g0, g1, ... A `GroupTable` maps between the two for one graph module.

Contract: two groups are the same exactly if they have the same ranks and the same `identity`. Names are given in the
order of ranks and identity, never in the order in which a graph uses groups: that order may differ between ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule, Node

from weft.compat import group_ranks, live_groups, resolve_group
from weft.errors import GraphError, compose
from weft.graph import ops
from weft.graph.ops import attribute

TABLE_KEY = "weft.groups"
"""Where a graph module carries its table, in `GraphModule.meta`."""
MADE_UP = re.compile(r"g\d+")
"""Canonical names that say nothing of a group."""
GroupKey = tuple[int, int, tuple[tuple[int, ...], ...] | None, str]
"""Size, stride, ranks and identity."""


@dataclass(frozen=True)
class Group:
    """The process groups of one mesh axis: every rank belongs to one of them, all of one size."""

    name: str
    size: int
    stride: int = 1
    """Distance between neighbouring ranks of a group, in global ranks."""
    ranks: tuple[tuple[int, ...], ...] | None = None
    """All ranks partitioned; None where size and stride say it all."""
    id: str | None = None
    """Tells it from other groups of the same ranks. None: the name does, unless it is one of g0, g1, ..."""

    @property
    def identity(self) -> str:
        """Tells it from other groups of the same ranks, alike on all of them: the mesh axis, the how-manieth it is."""
        if self.id is not None:
            return self.id
        return "" if MADE_UP.fullmatch(self.name) else self.name

    def called(self, name: str, identity: str) -> Group:
        """This group under a name, with what tells it from others of its ranks."""
        plain = replace(self, name=name, id=None)
        return plain if plain.identity == identity else replace(plain, id=identity)

    @property
    def key(self) -> GroupKey:
        """Equal exactly for the same group, whatever it is called."""
        return self.size, self.stride, self.ranks, self.identity

    @property
    def span(self) -> int:
        """How many ranks one tile of the groups covers."""
        return sum(map(len, self.ranks)) if self.ranks is not None else max(self.size * self.stride, 1)

    def partition(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """The groups that the ranks of a world form, in order of their first rank."""
        if self.ranks is not None:
            return self.ranks
        block = self.size * self.stride
        if block == 0 or num_ranks % block:
            raise GraphError(
                compose(
                    f"group {self.name!r}",
                    f"groups of {self.size} ranks with stride {self.stride} do not tile {num_ranks} ranks",
                    do=f"use a multiple of {block} ranks, or give the ranks of the group" if block else "give its size",
                )
            )
        return tuple(
            tuple(base + offset + i * self.stride for i in range(self.size))
            for base in range(0, num_ranks, block)
            for offset in range(self.stride)
        )


@dataclass(frozen=True)
class GroupTable:
    """The groups of a graph module by canonical name, and the run-time name of each on this rank."""

    groups: Mapping[str, Group] = field(default_factory=dict[str, Group])
    runtime: Mapping[str, str] = field(default_factory=dict[str, str])
    """Canonical name to run-time name; a group that is missing here is called by its canonical name."""
    unplaced: frozenset[str] = frozenset()
    """Groups of which only the run-time name and perhaps the size is known. Which ranks they have, other ranks tell:
    those that use the same name."""

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups.values())

    @property
    def alike(self) -> tuple[str, str] | None:
        """Two groups that nothing but their made-up names tells apart, or None."""
        seen: dict[GroupKey, str] = {}
        for group in self:
            if seen.setdefault(group.key, group.name) != group.name:
                return seen[group.key], group.name
        return None

    def canonical(self, argument: Any) -> str:
        """The canonical name of a group argument: a str, a ProcessGroup or a node that holds one."""
        key = runtime_name(argument)
        return next((name for name, runtime in self.runtime.items() if runtime == key), key)

    def group(self, argument: Any) -> Group:
        """The group of a group argument."""
        name = self.canonical(argument)
        if name not in self.groups:
            raise GraphError(
                compose("groups", f"group {name!r} is not in the table", do="give it: groups={" + repr(name) + ": 8}")
            )
        return self.groups[name]


@functools.cache
def are_axes_of_one_mesh(first: Group, second: Group) -> bool:
    """Whether two groups are different axes of one mesh, for all ranks of their world.

    Ranks of one group of the first then hold the same place in their groups of the second, and a rank reaches the same
    ranks over both axes whichever comes first.
    """
    if min(first.size, second.size) < 2:
        return False
    num_ranks = math.lcm(first.span, second.span)
    try:
        parts = [group.partition(num_ranks) for group in (first, second)]
    except GraphError:
        return False
    if any(len(ranks) != group.size for group, part in zip((first, second), parts, strict=True) for ranks in part):
        return False
    rows, columns = ({rank: ranks for ranks in part for rank in ranks} for part in parts)
    return rows.keys() == columns.keys() and all(
        all(columns[other].index(other) == columns[rank].index(rank) for other in rows[rank])
        and {r for other in rows[rank] for r in columns[other]} == {r for other in columns[rank] for r in rows[other]}
        for rank in rows
    )


def runtime_name(argument: Any) -> str:
    """The run-time name in a group argument."""
    if isinstance(argument, str):
        return argument
    if isinstance(argument, Node):
        value = ops.value_of(argument)
        if value is None and argument.op == "get_attr":
            value = attribute(argument.graph.owning_module, str(argument.target))
        return runtime_name(value)
    name = getattr(argument, "group_name", None)
    if name is None:
        real = getattr(argument, "real_obj", None)  # an opaque process group travels wrapped while it is traced
        name = getattr(real, "group_name", None)
    if isinstance(name, str):
        return name
    raise GraphError(compose("groups", f"{type(argument).__name__} is no process group", do="pass a name or a group"))


def group_argument(node: Node) -> Any:
    """The group argument of a launch, or None where the operator has none."""
    bound = ops.bind(node)
    return next((bound[name] for name in ops.GROUP_ARGUMENTS if name in bound), None)


def read_groups(module: GraphModule, given: Mapping[str, int | Sequence[Sequence[int]]] | None = None) -> GroupTable:
    """The table of a module: the one it carries, else one from live groups and launches; then what is `given`."""
    carried = module.meta.get(TABLE_KEY)
    table: GroupTable = carried if carried is not None else _from_launches(with_nested(module))
    if not given:
        return table
    groups = dict(table.groups)
    for name, value in given.items():
        known = groups.get(name, Group(name, 0))
        if isinstance(value, int):
            groups[name] = replace(known, size=value, ranks=None)
        else:
            ranks = tuple(tuple(int(r) for r in part) for part in value)
            groups[name] = replace(known, size=len(value[0]), ranks=ranks)
    placed = {name for name, value in given.items() if not isinstance(value, int)}
    return GroupTable(groups, table.runtime, table.unplaced - placed)


def with_nested(module: GraphModule) -> Iterator[Node]:
    """The nodes of a module; those of a nested graph come where it is named."""
    for node in module.graph.nodes:
        yield node
        nested = attribute(module, str(node.target)) if node.op == "get_attr" else None
        if isinstance(nested, GraphModule):
            yield from with_nested(nested)


def _from_launches(nodes: Iterable[Node]) -> GroupTable:
    """The groups of launches, each as its live process group, its mesh axis or its launches describe it."""
    uses: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op == "call_function" and ops.is_communication(node.target):
            argument = group_argument(node)
            if argument is not None:
                uses.setdefault(runtime_name(argument), []).append(node)
    found = {key: _describe(key, launches) for key, launches in uses.items()}
    return table_of(found, (key for key in found if resolve_group(key) is None and not key.isidentifier()))


def table_of(found: Mapping[str, Group], unplaced: Iterable[str] = ()) -> GroupTable:
    """The table of groups by run-time name. A group keeps its name where it has one that no group before it has.

    Groups that nothing else tells apart are told apart by their run-time names.
    """
    ordered = sorted(found.items(), key=lambda item: (*_order_of(item[1]), *_natural(item[0])))
    alike = Counter(group.key for group in found.values())
    groups: dict[str, Group] = {}
    runtime: dict[str, str] = {}
    for key, group in ordered:
        identity = group.identity if alike[group.key] == 1 else key
        numbers = (f"g{number}" for number in itertools.count(len(groups)))
        wanted = group.name if group.name not in ("", *groups) else next(n for n in numbers if n not in groups)
        groups[wanted] = group.called(wanted, identity)
        runtime[wanted] = key
    without = set(unplaced)
    return GroupTable(groups, runtime, frozenset(name for name, key in runtime.items() if key in without))


def _order_of(group: Group) -> tuple[Any, ...]:
    """Large groups first, of one size the outer axis of a mesh; then by ranks and identity."""
    return -group.size, -group.stride, group.ranks or (), group.identity


def _natural(key: str) -> tuple[Any, ...]:
    """Run-time names in the order in which torch counts them."""
    return (0, int(key), "") if key.isdecimal() and key.isascii() else (1, 0, key)


def _describe(key: str, launches: Sequence[Node]) -> Group:
    """A group by what is known of it; without a name where no axis gives it one."""
    live = resolve_group(key)
    if live is None:
        sizes = (ops.bind(node).get("group_size") for node in launches)
        size = next((size for size in sizes if isinstance(size, int)), 0)
        return Group(key, size) if key.isidentifier() else Group("", size)
    ranks = tuple(group_ranks(live))
    axis = _axis_of(live)
    # Every rank of a group creates the groups of these ranks in the same order.
    before = itertools.takewhile(lambda other: other.group_name != key, live_groups())
    number = sum(
        _axis_of(other) == axis and other.size() == len(ranks) and tuple(group_ranks(other)) == ranks
        for other in before
    )
    identity = f"{axis}#{number}" if number else axis
    num_ranks = dist.get_world_size()
    regular = Group(axis, len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1, id=identity)
    if num_ranks % (regular.size * regular.stride) == 0 and ranks in regular.partition(num_ranks):
        return regular
    parts = (ranks, *((rank,) for rank in range(num_ranks) if rank not in ranks))
    return replace(regular, stride=1, ranks=parts)


def _axis_of(group: dist.ProcessGroup) -> str:
    """The mesh axis of a live group; empty where it is of none."""
    axis = group.group_desc.removeprefix("mesh_") if group.group_desc.startswith("mesh_") else ""
    return axis if axis.isidentifier() else ""
