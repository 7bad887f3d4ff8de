"""Simple pipelines that the planner must never lose to; its search restarts from the best of their results.

    sink-waits
    hoist-launches,sink-waits
    bucket-all-gathers{strategy=pack},hoist-launches,sink-waits      each bucketing pass, in each of its strategies
    fuse-ddp-all-reduces{max-bytes=1048576/26214400},...             as DDP does it
    bucket-all-gathers{modules=*.[0-9] prefetch=1},...               as FSDP2 does it: by layer, one layer ahead

Contract: a variant is the result of such a pipeline on a copy of the graph, with the actions that lead to it. The
original graph does not change.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.fx import Graph, Node

from weft.bucketing.eligibility import Strategy
from weft.graph import ops
from weft.graph.collective import Collective, collectives
from weft.graph.dag import Dag
from weft.graph.edit import MEMBERS_KEY, copy_graph
from weft.graph.ops import Kind
from weft.graph.orders import placed, settled
from weft.passes.bucket_pass import BucketPass
from weft.passes.communication.bucket_all_gathers import BucketAllGathers
from weft.passes.communication.bucket_all_reduces import BucketAllReduces
from weft.passes.communication.bucket_reduce_scatters import BucketReduceScatters
from weft.passes.communication.bucket_transfers import BucketTransfers
from weft.passes.communication.fuse_ddp_all_reduces import FuseDdpAllReduces
from weft.passes.communication.hoist_launches import HoistLaunches
from weft.passes.communication.sink_waits import SinkWaits
from weft.plan.context import Context
from weft.plan.decision import Decision
from weft.plan.plan import Action, Arrange, Merge, Move, Settle, Step

STRATEGIES: tuple[Strategy, ...] = ("coalesced", "concat", "pack")
DDP_BYTES = (1 << 20, 25 << 20)
"""Caps of the first bucket and of all others, in bytes: the defaults of DistributedDataParallel."""
LAYERS = ("*.[0-9]", "*.[0-9][0-9]", "*.[0-9][0-9][0-9]")
"""Patterns of the modules that FSDP2 usually wraps: the items of a list of layers."""


@dataclass(frozen=True)
class Variant:
    """A graph with merged launches, in some order."""

    steps: tuple[Action, ...]
    """The actions that lead from the original graph to the nodes of `given`."""
    given: tuple[str, ...]
    """The names of the nodes in their order after these steps."""
    nodes: Sequence[Node]
    """The same nodes in the order of the variant."""
    decisions: tuple[Decision, ...] = ()
    """The decisions about the merges."""

    @functools.cached_property
    def dag(self) -> Dag:
        """The dependencies of the nodes in that order."""
        return Dag(self.nodes)

    def actions(self, order: Sequence[int]) -> list[Action]:
        """The actions that lead to an order of the nodes."""
        arranged = arrange([self.nodes[i].name for i in order], self.given)
        return [*self.steps, *([Settle()] if self.steps and arranged else []), *arranged]

    def members(self) -> Mapping[str, tuple[str, ...]]:
        """For each launch, the original launches that it replaces."""
        calls = (node for node in self.nodes if node.op == "call_function")
        launches = (node for node in calls if ops.launch_form(node.target) or ops.host_copy(node.target))
        return {node.name: node.meta.get(MEMBERS_KEY, (node.name,)) for node in launches}


def arrange(order: Sequence[str], given: Sequence[str]) -> list[Arrange]:
    """The action that arranges the given order into another; no action if they are equal."""
    place = {name: i for i, name in enumerate(given)}
    runs: list[list[int]] = []
    for i in map(place.__getitem__, order):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return [Arrange(tuple((given[first], given[last]) for first, last in runs))] if len(runs) > 1 else []


def variants(graph: Graph, dag: Dag, context: Context, choices: Iterable[Sequence[BucketPass]]) -> Iterator[Variant]:
    """The results of each choice of passes, each once: as they are, and with launches hoisted and waits sunk.

    The given graph, which the empty choice stands for, is not given as it is, but with waits sunk.
    A packed bucket with the members of a coalesced one is left out unless it saves kernels: lists avoid the copies.
    """
    context = replace(context, strict=False)
    seen: set[tuple[Action, ...]] = set()
    listed: dict[str, tuple[Action, ...]] = {}
    useless: set[BucketPass] = set()
    for passes in choices:
        if not passes:
            given = Variant((), tuple(node.name for node in dag.nodes), dag.nodes)
            if (sunk := _moved(dag, SinkWaits().plan_on(dag))) is not dag.nodes:
                yield replace(given, nodes=sunk)
            yield from _overlapped(given, dag)
            continue
        made, planned = copy_graph(graph), None
        if len(passes) == 1:
            (alone,) = passes
            planned = alone.plan(made, context)
            if alone.strategy == "coalesced":
                listed[alone.name()] = planned.actions
            elif _is_listed(planned.actions, listed.get(alone.name(), ())):
                useless.add(alone)
        if useless.issuperset(passes):
            continue
        steps = [rewrite.run(made, context, planned)[0] for rewrite in passes]
        merges = list[Action]()
        for step in steps:
            merges += [*([Settle()] if merges and step.actions else []), *step.actions]
        if not merges or (key := tuple(merges)) in seen:
            continue
        seen.add(key)
        nodes, decisions = tuple(made.nodes), tuple(d for step in steps for d in step.applied)
        merged = Variant(key, tuple(node.name for node in nodes), nodes, decisions)
        yield merged
        yield from _overlapped(merged, merged.dag)


def _overlapped(variant: Variant, dag: Dag) -> Iterator[Variant]:
    """The variant with launches hoisted and waits sunk as the passes do it, if that changes its order.

    This edits no graph, which would take four times as long. If a launch is hoisted above a second wait on its memory,
    that wait completes it, so sinking may break an edge of the original order. The variant then has two steps.
    """
    hoisted = _moved(dag, HoistLaunches().plan_on(dag))
    between = Dag(hoisted) if hoisted is not dag.nodes else dag
    sunk = _moved(between, SinkWaits().plan_on(between))
    if sunk is dag.nodes:
        return
    place = {node: i for i, node in enumerate(sunk)}
    edges = ((dag.nodes[i], node) for node, preds in zip(dag.nodes, dag.preds, strict=True) for i in preds)
    if all(place[earlier] < place[later] for earlier, later in edges):
        yield replace(variant, nodes=sunk)
        return
    names, given = tuple(node.name for node in hoisted), tuple(node.name for node in sunk)
    first, second = arrange(names, variant.given), arrange(given, names)
    steps = (*variant.steps, *([Settle()] if variant.steps else []), *first, Settle(), *second)
    yield replace(variant, steps=steps, given=given, nodes=sunk)


def _moved(dag: Dag, step: Step) -> list[Node]:
    """The nodes in the order after the moves of a step; the Dag's own list if it has none."""
    nodes = {node.name: node for node in dag.nodes}
    anchors: dict[Node, tuple[Node, bool]] = {}
    for move in step.actions:
        if isinstance(move, Move):
            for name in move.nodes:
                anchors.pop(nodes[name], None)
                anchors[nodes[name]] = nodes[move.anchor], move.side == "after"
    return settled(dag, placed(dag.nodes, anchors), keep_issue_order=True) if anchors else dag.nodes


