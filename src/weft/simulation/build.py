"""Build programs from graphs: the kind, the time and the memory of each node.

Kinds: a launch of a known kind of collective, or of a copy to or from host memory, is a launch, a wait is a wait.
Inputs, constants, views, items, numbers and the output are nothing. Everything else is compute, including communication
of unknown kinds: it holds the stream, which is safe. An operation that reads device data on the host drains the stream.

Memory: storages come from the Dag, which follows them through views. A storage is as large as the span of the tensor
that allocates it; aliased inputs count once, with the largest span. Sizes without a hint count as zero. Storages of
inputs, constants and outputs are kept. With an execution, so are gradients that the optimizer reads: torch holds them
until the next step clears them, and results inside fused kernels take no memory. Copies in host memory take none.

Sequences: several graphs run one after the other. An input with the name, shape and dtype of an output or input of an
earlier graph is the same value: it is counted once, and waiting for it completes the launch that made it. An output
that a later graph takes is freed after its last use there; every other output stays to the end.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from weft.compat import HigherOrderOperator, OpOverload, input_nodes
from weft.cost.cluster import Cluster
from weft.cost.execution import is_optimizer
from weft.cost.prices import Prices, full_bytes, price
from weft.graph import ops
from weft.graph.assumed_sizes import size_of
from weft.graph.collective import Collective
from weft.graph.dag import Dag, collector_paused
from weft.graph.groups import GroupTable, group_argument
from weft.graph.host import is_read_on_host
from weft.graph.operator_effects import is_alias, waited_by, waited_inside
from weft.graph.ops import HostCopy, Kind, attribute, cached_by_target
from weft.graph.output_names import result_names
from weft.graph.versions import dag_of
from weft.simulation.program import MILLION, OpKind, Program, Queue

Source = GraphModule | Graph | Dag


def program_of(
    source: Source, groups: GroupTable, cluster: Cluster, overrides: Mapping[str, float] | None = None
) -> Program:
    """The program of one graph, priced for a cluster; `overrides` maps node names to times in microseconds."""
    return sequence_of([(source, groups)], cluster, overrides)


def sequence_of(
    sources: Sequence[tuple[Source, GroupTable]], cluster: Cluster, overrides: Mapping[str, float] | None = None
) -> Program:
    """The program of graphs that run one after the other."""
    builder, left = _ProgramBuilder(cluster), dict(overrides or {})
    with collector_paused():
        for k, (source, groups) in enumerate(sources, 1):
            graph = source.graph if isinstance(source, GraphModule) else source
            dag = graph if isinstance(graph, Dag) else dag_of(graph)
            names = {node.name for node in dag.nodes} if left else set[str]()
            is_last = k == len(sources)  # the last graph gets all remaining names, so that `price` rejects unknown ones
            here = {name: us for name, us in left.items() if name in names or is_last}
            left = {name: us for name, us in left.items() if name not in here}
            builder.add(dag, groups, price(dag, groups, cluster, here))
        return builder.program()


@dataclass(frozen=True)
class _Value:
    """An input or output of a graph that later graphs may take."""

    op: int
    storages: tuple[int, ...]
    type: tuple[Any, ...]
    """Shape and dtype; empty if it is not a tensor."""
    name: str
    """Name of the node; results may have further names."""


class _ProgramBuilder:
    """A program that grows by one graph at a time; each graph's operations and storages are numbered after the last."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.names: list[str] = []
        self.kinds: list[OpKind] = []
        self.durations: list[int] = []
        self.latencies: list[int] = []
        self.preds: list[tuple[int, ...]] = []
        self.queue: list[int] = []
        self.waits_for: list[tuple[int, ...]] = []
        self.drains: list[bool] = []
        self.kernels: list[int] = []
        self.host: list[int] = []
        self.sm_shares: list[int] = []
        self.underpriced: list[int] = []
        self.workspaces: dict[str, int] = {}
        self.allocates: list[tuple[tuple[int, int], ...]] = []
        self.uses: list[tuple[int, ...]] = []
        self.queues: dict[tuple[str, bool], Queue] = {}
        """By group or direction, and whether copies through symmetric memory do the work."""
        self.links: dict[str, int] = {}
        self.open_launches = _OpenLaunches()
        self.given: set[int] = set()
        self.gradients: set[int] = set()
        self.known: dict[str, _Value] = {}
        self.untaken: dict[str, tuple[int, ...]] = {}
        """Storages of outputs that no later graph has taken so far."""
        self.num_storages = 0
        self.least_ns: dict[tuple[Kind, str, int], int] = {}
        """The least time of the bytes of a collective, by kind, group and bytes."""

    def program(self) -> Program:
        """The program of all graphs added so far."""
        device = self.cluster.device
        return Program(
            names=tuple(self.names),
            kinds=tuple(self.kinds),
            duration_ns=tuple(self.durations),
            preds=tuple(self.preds),
            queue=tuple(self.queue),
            waits_for=tuple(self.waits_for),
            queues=tuple(self.queues.values()),
            links=tuple(self.links),
            drains=tuple(self.drains),
            launch_gap_ns=round(device.launch_gap_us * 1000),
            slowdown_ppm=round(device.overlap_slowdown * 1_000_000),
            collective_slowdown_ppm=round(device.collective_slowdown * 1_000_000),
            allocates=tuple(self.allocates),
            uses=tuple(self.uses),
            kept=frozenset(self.given.union(self.gradients, *self.untaken.values())),
            given=frozenset(self.given),
            latency_ns=tuple(self.latencies),
            kernel=tuple(self.kernels),
            host_ns=tuple(self.host) if any(self.host) else (),
            symmetric_bytes=sum(self.workspaces.values()),
            sm_share_ppm=tuple(self.sm_shares) if any(self.sm_shares) else (),
            underpriced=tuple(self.underpriced) if device.peak_tflops and device.memory_gbps is not None else (),
        )

    def add(self, dag: Dag, groups: GroupTable, prices: Prices) -> None:
        """Append a graph."""
        base, nodes = len(self.names), dag.nodes
        kinds = [_kind_of(node) for node in nodes]
        launches = {i for i, kind in enumerate(kinds) if kind is OpKind.LAUNCH}
        self.names += [node.name for node in nodes]
        self.kinds += kinds
        # Communication of an unknown kind has kind COMPUTE: it holds the stream for its whole time.
        self.durations += [
            prices.collective_ns.get(i, ns) if kind in (OpKind.LAUNCH, OpKind.COMPUTE) else 0
            for i, (ns, kind) in enumerate(zip(prices.compute_ns, kinds, strict=True))
        ]
        self.preds += [tuple(base + j for j in preds) for preds in dag.preds]
        self.underpriced += sorted(base + i for i in prices.unknown)
        self.host += prices.host_ns or [0] * len(nodes)
        for group, num_bytes in prices.workspaces.items():
            self.workspaces[group] = max(num_bytes, self.workspaces.get(group, 0))
        shares = [floor(prices.sm_share.get(i, 0) * MILLION) for i in range(len(nodes))]
        self.sm_shares += [min(share, MILLION - 1) for share in shares]  # compute beside copies never stops
        self.drains += [is_read_on_host(node) for node in nodes]
        regions = prices.regions or range(len(nodes))
        self.kernels += [base + region if region >= 0 else -1 for region in regions]
        self.queue += [
            self._queue(nodes[i], groups, prices.level[i]) if i in launches else -1 for i in range(len(nodes))
        ]
        self.latencies += [
            self._latency(nodes[i], groups, prices.collective_ns[i]) if i in launches else 0 for i in range(len(nodes))
        ]
        storages = self._add_memory(dag, base, prices.inner)
        if self.cluster.device.execution:
            self.gradients.update(_gradients(dag, storages))
        self._add_waits(dag, base, kinds, storages)
        self._hand_on(dag, base, storages)

    def _queue(self, node: Node, groups: GroupTable, level: str) -> int:
        copy, form = ops.host_copy(node.target), ops.launch_form(node.target)
        is_peer = form is not None and form.copied
        group = copy.value if copy is not None else groups.canonical(group_argument(node))
        if (group, is_peer) not in self.queues:
            link = self.links.setdefault(level, len(self.links))
            is_copies, is_to_host = copy is not None or is_peer, copy is HostCopy.TO_HOST
            self.queues[group, is_peer] = Queue(group, link, is_copies, copy is not None, is_to_host)
        return list(self.queues).index((group, is_peer))

    def _latency(self, node: Node, groups: GroupTable, duration_ns: int) -> int:
        """The most that merging can save of a collective: all but the time of its bytes in the largest bucket."""
        kind, form = ops.kind_of(node.target), ops.launch_form(node.target)
        if kind is None or (form is not None and form.copied):  # no bucket takes a copy
            return 0
        num_bytes = full_bytes(Collective(node)) if kind is not Kind.BARRIER else None
        if num_bytes is None:
            return duration_ns
        group = groups.group(group_argument(node))
        key = (kind, group.name, num_bytes)
        if key not in self.least_ns:
            self.least_ns[key] = floor(self.cluster.least_us(kind, group, num_bytes) * 1000)
        return min(max(duration_ns - self.least_ns[key], 0), duration_ns)

    def _add_memory(self, dag: Dag, base: int, inner: Container[int]) -> list[tuple[int, ...]]:
        """Add allocations and uses; return the storages of each node, as the program numbers them."""
        effects, numbers = dag.effects, dict[int, int]()
        spans = self._inputs(dag, base, numbers)
        held: list[tuple[int, ...]] = []
        largest: dict[int, int] = {}
        """Bytes of each storage. A resized storage counts with its largest size for its whole life."""
        for i, node in enumerate(dag.nodes):
            raw = effects.storages[i]
            mine = () if raw is None else raw if isinstance(raw, tuple) else (raw,)
            found: list[int] = []
            made: list[tuple[int, int]] = []
            for place, storage in enumerate(mine):
                root = effects.root(storage)
                if root not in numbers:
                    numbers[root] = self._new_storage()
                found.append(numbers[root])
                if storage not in largest:
                    num_bytes = spans[storage] if storage in spans else _span_of(node, place if len(mine) > 1 else None)
                    num_bytes = 0 if i in inner or ops.host_copy(node.target) is HostCopy.TO_HOST else num_bytes
                    if num_bytes:
                        made.append((numbers[root], num_bytes))
                    largest[storage] = num_bytes
                elif (grown := _resized_to(node) - largest[storage]) > 0:
                    made.append((numbers[root], grown))
                    largest[storage] += grown
            held.append(tuple(found))
            self.allocates.append(tuple(made))
            used = [s for source in input_nodes(node) for s in held[dag.index[source]]]
            self.uses.append(tuple(dict.fromkeys(used)) if len(used) > 1 else tuple(used))
        return held

    def _inputs(self, dag: Dag, base: int, numbers: dict[int, int]) -> dict[int, int]:
        """Number the storages of inputs and constants; return the bytes of those that no earlier graph holds."""
        spans: dict[int, int] = {}
        for i, node in enumerate(dag.nodes):
            raw = dag.effects.storages[i]
            if node.op not in ("placeholder", "get_attr") or not isinstance(raw, int):
                continue
            root = dag.effects.root(raw)
            before = self.known.get(node.name) if node.op == "placeholder" else None
            if before is not None and before.type == _type_of(node) and len(before.storages) == 1:
                self.untaken.pop(before.name, None)
                self.preds[base + i] = (*self.preds[base + i], before.op)
                numbers.setdefault(root, before.storages[0])
                spans.setdefault(raw, 0)
                continue
            if root not in numbers:
                numbers[root] = self._new_storage()
                self.given.add(numbers[root])
            spans[raw] = max(spans.get(raw, 0), _span_of(node, None))
        return spans

    def _new_storage(self) -> int:
        self.num_storages += 1
        return self.num_storages - 1

    def _add_waits(self, dag: Dag, base: int, kinds: Sequence[OpKind], storages: Sequence[tuple[int, ...]]) -> None:
        for i, kind in enumerate(kinds):
            if kind is OpKind.LAUNCH:
                self.open_launches.launch(base + i, storages[i])
            if kind is OpKind.WAIT:
                node = dag.nodes[i]
                waited = waited_inside(node) if isinstance(node.target, HigherOrderOperator) else waited_by(node)
                sources = [storages[dag.index[source]] for source in waited]
                launches = self.open_launches.wait(s for held in sources for s in held)
                self.waits_for.append(launches)
                self.preds[base + i] = tuple(dict.fromkeys((*self.preds[base + i], *launches)))
            else:
                self.waits_for.append(())

    def _hand_on(self, dag: Dag, base: int, storages: Sequence[tuple[int, ...]]) -> None:
        """Remember inputs and outputs for the graphs behind this one."""
        outputs = [source for node in dag.nodes if node.op == "output" for source in input_nodes(node)]
        inputs = [node for node in dag.nodes if node.op == "placeholder"]
        for node in (*inputs, *outputs):
            i = dag.index[node]
            value = _Value(base + i, storages[i], _type_of(node), node.name)
            self.known.update(dict.fromkeys(result_names(node), value))
        for node in outputs:
            self.untaken[node.name] = storages[dag.index[node]]


