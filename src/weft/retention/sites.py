"""Sites: the values of the early part of a graph that the late part needs, grouped by similarity.

Contract: the late part begins with the first node of backward, or without such marks at the place where the most bytes
wait for a later use. A site is a node of the early part that allocates memory; the views of its result, and the wait of
a collective, belong to it. Each site is either kept for the late part, or made again there. Some cannot be made again,
each with a reason. Similar sites, such as the same tensor of each layer, form one group. The analysis takes time linear
in the number of nodes.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import getitem
from typing import Any

from torch import Tensor
from torch.fx import Node

from weft.compat import input_nodes
from weft.cost.execution import is_backward
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.groups import GroupTable
from weft.graph.host import is_read_on_host, transfer_of
from weft.graph.operator_effects import is_alias, only_computes, profile_of
from weft.graph.value_numbers import ValueNumbers
from weft.simulation.program import OpKind, Program

LONG = 500
"""A value is worth a choice if it is held for at least this part of all compute without being used: 1/500."""
SMALL = 1000
"""Groups smaller than this part of all groups together, 1/1000, stay as they are."""
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class SiteGroup:
    """Similar sites, which are decided together."""

    name: str
    """Module path without layer numbers, and operator."""
    sites: tuple[int, ...]
    """In the order of the graph."""
    is_gathered: bool
    """Whether the value is a gathered weight or made of one."""
    repeated: frozenset[int]
    """The sites that the late part of the given graph makes again."""
    is_source: bool = False
    """Whether the given graph does not need the values in its late part, but values that are made again come from them.
    """


class Sites:
    """The sites of one Dag and their groups."""

    def __init__(self, dag: Dag, program: Program, groups: GroupTable, withheld: Mapping[str, str]) -> None:
        self.dag, self.program = dag, program
        self._withheld, self._groups = frozenset(withheld), groups
        effects = dag.effects
        self.num_bytes = [sum(size for _, size in made) for made in program.allocates]
        self.site_of: list[int] = []
        """For each node the site of its value; -1 for values that exist anyway or belong to several sites."""
        maker: dict[int, int] = {}
        for i, node in enumerate(dag.nodes):
            roots = effects.surely_held(i)
            for root in roots:
                maker.setdefault(root, i)
            makers = {maker[root] for root in roots}
            is_one = len(makers) == 1 and node.op == "call_function"
            found = makers.pop() if is_one else -1
            self.site_of.append(found if found >= 0 and dag.nodes[found].op == "call_function" else -1)
        self.cut = self._cut()
        self._in_flight = {f.launch for f in effects.flights if f.wait is None or f.wait >= self.cut}
        self.why_fixed: dict[int, str] = {}
        """The early sites that cannot be made again, each with the reason."""
        self._find_fixed()
        self.twin = self._twins()
        """For each late node that repeats an early one, the early one."""

    def is_free(self, site: int) -> bool:
        """Whether an early site can be made again."""
        return site >= 0 and site not in self.why_fixed

    def _cut(self) -> int:
        nodes = self.dag.nodes
        calls = ((i, node) for i, node in enumerate(nodes) if node.op == "call_function")
        first = next((i for i, node in calls if is_backward(node)), None)
        if first is not None:
            return first
        last: dict[int, int] = {}
        for i, node in enumerate(nodes):
            for source in input_nodes(node):
                last[self.site_of[self.dag.index[source]]] = i
        change = [0] * (len(nodes) + 1)
        for site, end in last.items():
            if site >= 0 and end > site + 1 and nodes[end].op != "output":
                change[site + 1] += self.num_bytes[site]
                change[end] -= self.num_bytes[site]
        most, at, now = 0, len(nodes), 0
        for i, difference in enumerate(change):
            now += difference
            if now > most:
                most, at = now, i
        return at

    def _find_fixed(self) -> None:
        effects = self.dag.effects
        written = effects.memory.written
        for i, node in enumerate(self.dag.nodes[: self.cut]):
            site = self.site_of[i]
            if site < 0 or site in self.why_fixed:
                continue
            held = {*effects.held(i), *effects.surely_held(i)}
            if not held.isdisjoint(written):
                self.why_fixed[site] = "it is written"
            elif not held.isdisjoint(effects.held_by_outputs):
                self.why_fixed[site] = "the graph returns it"
            elif (reason := self._why_not_again(node, is_maker=site == i)) is not None:
                self.why_fixed[site] = reason

    def _why_not_again(self, node: Node, is_maker: bool) -> str | None:
        """Why a node cannot run a second time; None if it can."""
        if ops.is_wait(node.target):
            return None
        if not is_maker:
            return None if is_alias(node) or node.target is getitem else "a call of unknown effect shares its memory"
        if only_computes(node):
            is_on_host = transfer_of(node) is not None or is_read_on_host(node)
            return "the host waits for it or copies it" if is_on_host else None
        form = ops.launch_form(node.target)
        if form is None:
            return "it draws random numbers" if profile_of(node).random else "its effects are not known"
        is_other = form.written is not None or form.kind in (*ops.POINT_TO_POINT, ops.Kind.BARRIER) or form.copied
        if is_other or form.coalesced:
            return "the collective does more than return one new tensor"
        if self.dag.index[node] in self._in_flight:
            return "its collective is still in flight at the end of forward"
        if self._groups.canonical(Collective(node).group) in self._withheld:
            return "other ranks hold other graphs"
        return None

    def _twins(self) -> dict[int, int]:
        numbers = ValueNumbers(self.dag, all_operators=True)
        known: dict[int, int] = {}
        found: dict[int, int] = {}
        for i, node in enumerate(self.dag.nodes):
            if node.op != "call_function" or self.site_of[i] < 0:
                continue
            number = numbers.of(node)
            if i < self.cut:
                if self.is_free(self.site_of[i]):
                    known.setdefault(number, i)
            elif number in known and self._is_replaceable(i):
                found[i] = known[number]
        return found

    def _is_replaceable(self, i: int) -> bool:
        """Whether the value of a late node is neither written nor returned."""
        effects = self.dag.effects
        held = {*effects.held(i), *effects.surely_held(i)}
        return held.isdisjoint(effects.memory.written) and held.isdisjoint(effects.held_by_outputs)

    # Groups.

    @cached_property
    def needed(self) -> dict[int, None]:
        """The early sites that nodes of the late part read, in the order of the graph."""
        found: set[int] = set()
        for i, node in enumerate(self.dag.nodes[self.cut :], self.cut):
            if i not in self.twin:
                found.update(s for s in map(self._early_site, input_nodes(node)) if s >= 0)
        return dict.fromkeys(sorted(found))

    def _early_site(self, node: Node) -> int:
        i = self.dag.index[node]
        i = self.twin.get(i, i)
        return self.site_of[i] if i < self.cut else -1

    @cached_property
    def repeated(self) -> frozenset[int]:
        """The early sites that the late part makes again, and that no late node reads from the early part."""
        again = {self.site_of[early] for late, early in self.twin.items() if self.site_of[late] == late}
        read = {
            self.site_of[self.dag.index[source]]
            for i, node in enumerate(self.dag.nodes[self.cut :], self.cut)
            if i not in self.twin
            for source in input_nodes(node)
            if self.dag.index[source] < self.cut
        }
        return frozenset(again - read)

    @cached_property
    def kept_anyway(self) -> frozenset[int]:
        """The needed sites in no group that the given graph keeps."""
        grouped = {site for group in self.groups for site in group.sites}
        return frozenset(site for site in self.needed if site not in grouped and site not in self.repeated)

    @cached_property
    def groups(self) -> tuple[SiteGroup, ...]:
        """Groups of the free sites that the late part needs or would make others from; not those of little memory."""
        worth = [site for site in self.needed if self._is_held_long(site) or site in self.repeated]
        needed = [site for site in worth if self.is_free(site)]
        sources = [site for site in sorted(self.stops) if self.is_free(site)]
        groups = self._alike(needed, is_source=False)
        return (*groups, *(g for g in self._alike(sources, is_source=True) if not self.are_streams([g])))

    def _alike(self, chosen: list[int], is_source: bool) -> tuple[SiteGroup, ...]:
        found: dict[Hashable, list[int]] = {}
        counts: dict[Hashable, int] = {}
        for site in chosen:
            node = self.dag.nodes[site]
            path = module_of(node)
            key = (NUMBER.sub("*", path), str(node.target), _type_of(node))
            within = counts[path, key] = counts.get((path, key), -1) + 1 if path else 0
            found.setdefault((*key, within), []).append(site)
        groups: list[SiteGroup] = []
        sizes = [sum(self.num_bytes[site] for site in sites) for sites in found.values()]
        for sites, num_bytes in zip(found.values(), sizes, strict=True):
            if num_bytes * SMALL < sum(sizes):
                continue
            path, target = NUMBER.sub("*", module_of(self.dag.nodes[sites[0]])), self.dag.nodes[sites[0]].target
            name = f"{path} {ops.name_of(target) or target}".strip()
            gathered = self._is_gathered(sites[0])
            groups.append(SiteGroup(name, tuple(sites), gathered, frozenset(sites) & self.repeated, is_source))
        return tuple(groups)

    def are_streams(self, groups: Sequence[SiteGroup]) -> bool:
        """Whether one site of a group is made of another one, as each sum of residuals is of the one before.

        Making all sites of these sources again would then run the whole early part a second time. A residual stream may
        consist of several groups: each of them alone is made of the others.
        """
        stops = self.stops.difference(*(group.sites for group in groups))
        return any(self._reaches(group.sites[1], frozenset(group.sites), stops) for group in groups if group.sites[1:])

    def _reaches(self, start: int, sites: frozenset[int], stops: frozenset[int]) -> bool:
        """Whether an early node is made of one of these sites without any of these stops between them."""
        index, seen = self.dag.index, set[int]()
        waiting = [index[source] for source in input_nodes(self.dag.nodes[start])]
        while waiting:
            i = waiting.pop()
            if i in sites:
                return True
            if i not in seen and self.site_of[i] not in stops:
                seen.add(i)
                waiting += [index[source] for source in input_nodes(self.dag.nodes[i])]
        return False

    def _is_held_long(self, site: int) -> bool:
        """Whether much other work runs between the last early and the first late use of a value that takes memory."""
        last, first = self.uses.get(site, (0, 0))
        return bool(self.num_bytes[site]) and (self.elapsed[first] - self.elapsed[last]) * LONG > self.elapsed[-1]

    @cached_property
    def elapsed(self) -> list[int]:
        """Compute time before each node, in the order of the graph."""
        durations = (
            ns if kind is OpKind.COMPUTE else 0
            for ns, kind in zip(self.program.duration_ns, self.program.kinds, strict=True)
        )
        return list(accumulate(durations, initial=0))

    @cached_property
    def uses(self) -> dict[int, tuple[int, int]]:
        """For each needed site the place after its last early use, and its first late use."""
        last: dict[int, int] = {}
        first: dict[int, int] = {}
        for i, node in enumerate(self.dag.nodes):
            for source in input_nodes(node):
                j = self.dag.index[source]
                if i < self.cut:
                    last[self.site_of[j]] = i + 1
                elif i not in self.twin:
                    first.setdefault(self._early_site(source), i)
        return {site: (last.get(site, site + 1), first[site]) for site in self.needed}

    def _is_gathered(self, site: int) -> bool:
        """Whether a collective makes the value of inputs of the graph alone."""
        return self.is_of_inputs[site] and ops.launch_form(self.dag.nodes[site].target) is not None

    @cached_property
    def is_of_inputs(self) -> list[bool]:
        """For each early node whether cheap operators and collectives alone make it from one input of the graph."""
        found: list[bool] = []
        for node in self.dag.nodes[: self.cut]:
            if node.op in ("placeholder", "get_attr"):
                found.append(True)
                continue
            sources = [found[self.dag.index[source]] for source in input_nodes(node)]
            is_simple = is_alias(node) or ops.is_wait(node.target) or ops.launch_form(node.target) is not None
            is_cast = node.op == "call_function" and only_computes(node) and len(sources) == 1
            found.append((is_simple or is_cast) and len(sources) == 1 and sources[0])
        return found

    @cached_property
    def stops(self) -> frozenset[int]:
        """Early sites that the late part does not need now, at which recomputation ends: keeping them is cheaper.

        Time is worth half the bytes that the early part, on average, computes in it for later.
        """
        durations, kinds = self.program.duration_ns, self.program.kinds
        early_ns = sum(ns for ns, kind in zip(durations[: self.cut], kinds, strict=False) if kind is OpKind.COMPUTE)
        held = [site for site in self.needed if self._is_held_long(site) and not self.is_of_inputs[site]]
        per_ns = sum(self.num_bytes[site] for site in held) / max(2 * early_ns, 1)
        price: dict[int, float] = {}
        stops: set[int] = set()
        for i in range(self.cut):
            if self.site_of[i] != i:
                continue
            if not self.is_free(i) or i in self.needed:
                price[i] = 0.0 if i in self.needed else self.num_bytes[i]
                continue
            sources = {self.site_of[self.dag.index[source]] for source in input_nodes(self.dag.nodes[i])}
            through = sum(price.get(site, 0.0) for site in sources) + durations[i] * per_ns
            if through >= self.num_bytes[i] > 0 and not self.is_of_inputs[i]:
                stops.add(i)
            price[i] = min(through, self.num_bytes[i])
        return frozenset(stops)


def module_of(node: Node) -> str:
    """The path of the innermost module that a node comes from; empty if it is not recorded."""
    paths: list[str] = list(node.meta.get("nn_module_stack", ()))
    return paths[-1] if paths else ""


def _type_of(node: Node) -> Any:
    value = ops.value_of(node)
    return (str(value.dtype), str(list(value.shape))) if isinstance(value, Tensor) else str(type(value))