def _is_listed(merges: Sequence[Action], listed: Sequence[Action]) -> bool:
    """Whether packing would give the same buckets as lists, without saving a cast or scaling."""
    packed = [m for m in merges if isinstance(m, Merge)]
    launches = [m.launches for m in listed if isinstance(m, Merge)]
    return [m.launches for m in packed] == launches and not any(m.folded for m in packed)


def all_choices(graph: Graph, kinds: frozenset[Kind], max_bytes: int | None) -> Iterator[tuple[BucketPass, ...]]:
    """The choices of merging passes for these kinds: none, each in each strategy, all of them, DDP's and FSDP2's."""
    yield ()
    found = [each for each in collectives(graph) if each.kind in kinds]
    if len(found) < 2 or not all(map(_has_numbers, found)):
        return
    caps = () if max_bytes is None else (max_bytes,)
    counts = Counter(each.kind for each in found)
    present = {kind for kind, count in counts.items() if count > 1}  # a single launch has nothing to merge with
    classes = (BucketAllGathers, BucketReduceScatters, BucketAllReduces, BucketTransfers)
    useful = [cls for cls in classes if sum(counts[kind] for kind in cls.kinds) > 1]
    for strategy in STRATEGIES:
        passes: list[BucketPass] = [cls(max_bytes=caps, strategy=strategy) for cls in useful]
        yield from ((each,) for each in passes)
        if len(passes) > 1:
            yield tuple(passes)
    if Kind.ALL_REDUCE in present and max_bytes is None:  # DDP closes a bucket only after it reaches its cap
        yield from ((FuseDdpAllReduces(max_bytes=DDP_BYTES, strategy=s),) for s in STRATEGIES[:2])
    if present & {Kind.ALL_GATHER, Kind.REDUCE_SCATTER} and counts[Kind.ALL_GATHER]:
        gathers = BucketAllGathers(max_bytes=caps, strategy="coalesced", modules=LAYERS, prefetch=1)
        scatters = BucketReduceScatters(max_bytes=caps, strategy="coalesced", modules=LAYERS)
        yield (gathers, scatters) if counts[Kind.REDUCE_SCATTER] else (gathers,)


def _has_numbers(collective: Collective) -> bool:
    """Whether all sizes are known numbers; a trial merge of symbolic sizes could add guards to the graph."""
    values = [ops.value_of(source) for source in collective.inputs]
    return all(isinstance(value, Tensor) and all(type(n) is int for n in value.shape) for value in values)
