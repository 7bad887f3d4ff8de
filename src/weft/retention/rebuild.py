"""Rebuild: the action that carries out a choice of kept sites.

Contract: every late node gets the same values as before, from kept sites or from nodes that repeat the early ones right
before their first late use, or from copies in host memory that come back there. All late uses of a value share one
repetition. A repetition that the graph has already stays where it is, unless an earlier one is needed or the value is
kept. A value whose inputs are overwritten before its late use cannot be made again; the error names the site to keep.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from weft.compat import input_nodes
from weft.plan.plan import Offload, Repeat
from weft.retention.sites import Sites

OFFLOADED = ("offload", "offloaded", "fetch", "fetched")
"""Suffixes of the names of a copy to host memory, its wait, the copy back, and its wait."""


class OverwrittenError(Exception):
    """A site cannot be made again in the late part, because its inputs are overwritten by then."""

    def __init__(self, site: int) -> None:
        super().__init__(site)
        self.site = site


@dataclass
class _Late:
    """The late part under construction."""

    value: dict[int, str] = field(default_factory=dict[int, str])
    """The node that holds the value of an early node again."""
    copies: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    offloads: list[Offload] = field(default_factory=list[Offload])
    users: list[str] = field(default_factory=list[str])
    replaced: dict[int, str] = field(default_factory=dict[int, str])


def rebuild(sites: Sites, kept: Container[int], waits: Mapping[int, int] | None = None) -> Repeat | None:
    """The action that keeps these free sites and makes all others again; None if nothing changes.

    `waits` are the sites to offload, each with the place to wait for its copy. Raises `OverwrittenError` if the choice
    is not possible.
    """
    return _Rebuilder(sites, kept, waits or {}).action()


class _Rebuilder:
    def __init__(self, sites: Sites, kept: Container[int], waits: Mapping[int, int]) -> None:
        self.sites, self.kept, self.waits, self.dag = sites, kept, waits, sites.dag
        self.late = _Late()
        self.taken = {node.name for node in self.dag.nodes}

    def is_there(self, early: int) -> bool:
        """Whether the late part finds the value of an early node."""
        site = self.sites.site_of[early]
        return not self.sites.is_free(site) or site in self.kept

    def action(self) -> Repeat | None:
        late, twin, nodes, index = self.late, self.sites.twin, self.dag.nodes, self.dag.index
        for i in range(self.sites.cut, len(nodes)):
            node = nodes[i]
            early = twin.get(i)
            if early is not None and self._replaces(i, early):
                continue
            changed = False
            for source in input_nodes(node):
                j = index[source]
                if j < self.sites.cut and not self.is_there(j):
                    self._make(j, i)
                    changed = True
            if changed:
                late.users.append(node.name)
            if early is not None and not self.is_there(early):
                late.value.setdefault(early, node.name)
        if not late.copies and not late.users and not late.replaced:
            return None
        known = {*(name for _, name, _ in late.copies), *(offload.names[-1] for offload in late.offloads)}
        values = [(nodes[early].name, name) for early, name in late.value.items() if name not in known]
        replaced = tuple((nodes[i].name, by) for i, by in late.replaced.items())
        return Repeat(tuple(late.copies), tuple(values), tuple(late.users), replaced, tuple(late.offloads))

    def _replaces(self, i: int, early: int) -> bool:
        """Whether a late node gives way to an equal one that is kept or comes before it."""
        late, nodes = self.late, self.dag.nodes
        if self.sites.site_of[i] != i:  # a view goes where its source goes
            source = next(iter(input_nodes(nodes[i])), None)
            if source is None or self.dag.index[source] not in late.replaced:
                return False
        if self.is_there(early):
            late.replaced[i] = nodes[early].name
        elif early in late.value:
            late.replaced[i] = late.value[early]
        else:
            return False
        return True

    def _make(self, early: int, place: int) -> None:
        """Repeat an early node before a late one, and first what it is made of."""
        stack = [early]
        late, nodes = self.late, self.dag.nodes
        while stack:
            j = stack[-1]
            if j in late.value:
                stack.pop()
                continue
            if j in self.waits:
                self._fetch(j, place)
                continue
            missing = [
                k
                for k in map(self.dag.index.__getitem__, input_nodes(nodes[j]))
                if not self.is_there(k) and k not in late.value
            ]
            if missing:
                stack += missing
                continue
            self._check_inputs(j, place)
            late.value[j] = self._new_name(nodes[j])
            late.copies.append((nodes[j].name, late.value[j], nodes[place].name))
            stack.pop()

    def _fetch(self, site: int, place: int) -> None:
        """Copy a site to host memory, and back before a late node."""
        nodes = self.dag.nodes
        first, second, third, last = (self._new_name(nodes[site], word) for word in OFFLOADED)
        before, after = nodes[self.waits[site]].name, nodes[place].name
        self.late.offloads.append(Offload(nodes[site].name, (first, second, third, last), before, after))
        self.late.value[site] = last

    def _check_inputs(self, j: int, place: int) -> None:
        effects = self.dag.effects
        for source in input_nodes(self.dag.nodes[j]):
            for storage in effects.held(self.dag.index[source]):
                if effects.memory.first_direct_write(storage, j, place) is not None:
                    raise OverwrittenError(self.sites.site_of[j])

    def _new_name(self, node: Node, word: str = "again") -> str:
        name, number = f"{node.name}_{word}", 0
        while name in self.taken:
            number += 1
            name = f"{node.name}_{word}_{number}"
        self.taken.add(name)
        return name
