"""Process groups by names that every rank agrees on.

Run-time names differ by rank ('1' here, '2' there), so listings, plans and digests use canonical names: the axis of the
mesh where it is known, else g0, g1, ... by first use. A `GroupTable` maps between the two for one graph module.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule, Node

from weft.compat import group_ranks, resolve_group
from weft.errors import GraphError, compose
from weft.graph import ops
from weft.graph.ops import attribute

TABLE_KEY = "weft.groups"
"""Where a graph module carries its table, in `GraphModule.meta`."""


@dataclass(frozen=True)
class Group:
    """The process groups of one mesh axis: every rank belongs to one of them, all of one size."""

    name: str
    size: int
    stride: int = 1
    """Distance between neighbouring ranks of a group, in global ranks."""
    ranks: tuple[tuple[int, ...], ...] | None = None
    """All ranks partitioned; None where size and stride say it all."""

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

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups.values())

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
    table: GroupTable = carried if carried is not None else _from_launches(_with_nested(module))
    if not given:
        return table
    groups = dict(table.groups)
    for name, value in given.items():
        size = value if isinstance(value, int) else len(value[0])
        ranks = None if isinstance(value, int) else tuple(tuple(int(r) for r in part) for part in value)
        groups[name] = Group(name, size, groups[name].stride if name in groups else 1, ranks)
    return GroupTable(groups, table.runtime)


def _with_nested(module: GraphModule) -> Iterator[Node]:
    """The nodes of a module; those of a nested graph come where it is named."""
    for node in module.graph.nodes:
        yield node
        nested = attribute(module, str(node.target)) if node.op == "get_attr" else None
        if isinstance(nested, GraphModule):
            yield from _with_nested(nested)


def _from_launches(nodes: Iterable[Node]) -> GroupTable:
    """Groups by first use, each as its live process group, its mesh axis or its launches describe it."""
    uses: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op == "call_function" and ops.is_communication(node.target):
            argument = group_argument(node)
            if argument is not None:
                uses.setdefault(runtime_name(argument), []).append(node)
    groups: dict[str, Group] = {}
    runtime: dict[str, str] = {}
    for key, launches in uses.items():
        number = f"g{len(groups)}"
        group = _describe(key, launches, number)
        if group.name in groups:  # two groups of one axis name: keep both, told apart by number
            group = replace(group, name=number)
        groups[group.name] = group
        runtime[group.name] = key
    return GroupTable(groups, runtime)


def _describe(key: str, launches: Sequence[Node], number: str) -> Group:
    live = resolve_group(key)
    if live is None:
        sizes = (ops.bind(node).get("group_size") for node in launches)
        size = next((size for size in sizes if isinstance(size, int)), 0)
        return Group(key if key.isidentifier() else number, size)
    ranks = tuple(group_ranks(live))
    axis = live.group_desc.removeprefix("mesh_") if live.group_desc.startswith("mesh_") else ""
    name = axis if axis.isidentifier() else number
    num_ranks = dist.get_world_size()
    regular = Group(name, len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
    if num_ranks % (regular.size * regular.stride) == 0 and ranks in regular.partition(num_ranks):
        return regular
    return Group(name, len(ranks), 1, (ranks, *((rank,) for rank in range(num_ranks) if rank not in ranks)))
