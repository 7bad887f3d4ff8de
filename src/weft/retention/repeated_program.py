"""The program of a choice, made from the program of the given graph without editing the graph.

Contract: it has the operations of the edited graph, in the same order. Repeated operations take the time of the
originals and allocate as much. An exact program may be slightly better: values that nothing keeps any more may be
fused. So this program serves to compare choices; the decider plans the best ones exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import Node

from weft.compat import input_nodes
from weft.plan.plan import Repeat
from weft.retention.repeats import is_removable
from weft.retention.sites import Sites
from weft.simulation.program import Program


@dataclass(frozen=True)
class RepeatedProgram:
    """A program with repeated operations."""

    program: Program
    nodes: tuple[Node, ...]
    """For each operation the node of the given graph that it is, or repeats."""


def repeated_program(sites: Sites, action: Repeat | None) -> RepeatedProgram:
    """The program of the given graph with an action carried out."""
    if action is None:
        return RepeatedProgram(sites.program, tuple(sites.dag.nodes))
    return _RepeatedRows(sites, action).made()


class _RepeatedRows:
    """Rows of the new program: the old operations by their index, then the copies."""

    def __init__(self, sites: Sites, action: Repeat) -> None:
        self.sites, self.dag, self.old = sites, sites.dag, sites.program
        self.size = len(self.dag.nodes)
        index = {node.name: i for i, node in enumerate(self.dag.nodes)}
        self.origin = list(range(self.size)) + [index[name] for name, _, _ in action.copies]
        self.names = [*self.old.names, *(copy for _, copy, _ in action.copies)]
        row_of = dict(zip(self.names, range(len(self.names)), strict=True))
        self.latest = {index[name]: row_of[value] for name, value in action.values}
        self.latest |= {index[name]: row_of[copy] for name, copy, _ in action.copies}
        self.replaced = {index[old]: row_of[new] for old, new in action.replaced}
        self.makers: dict[int, int] = {}
        self.changes = {index[name] for name in action.users}.union(range(self.size, len(self.names)))
        """Rows that read the latest values."""
        self.before: dict[int, list[int]] = {}
        """The copies that come right before an old row."""
        for row, (_, _, place) in enumerate(action.copies, self.size):
            self.before.setdefault(index[place], []).append(row)
        num_storages = 1 + max((s for made in self.old.allocates for s, _ in made), default=0)
        num_storages = max(num_storages, 1 + max((s for used in self.old.uses for s in used), default=0))
        self.allocates = list(self.old.allocates)
        for i in self.origin[self.size :]:
            self.allocates.append(tuple((num_storages + k, b) for k, (_, b) in enumerate(self.old.allocates[i])))
            num_storages += len(self.old.allocates[i])

    def source(self, row: int, j: int) -> int:
        """The row that another row reads in place of an old one."""
        if row in self.changes:
            j = self.latest.get(j, j)
        return self.replaced.get(j, j)

    def maker(self, row: int) -> int:
        """The row that allocates the value of a row; -1 if no single site does.

        An old view of a value that is made again has the new maker.
        """
        if row not in self.makers:
            i = self.origin[row]
            site, inputs = self.sites.site_of[i], map(self.dag.index.__getitem__, input_nodes(self.dag.nodes[i]))
            viewed = next((j for j in inputs if self.sites.site_of[j] == site), None) if i != site >= 0 else None
            self.makers[row] = row if i == site else self.maker(self.source(row, viewed)) if viewed is not None else -1
        return self.makers[row]

    def storages(self, i: int, maker: int) -> list[int]:
        """The storages that hold the value of an old row if this row makes it; all of the row's if unsure which."""
        made = [storage for storage, _ in self.allocates[maker]]
        roots = self.dag.effects.surely_held(self.sites.site_of[i])
        if len(roots) != len(made):
            return made
        held = self.dag.effects.surely_held(i)
        return [storage for storage, root in zip(made, roots, strict=True) if root in held]

    def sources(self, row: int) -> tuple[int, ...]:
        """The rows that a row comes after."""
        i = self.origin[row]
        old = self.old.preds[i] if row < self.size else map(self.dag.index.__getitem__, input_nodes(self.dag.nodes[i]))
        return tuple(dict.fromkeys(self.source(row, j) for j in old))

    def uses(self, row: int) -> tuple[int, ...]:
        """The storages that a row reads: those of its inputs after the action."""
        i = self.origin[row]
        inputs = [self.dag.index[node] for node in input_nodes(self.dag.nodes[i])]
        changed = {
            j: maker for j in inputs if (maker := self.maker(self.source(row, j))) not in (-1, self.sites.site_of[j])
        }
        if not changed:
            return self.old.uses[i]
        gone = {storage for j in changed for storage in self.storages(j, self.sites.site_of[j])}
        used = [storage for storage in self.old.uses[i] if storage not in gone]
        return tuple(dict.fromkeys((*used, *(s for j, maker in changed.items() for s in self.storages(j, maker)))))

    def made(self) -> RepeatedProgram:
        rows = [row for i in range(self.size) for row in (*self.before.get(i, ()), i)]
        sources = {row: self.sources(row) for row in rows}
        read: set[int] = set()
        alive: list[int] = []
        for row in reversed(rows):
            if row in self.replaced or (row not in read and is_removable(self.dag.nodes[self.origin[row]])):
                continue
            alive.append(row)
            read.update(self.data_of(row))
        alive.reverse()
        number = {row: k for k, row in enumerate(alive)}
        return RepeatedProgram(
            self._program(alive, sources, number), tuple(self.dag.nodes[self.origin[r]] for r in alive)
        )

    def data_of(self, row: int) -> list[int]:
        """The rows whose values a row reads."""
        return [self.source(row, self.dag.index[node]) for node in input_nodes(self.dag.nodes[self.origin[row]])]

    def _program(self, rows: list[int], sources: Mapping[int, tuple[int, ...]], number: Mapping[int, int]) -> Program:
        old, origin = self.old, [self.origin[row] for row in rows]
        kernel = old.kernel or range(self.size)
        return replace(
            old,
            names=tuple(self.names[row] for row in rows),
            kinds=tuple(old.kinds[i] for i in origin),
            duration_ns=tuple(old.duration_ns[i] for i in origin),
            preds=tuple(tuple(number[j] for j in sources[row] if j in number) for row in rows),
            queue=tuple(old.queue[i] for i in origin),
            waits_for=tuple(
                tuple(number[j] for k in old.waits_for[i] if (j := self.source(row, k)) in number)
                for row, i in zip(rows, origin, strict=True)
            ),
            drains=tuple(old.drains[i] for i in origin),
            allocates=tuple(self.allocates[row] for row in rows),
            uses=tuple(self.uses(row) for row in rows),
            latency_ns=tuple(old.latency_ns[i] for i in origin) if old.latency_ns else (),
            kernel=tuple(
                kernel[i] if row < self.size or kernel[i] < 0 else self.size + kernel[i]
                for row, i in zip(rows, origin, strict=True)
            ),
            host_ns=tuple(old.host_ns[i] for i in origin) if old.host_ns else (),
            sm_share_ppm=tuple(old.sm_share_ppm[i] for i in origin) if old.sm_share_ppm else (),
        )
