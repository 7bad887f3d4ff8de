"""Process groups by names that every rank agrees on.

Run-time names may differ between ranks, so listings, plans and digests use canonical names: the axis of the mesh if it
is known, otherwise g0, g1, ... A `GroupTable` maps between the two for one graph module.

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
"""The key of the table in `GraphModule.meta`."""
MADE_UP = re.compile(r"g\d+")
"""Canonical names that carry no information about a group."""
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
    """The partition of all ranks; None if size and stride determine it."""
    id: str | None = None
    """Distinguishes groups of the same ranks. If None, the name does, unless it is one of g0, g1, ..."""

    @property
    def identity(self) -> str:
        """Distinguishes groups of the same ranks, identically on all ranks: by mesh axis and creation index."""
        if self.id is not None:
            return self.id
        return "" if MADE_UP.fullmatch(self.name) else self.name

    def called(self, name: str, identity: str) -> Group:
        """This group under another name, with the same identity."""
        plain = replace(self, name=name, id=None)
        return plain if plain.identity == identity else replace(plain, id=identity)

    @property
    def key(self) -> GroupKey:
        """Equal exactly for the same group, whatever its name."""
        return self.size, self.stride, self.ranks, self.identity

    @property
    def span(self) -> int:
        """The number of consecutive ranks that one tile of the groups covers."""
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
    """Run-time names by canonical name. For a group that is missing here both are the same."""
    unplaced: frozenset[str] = frozenset()
    """Groups known only by run-time name and perhaps size. Their ranks are those whose graphs use the same name."""

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups.values())

    @property
    def alike(self) -> tuple[str, str] | None:
        """Two groups that differ only in their generated names, or None."""
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
    """Whether two groups are different axes of one mesh.

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


@functools.cache
def are_all_axes_of(whole: Group, axes: tuple[Group, ...]) -> bool:
    """Whether groups are axes of one mesh, and each group of the mesh's ranks is one of `whole`."""
    if whole.size != math.prod(axis.size for axis in axes):
        return False
    if not all(are_axes_of_one_mesh(first, second) for first, second in itertools.combinations(axes, 2)):
        return False
    num_ranks = math.lcm(whole.span, *(axis.span for axis in axes))
    try:
        partitions = [group.partition(num_ranks) for group in (whole, *axes)]
    except GraphError:
        return False
    wanted, *others = ({rank: ranks for ranks in partition for rank in ranks} for partition in partitions)
    for rank in wanted:
        reached = {rank}
        for mates in others:
            reached = {mate for each in reached for mate in mates.get(each, ())}
        if reached != set(wanted[rank]):
            return False
    return True


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
        real = getattr(argument, "real_obj", None)  # tracing wraps an opaque process group
        name = getattr(real, "group_name", None)
    if isinstance(name, str):
        return name
    what = f"{type(argument).__name__} is not a process group"
    raise GraphError(compose("groups", what, do="pass a name or a group"))


def group_argument(node: Node) -> Any:
    """The group argument of a launch, or None where the operator has none."""
    bound = ops.bind(node)
    return next((bound[name] for name in ops.GROUP_ARGUMENTS if name in bound), None)


def read_groups(module: GraphModule, given: Mapping[str, int | Sequence[Sequence[int]]] | None = None) -> GroupTable:
    """The table of a module: its own, or one built from live groups and launches; groups in `given` take precedence."""
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
    """The nodes of a module, with those of each nested graph at the node that names it."""
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
    """The table of groups by run-time name. A group keeps its name unless an earlier group has the same one.

    Groups that are otherwise indistinguishable are distinguished by their run-time names.
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
    """Sort key: large groups first, then outer mesh axes, then ranks and identity."""
    return -group.size, -group.stride, group.ranks or (), group.identity


def _natural(key: str) -> tuple[Any, ...]:
    """Sort key for run-time names: the order in which torch numbers them."""
    return (0, int(key), "") if key.isdecimal() and key.isascii() else (1, 0, key)


def _describe(key: str, launches: Sequence[Node]) -> Group:
    """A group from what is known about it; unnamed unless a mesh axis names it."""
    live = resolve_group(key)
    if live is None:
        sizes = (ops.bind(node).get("group_size") for node in launches)
        size = next((size for size in sizes if isinstance(size, int)), 0)
        return Group(key, size) if key.isidentifier() else Group("", size)
    ranks = tuple(group_ranks(live))
    axis = _axis_of(live)
    # All ranks create the groups of the same ranks in the same order, so the index agrees.
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
    """The mesh axis of a live group; empty if it has none."""
    axis = group.group_desc.removeprefix("mesh_") if group.group_desc.startswith("mesh_") else ""
    return axis if axis.isidentifier() else ""
