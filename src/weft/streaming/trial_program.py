"""Trial programs: the simulated program of a graph with streamed sites, without editing the graph.

Contract: chunks replace the collective and its products in the program; all other operations keep their prices. Chunks
are priced like any operation: flops at the peak rate, bytes at the memory bandwidth, collectives by the cluster.
Joining results and copying slices costs the memory traffic it causes. A site that runs as one operator through
symmetric memory is one operation (`cost/fused.py`). Times are integers in nanoseconds, as in `Program`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from weft.cost.cluster import Cluster
from weft.cost.flops import product_dtype, rule_of, shape_of
from weft.cost.fused import FusedShape
from weft.cost.kernels import ProductShape
from weft.cost.prices import full_bytes
from weft.graph import ops
from weft.graph.collective import Collective, num_bytes
from weft.graph.dag import Dag
from weft.graph.groups import GroupTable, group_argument
from weft.graph.ops import Kind
from weft.graph.orders import topological
from weft.graph.products import operands_of
from weft.simulation.program import OpKind, Program
from weft.streaming.chunking import Chunking, FusedForm, Operand, replaced, still_needed
from weft.streaming.view_layouts import sizes_of


@dataclass(frozen=True)
class ChunkCosts:
    """Prices of the parts of a site, in nanoseconds."""

    cluster: Cluster
    groups: GroupTable

    def collective_ns(self, cut: Chunking, chunks: int) -> int:
        """One of `chunks` equal chunks of a collective; for a ring, one step."""
        collective = Collective(cut.launch)
        group = self.groups.group(group_argument(cut.launch))
        size = (full_bytes(collective) or 0) // chunks
        kinds = [Kind.BATCH_P2P] if cut.ring_rank is not None and chunks > 1 else [collective.kind]
        if cut.decomposed_over and chunks > 1:
            kinds = [Kind.REDUCE_SCATTER, Kind.ALL_GATHER]
        return ceil(sum(self.cluster.collective_us(kind, group, size) for kind in kinds) * 1000)

    def cheaper(self, cut: Chunking) -> Chunking:
        """The chunking; an all-reduce runs each chunk as reduce-scatter and all-gather if that is faster."""
        if Collective(cut.launch).kind is not Kind.ALL_REDUCE:
            return cut
        size = self.groups.group(group_argument(cut.launch)).size
        rows = cut.shape[0] // (1 if cut.dim else cut.chunks)
        apart = replace(cut, decomposed_over=size)
        pays = self.collective_ns(apart, cut.chunks) < self.collective_ns(cut, cut.chunks)
        return apart if pays and size > 1 and rows % size == 0 else cut

    def sum_ns(self, cut: Chunking) -> int:
        """Adding a received part to the rank's own in a ring: two tensors are read and one is written."""
        return self.traffic_ns(3 * _bytes(cut.launch)) if cut.ring_rank is not None and cut.result is not None else 0

    def call_ns(self, node: Node, operands: Iterable[Operand], chunks: int) -> int:
        """A chunk of a call: flops or traffic, whichever takes longer. Every chunk reads the unsplit operands."""
        cut = {operand.node for operand in operands} | {node}
        moved = sum(_bytes(tensor) // (chunks if tensor in cut else 1) for tensor in (*node.all_input_nodes, node))
        traffic, device = self.traffic_ns(moved), self.cluster.device
        rule, dtype, shape = rule_of(node.target), product_dtype(node), shape_of(node)
        if rule is None or dtype is None:
            return traffic
        if isinstance(shape, ProductShape):
            product = device.shaped_product_ns(shape._replace(rows=max(1, shape.rows // chunks)), dtype)
        else:
            product = device.product_ns(rule(node, ops.bind(node)) // chunks, dtype)
        return max(traffic, (product or 0) + device.kernel_ns)

    def traffic_ns(self, moved: int) -> int:
        """The time of a kernel that moves these bytes; 0 without any."""
        device = self.cluster.device
        return (device.traffic_ns(moved) or 0) + device.kernel_ns if moved else 0

    def join_ns(self, node: Node) -> int:
        """Joining a tensor from its chunks: it is read and written once."""
        return self.traffic_ns(2 * _bytes(node))

    def copies_ns(self, cut: Chunking, node: Node) -> int:
        """Copying the slices that one chunk of a call takes, if they are not contiguous."""
        taken = [operand for operand in cut.calls.get(node, {}).values() if operand.base is None]
        moved = sum(2 * _bytes(operand.node) // cut.chunks for operand in taken if operand.chunk_dim.outer > 1)
        return self.traffic_ns(moved)

    def fused_ns(self, cut: Chunking, form: FusedForm) -> int:
        """One operator that multiplies while it communicates, the join of its operands if it sums products, and copies
        of its results where others need another order in memory."""
        group, scatters = self.groups.group(group_argument(cut.launch)), cut.result is not None
        found = [tuple(map(sizes_of, operands_of(product))) for product in cut.products]
        sizes = [(left or (0,), right or (0, 0)) for left, right in found]
        terms = sum(left[-1] for left, _ in sizes) if scatters else sizes[0][0][-1]
        rows = prod(sizes[0][0][:-1])
        products = cut.products[:1] if scatters else cut.products
        columns = tuple((sizes_of(product) or (0,))[-1] for product in products)
        part = _bytes(cut.launch if scatters else cut.launch.all_input_nodes[0])
        dtype = product_dtype(cut.products[0]) or torch.float32
        left = rows * terms if scatters else prod(cut.shape)
        reordered = left if prod(form.shape[: form.dim]) > 1 else 0
        shape = FusedShape(scatters, rows, terms, columns, dtype, part, reordered)
        joined = [node for product in cut.products for node in operands_of(product)] if scatters and sizes[1:] else []
        ns = shape.ns(self.cluster.num_ranks_of(group), self.cluster.symmetric(group), self.cluster.device)
        return ns + self.traffic_ns(2 * sum(map(_bytes, joined))) + sum(map(self.join_ns, form.copied))

    def alone_ns(self, cut: Chunking) -> tuple[int, int]:
        """The site with nothing else running: whole, and in chunks."""
        calls = list(cut.calls.items())
        whole = sum(self.call_ns(node, operands.values(), 1) for node, operands in calls)
        if cut.fused is not None:
            return whole + self.collective_ns(cut, 1), self.fused_ns(cut, cut.fused)
        part = sum(
            self.call_ns(node, operands.values(), cut.chunks) + self.copies_ns(cut, node) for node, operands in calls
        )
        wire, piece = self.collective_ns(cut, 1), self.collective_ns(cut, cut.chunks)
        joins = list(cut.products) if cut.result is None else [cut.launch] if cut.ring_rank is None else []
        if cut.result is None and cut.launch not in replaced(cut):
            joins.append(cut.launch)
        gap = round(self.cluster.device.launch_gap_us * 1000) * (cut.chunks - 1) * len(calls)
        first = piece if cut.ring_rank is None else self.sum_ns(cut) * (cut.chunks - 1)
        together = first + part + (cut.chunks - 1) * max(piece, part) + sum(map(self.join_ns, joins)) + gap
        return whole + wire, together


def _bytes(node: Node) -> int:
    value = ops.value_of(node)
    return num_bytes(value) or 0 if isinstance(value, Tensor) else 0


class _TrialOp(NamedTuple):
    """An operation of the program being built. `rank` is its position: operations are sorted by it."""

    name: str
    kind: OpKind
    duration: int
    preds: tuple[int, ...]
    rank: tuple[int, ...]
    queue: int = -1
    waits_for: tuple[int, ...] = ()
    allocates: tuple[tuple[int, int], ...] = ()
    uses: tuple[int, ...] = ()


class TrialProgram:
    """A program that is changed one site at a time.

    Copies share operations, so an operation is replaced, never changed.
    """

    def __init__(self, program: Program, dag: Dag, costs: ChunkCosts) -> None:
        self.program, self.dag, self.costs = program, dag, costs
        self.ops = [
            _TrialOp(*fields)
            for fields in zip(
                program.names,
                program.kinds,
                program.duration_ns,
                program.preds,
                ((i,) for i in range(len(program.names))),
                program.queue,
                program.waits_for,
                program.allocates,
                program.uses,
                strict=True,
            )
        ]
        self.kernels = list(program.kernel or range(len(self.ops)))
        self.slowest_issue_ns: dict[OpKind, int] = {}
        for kind, ns in zip(program.kinds, program.host_ns, strict=False):  # no times if the host is never in the way
            self.slowest_issue_ns[kind] = max(ns, self.slowest_issue_ns.get(kind, 0))
        self.next_storage = 1 + max((s for made in program.allocates for s, _ in made), default=0)

    def copy(self) -> TrialProgram:
        """A program to change further, while this one stays as it is."""
        made = copy(self)
        made.ops, made.kernels = list(self.ops), list(self.kernels)
        return made

    def stream(self, cut: Chunking) -> None:
        """Replace a site by its chunks."""
        gone = replaced(cut)
        for node in gone:
            self._become(self.dag.index[node], OpKind.NOTHING, 0, ())
        if cut.fused is not None:
            self._fuse(cut, cut.fused)
        elif cut.result is None:
            self._gather(cut, gone)
        else:
            self._scatter(cut, gone)

    def _fuse(self, cut: Chunking, form: FusedForm) -> None:
        """Replace a site by one operation, which makes all results and the gathered tensor."""
        index, launch = self.dag.index, cut.launch
        waits = [user for user in launch.users if ops.is_wait(user.target)]
        made = [launch, *waits, *cut.products] if cut.result is None else [launch, *waits]
        read = [node for product in cut.products for node in product.all_input_nodes]
        taken = [operand.node for product in cut.products for operand in cut.calls[product].values() if operand.base]
        sources = [node for node in read if node not in taken] if cut.result is None else read
        preds = dict.fromkeys(index[node] for node in [*sources, *(launch.all_input_nodes if not cut.result else [])])
        place = index[cut.products[-1]] if cut.result is None else index[launch]
        held = tuple(s for pred in preds for s, _ in self.program.allocates[pred])
        allocates = tuple(storage for node in made for storage in self.program.allocates[index[node]])
        ns = self.costs.fused_ns(cut, form)
        op = _TrialOp(launch.name, OpKind.COMPUTE, ns, tuple(preds), (place, 0), allocates=allocates, uses=held)
        whole = self._add(op)
        for node in made:
            self._become(index[node], OpKind.NOTHING, 0, (whole,))

    def _add(self, op: _TrialOp) -> int:
        self.ops.append(op)
        self.kernels.append(2 * len(self.ops) + len(self.program.names) * 4)
        return len(self.ops) - 1

    def _storage(self, size: int) -> tuple[tuple[int, int], ...]:
        self.next_storage += 1
        return ((self.next_storage - 1, size),)

    def _gather(self, cut: Chunking, gone: set[Node]) -> None:
        index, launch = self.dag.index, cut.launch
        here, anchor = index[launch], index[cut.products[-1]]
        sent = index[launch.all_input_nodes[0]]
        parts: dict[Node, list[int]] = {node: [] for node in cut.calls}
        if cut.ring_rank is None:
            launches = [self._launch(cut, sent, (here, c), self.program.uses[here]) for c in range(cut.chunks)]
            waits: list[int] = []
            for c, chunk in enumerate(launches):
                waits.append(self._wait(cut, chunk, (anchor, c, 0)))
                self._calls(cut, {launch: waits}, parts, (anchor, c))
        else:
            waits = self._gather_in_ring(cut, sent, parts)
        for node in cut.products:
            self._join(node, parts[node], (anchor, cut.chunks))
        if launch not in gone:
            old = [launch, *(user for user in launch.users if ops.is_wait(user.target))]
            users = [index[user] for node in old for user in node.users if user not in gone and user not in old]
            whole = self._add(
                _TrialOp(
                    launch.name,
                    OpKind.COMPUTE,
                    self.costs.join_ns(launch),
                    tuple(waits),
                    (min(users, default=anchor), -1),
                    uses=self._held(waits),
                    allocates=self.program.allocates[here],
                )
            )
            for node in old:
                self._become(index[node], OpKind.NOTHING, 0, (whole,))

    def _gather_in_ring(self, cut: Chunking, sent: int, parts: dict[Node, list[int]]) -> list[int]:
        """Send each part on to the next rank while multiplying it. Returns the operations that hold the parts."""
        here, anchor = self.dag.index[cut.launch], self.dag.index[cut.products[-1]]
        arrived = [sent]
        for c in range(cut.chunks):
            place = (anchor, c, 0, 1) if c else (here, 0)
            sending = self._launch(cut, arrived[c], place, self._held(arrived[c:])) if c < cut.chunks - 1 else None
            self._calls(cut, {cut.launch: arrived}, parts, (anchor, c))
            if sending is not None:
                arrived.append(self._wait(cut, sending, (anchor, c + 1, 0)))
        return arrived

    def _launch(self, cut: Chunking, source: int, rank: tuple[int, ...], held: tuple[int, ...]) -> int:
        """Add the launch of one chunk."""
        name, ns = cut.launch.name, self.costs.collective_ns(cut, cut.chunks)
        parts = 1 if cut.ring_rank is not None and cut.result is not None else cut.chunks
        made = self._storage(_bytes(cut.launch) // parts)
        queue = self.program.queue[self.dag.index[cut.launch]]
        return self._add(_TrialOp(name, OpKind.LAUNCH, ns, (source,), rank, queue, (), made, held))

    def _wait(self, cut: Chunking, launch: int, rank: tuple[int, ...]) -> int:
        held = self._held([launch])
        return self._add(_TrialOp(cut.launch.name, OpKind.WAIT, 0, (launch,), rank, -1, (launch,), (), held))

    def _scatter(self, cut: Chunking, gone: set[Node]) -> None:
        index, launch = self.dag.index, cut.launch
        here = index[launch]
        if cut.ring_rank is not None:
            self._scatter_in_ring(cut, gone)
            return
        parts: dict[Node, list[int]] = {node: [] for node in cut.calls}
        launches: list[int] = []
        last = cut.result.base if cut.result is not None else None
        for c in range(cut.chunks):
            self._calls(cut, {}, parts, (here, c))
            source = parts[last][c] if last in parts else index[launch.all_input_nodes[0]]
            launches.append(self._launch(cut, source, (here, c, 1 << 30), self._held([source])))
        for node in still_needed(cut, gone):
            self._join(node, parts[node], (here, cut.chunks))
        old = [user for user in launch.users if ops.is_wait(user.target)]
        place = min((index[node] for node in old), default=len(self.program.names) - 1)
        waits = [self._wait(cut, chunk, (place, -1, c)) for c, chunk in enumerate(launches)]
        allocates = self.program.allocates[here]
        whole = self._add(
            _TrialOp(
                launch.name,
                OpKind.COMPUTE,
                self.costs.join_ns(launch),
                tuple(waits),
                (place, 0),
                uses=self._held(launches),
                allocates=allocates,
            )
        )
        for node in (launch, *old):
            self._become(index[node], OpKind.NOTHING, 0, (whole,))

    def _scatter_in_ring(self, cut: Chunking, gone: set[Node]) -> None:
        """Send each partial sum on to the next rank, which adds its own part."""
        index, launch = self.dag.index, cut.launch
        here = index[launch]
        parts: dict[Node, list[int]] = {node: [] for node in cut.calls}
        last = cut.result.base if cut.result is not None else None
        total = -1
        for c in range(cut.chunks):
            self._calls(cut, {}, parts, (here, c))
            source = parts[last][c] if last in parts else index[launch.all_input_nodes[0]]
            if c:
                waited = self._wait(cut, total, (here, c, 2))
                ns, held = self.costs.sum_ns(cut), self._held([waited, source])
                made = self._storage(_bytes(launch))
                sum_ = _TrialOp(launch.name, OpKind.COMPUTE, ns, (waited, source), (here, c, 3), -1, (), made, held)
                source = self._add(sum_)
            total = self._launch(cut, source, (here, c, 4), self._held([source])) if c < cut.chunks - 1 else source
        for node in still_needed(cut, gone):
            self._join(node, parts[node], (here, cut.chunks))
        for node in (launch, *(user for user in launch.users if ops.is_wait(user.target))):
            self._become(index[node], OpKind.NOTHING, 0, (total,))

    def _calls(
        self, cut: Chunking, given: dict[Node, list[int]], parts: dict[Node, list[int]], rank: tuple[int, ...]
    ) -> None:
        """Add the calls of one chunk."""
        for k, (node, operands) in enumerate(cut.calls.items()):
            cut_away = {operand.node for operand in operands.values() if operand.base is not None}
            preds = [self.dag.index[tensor] for tensor in node.all_input_nodes if tensor not in cut_away]
            bases = [operand.base for operand in operands.values() if operand.base is not None]
            chunks = [(given.get(base) or parts[base])[-1] for base in bases if base in given or base in parts]
            preds += [self.dag.index[base] for base in bases if base not in given and base not in parts]
            ns = self.costs.call_ns(node, operands.values(), cut.chunks) + self.costs.copies_ns(cut, node)
            held = [*self._held(chunks), *(s for p in preds for s, _ in self.program.allocates[p])]
            made = self._storage(_bytes(node) // cut.chunks)
            op = _TrialOp(node.name, OpKind.COMPUTE, ns, (*preds, *chunks), (*rank, 1, k), -1, (), made, tuple(held))
            parts[node].append(self._add(op))

    def _held(self, chunks: Sequence[int]) -> tuple[int, ...]:
        held = [s for op in chunks for s, _ in self.ops[op].allocates]
        return tuple(
            dict.fromkeys([*held, *(s for op in chunks for s in self.ops[op].uses if self.ops[op].kind is OpKind.WAIT)])
        )

    def _join(self, node: Node, chunks: list[int], rank: tuple[int, ...]) -> None:
        """Turn the operation of a call into the join of its chunks."""
        i = self.dag.index[node]
        self._become(i, OpKind.COMPUTE, self.costs.join_ns(node), tuple(chunks))
        self.ops[i] = self.ops[i]._replace(
            rank=(*rank, i), uses=self._held(chunks), allocates=self.program.allocates[i]
        )

    def _become(self, i: int, kind: OpKind, duration: int, preds: tuple[int, ...]) -> None:
        op = self.ops[i]._replace(kind=kind, duration=duration, preds=preds, queue=-1, waits_for=())
        self.ops[i] = op._replace(allocates=(), uses=()) if kind is OpKind.NOTHING else op

    def result(self) -> Program:
        """The resulting program, in a legal order."""
        order = self._order()
        number = {old: new for new, old in enumerate(order)}
        made = [self.ops[i] for i in order]
        return replace(
            self.program,
            names=tuple(op.name for op in made),
            kinds=tuple(op.kind for op in made),
            duration_ns=tuple(op.duration for op in made),
            preds=tuple([tuple([number[p] for p in op.preds]) for op in made]),
            queue=tuple(op.queue for op in made),
            waits_for=tuple([tuple([number[w] for w in op.waits_for]) for op in made]),
            drains=tuple(self.program.drains[i] if i < len(self.program.drains) else False for i in order),
            allocates=tuple(op.allocates for op in made),
            uses=tuple(op.uses for op in made),
            latency_ns=(),
            kernel=tuple(self.kernels[i] for i in order),
            host_ns=tuple(self._host_ns(i) for i in order) if self.program.host_ns else (),
            sm_share_ppm=tuple(self._sm_share(i) for i in order) if self.program.sm_share_ppm else (),
        )

    def _sm_share(self, i: int) -> int:
        is_old_launch = i < len(self.program.kinds) and self.ops[i].kind is OpKind.LAUNCH
        return self.program.sm_share_ppm[i] if is_old_launch else 0

    def _host_ns(self, i: int) -> int:
        """Time to issue an operation. New ones take as long as the slowest operation of their kind; views take none."""
        program, kind = self.program, self.ops[i].kind
        if i < len(program.kinds) and program.kinds[i] is kind:
            return program.host_ns[i]
        return self.slowest_issue_ns.get(kind, 0) if kind is not OpKind.NOTHING else 0

    def _order(self) -> list[int]:
        succs: list[list[int]] = [[] for _ in self.ops]
        for i, op in enumerate(self.ops):
            for pred in op.preds:
                succs[pred].append(i)
        return topological(succs, [op.rank for op in self.ops])