def _gradients(dag: Dag, storages: Sequence[tuple[int, ...]]) -> Iterable[int]:
    """Storages that the optimizer reads and that the rest of the step made."""
    read = {source for node in dag.nodes if is_optimizer(node) for source in input_nodes(node)}
    made = (source for source in read if source.op == "call_function" and not is_optimizer(source))
    return (storage for source in made for storage in storages[dag.index[source]])


class _OpenLaunches:
    """Finds the launches that a wait completes: all that wrote its storage since the last wait for it."""

    def __init__(self) -> None:
        self.open: dict[int, list[int]] = {}
        self.landed: dict[int, list[int]] = {}

    def launch(self, op: int, storages: Iterable[int]) -> None:
        for storage in storages:
            self.open.setdefault(storage, []).append(op)

    def wait(self, storages: Iterable[int]) -> tuple[int, ...]:
        """The launches that write these storages. A second wait gets the same ones: another order may put it first."""
        found: dict[int, None] = {}
        for storage in storages:
            if storage in self.open:
                self.landed[storage] = self.open.pop(storage)
            found.update(dict.fromkeys(self.landed.get(storage, ())))
        return tuple(found)


def _kind_of(node: Node) -> OpKind:
    if node.op in ("placeholder", "get_attr", "output"):
        return OpKind.NOTHING
    if node.op != "call_function":
        return OpKind.COMPUTE
    if isinstance(node.target, HigherOrderOperator) and waited_inside(node):
        return OpKind.WAIT
    kind = _kind_of_target(node.target)
    return OpKind.NOTHING if kind is OpKind.COMPUTE and is_alias(node) else kind


@cached_by_target
def _kind_of_target(target: Any) -> OpKind:
    if ops.launch_form(target) is not None or ops.host_copy(target) is not None:
        return OpKind.LAUNCH
    if ops.is_wait(target):
        return OpKind.WAIT
    if not isinstance(target, OpOverload):
        return OpKind.COMPUTE if isinstance(target, HigherOrderOperator) else OpKind.NOTHING
    return OpKind.COMPUTE if ops.reads_data(target) else OpKind.NOTHING


def _type_of(node: Node) -> tuple[Any, ...]:
    value = ops.value_of(node)
    return (tuple(map(str, value.shape)), value.dtype) if isinstance(value, Tensor) else ()


def _resized_to(node: Node) -> int:
    """The size that a node gives to the storage of its argument; 0 for nodes that do not resize."""
    target = node.target
    if not isinstance(target, OpOverload):
        return 0
    name = target.name()
    if name == "inductor::resize_storage_bytes_":
        size = ops.bind(node)["new_size"]
        return size_of(ops.value_of(size) if isinstance(size, Node) else size) or 0
    return _span_of(node, None) if name in ("aten::resize_", "aten::resize_as_") else 0


def _span_of(node: Node, item: int | None) -> int:
    """Bytes from the start of the storage to the end of a node's tensors, or of one of them."""
    value = ops.value_of(node)
    if value is None and node.op == "get_attr":
        value = attribute(node.graph.owning_module, str(node.target))
    if isinstance(value, list | tuple):
        values = list(value) if item is None else list(value[item : item + 1])
        return sum(_span(each) for each in values)
    return _span(value)


def _span(value: Any) -> int:
    if not isinstance(value, Tensor):
        return 0
    last = size_of(value.storage_offset()) or 0
    for size, stride in zip(value.shape, value.stride(), strict=True):
        size, stride = size if type(size) is int else size_of(size), stride if type(stride) is int else size_of(stride)
        if not size or stride is None:
            return 0
        last += (size - 1) * stride
    return (last + 1) * value.element_size()
