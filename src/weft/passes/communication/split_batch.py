"""Compute a step in chunks of the batch, so that one chunk communicates while another computes.

Why: tensor parallelism gathers and scatters activations between products that need them. A single batch has nothing to
compute meanwhile. If it is split in two, one half computes while the other communicates.

Before::

    h: f32[4, 8] = mm(x, w)
    ar: f32[4, 8] = all_reduce(h, 'sum', 'tp')
    y: f32[4, 8] = wait(ar)
    g: f32[8, 8] = mm(t, y)

After::

    h_chunk0: f32[2, 8] = mm(x_chunk0, w)
    h_chunk1: f32[2, 8] = mm(x_chunk1, w)
    ar_chunk0: f32[2, 8] = all_reduce(h_chunk0, 'sum', 'tp')
    ...
    g: f32[8, 8] = add(g_chunk0, g_chunk1)

The pass follows the rows of the batch through the graph, operator by operator (`weft.rewriting.batch_rows`). Values
that do not depend on the batch, such as gathered weights, are computed once. Gradients of weights are added up in the
order of the chunks, after casts, and reduced over ranks once. If a cluster is given, the chunks run in a staggered
order, each some exchanges behind the chunk before it, if that is shorter in the simulator. A later pass improves it.

Declines: an operator that mixes rows (a statistic over the batch, a position counted over all tokens, an exchange of
rows that is not part of expert routing), one without a rule, random numbers, a batch that does not split, and a step
that would not be shorter. Without `chunks`, the pass tries two to four on the given cluster, each planned by
`schedule-overlap`.
Numerics: reassociates: gradients of weights and the loss are sums of the chunks' sums. Bytes on the wire: unchanged, in
more launches. Memory: no gathered weight is held twice; results of several chunks may be alive together.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from weft.errors import GraphError
from weft.graph import metadata, ops
from weft.graph.assumed_sizes import assume_part
from weft.graph.dag import Dag
from weft.graph.edit import Edit, copy_graph
from weft.graph.groups import group_argument
from weft.graph.listings.call_lines import GroupOf, write
from weft.graph.versions import dag_of
from weft.passes.base import Numerics, Pass
from weft.passes.communication.schedule_overlap import Planner, ScheduleOverlap, fit_rank
from weft.passes.portfolio import arrange
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.plan.plan import Rewrite, Settle, Step
from weft.quantities import size_text
from weft.rewriting.batch_rows import BatchDim, BatchRows, Loss, OfChunk, Sum
from weft.rewriting.draft import Draft
from weft.rewriting.new_nodes import AnyNode, New
from weft.rewriting.routed_rows import Routed, has_total
from weft.scheduling.search import Outcome
from weft.simulation.build import program_of
from weft.simulation.memory import Footprint
from weft.simulation.simulator import run

CHOICES = (2, 3, 4)
"""Numbers of chunks that are tried on a cluster."""
LAGS = (1, 2, 3)
"""Numbers of exchanges by which a chunk may trail the chunk before it, in the orders that are tried on a cluster."""
CHUNK = "_chunk"
"""Ends the name of a node, before the number of its chunk."""
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class SplitBatch(Pass):
    """Compute the step in chunks of the batch."""

    numerics = Numerics.REASSOCIATES
    reorders_launches = True

    chunks: int = 0
    """Number of chunks. 0: the number from two to four that gives the shortest step, if it is shorter than one."""
    inputs: tuple[str, ...] = ()
    """Names of the inputs whose dim 0 is the batch. None given: all inputs of whole numbers, such as tokens."""

    def plan(self, graph: Graph, context: Context) -> Step:
        given = self._inputs(graph)
        if isinstance(given, Refusal):
            return self.step([], [self.decision(given.reason, given.sentence)])
        if self.chunks == 1:
            return self.step(
                [], [self.decision(Reason.NO_GAIN, "the batch is not split: one chunk is the whole batch")]
            )
        if self.chunks == 0 and context.cluster is None:
            sentence = "the batch is not split: without a cluster the gain is unknown; chunks=2 splits it"
            return self.step([], [self.decision(Reason.NO_GAIN, sentence)])
        if self.chunks:
            return self._staggered(graph, self._split(graph, given, self.chunks), context)
        return self._best(graph, given, context)

    def apply(self, edit: Edit, step: Step) -> None:
        """Carry out the step, and assume that each chunk has an even part of the sizes that the data decides."""
        wholes = {node.name: ops.value_of(node) for node in edit.graph.nodes if _is_number(node)}
        super().apply(edit, step)
        parts: dict[str, list[Node]] = {}
        for node in edit.graph.nodes:
            name, is_chunk, _ = node.name.rpartition(CHUNK)
            if is_chunk and name in wholes:
                parts.setdefault(name, []).append(node)
        for name, nodes in parts.items():
            for node in nodes:
                assume_part(ops.value_of(node), wholes[name], len(nodes))

    def _inputs(self, graph: Graph) -> list[Node] | Refusal:
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        found = [node for node in nodes if (node.name in self.inputs if self.inputs else _is_integers(node))]
        extents = [ops.value_of(node).shape[0] for node in found if isinstance(ops.value_of(node), Tensor)]
        is_known = all(isinstance(extent, int) for extent in extents)
        if is_known and len(set(extents)) == 1 and len(found) >= len(self.inputs):
            return found
        what = "no input is known to be the batch" if not found else "the inputs have different sizes in dim 0"
        if not is_known:
            what = "the size of the inputs in dim 0 is not known"
        return Refusal(Reason.UNSUPPORTED_FORM, f"the batch is not split: {what}; name them: inputs=tokens/targets")

    def _best(self, graph: Graph, given: Sequence[Node], context: Context) -> Step:
        """The shortest of the steps that can be made, each ordered by the planner."""
        limit = context.memory_limit_bytes
        whole = _planned(graph, context)
        tried = [(chunks, self._staggered(graph, self._split(graph, given, chunks), context)) for chunks in CHOICES]
        steps = [(chunks, step) for chunks, step in tried if step.actions]
        if not steps:
            return tried[0][1]
        found = {chunks: self._planned_in_chunks(graph, step, context) for chunks, step in steps}
        ranks = {chunks: _fit(outcome, limit) for chunks, outcome in found.items()}
        best, step = min(steps, key=lambda each: (ranks[each[0]], each[0]))
        shown = [f"the whole step takes {_shown(whole, limit)}"]
        shown += [f"{chunks} chunks {_shown(outcome, limit)}" for chunks, outcome in found.items()]
        sentence = f"planned, {', '.join(shown)}"
        if ranks[best][:2] >= _fit(whole, limit)[:2]:
            return self.step([], [self.decision(Reason.NO_GAIN, f"the batch is not split: {sentence}")])
        (done,) = step.decisions
        return self.step(step.actions, [replace(done, sentence=f"{done.sentence}; {sentence}")])

    def _planned_in_chunks(self, graph: Graph, step: Step, context: Context) -> Outcome:
        trial = copy_graph(graph)
        self.run(trial, replace(context, strict=False), step)
        return _planned(trial, context)

    def _staggered(self, graph: Graph, step: Step, context: Context) -> Step:
        """The step with its chunks in the shortest of a few orders.

        If all chunks exchange rows at the same point, none computes meanwhile. The planner moves a job only past a few
        others, which does not undo that order for more than two chunks.
        """
        if context.cluster is None or not step.actions:
            return step
        trial = copy_graph(graph)
        self.run(trial, replace(context, strict=False), step)
        program, dag = program_of(trial, context.groups, context.cluster), dag_of(trial)
        orders = [list(range(len(dag.nodes))), *(_stagger(dag, lag) for lag in LAGS)]
        footprint, limit = Footprint(program), context.memory_limit_bytes
        ranks = [_rank(run(program, order).step_ns, footprint.peak(order), limit) for order in orders]
        best = ranks.index(min(ranks))
        names = [node.name for node in dag.nodes]
        arranged = arrange([names[i] for i in orders[best]], names)
        return self.step([*step.actions, Settle(), *arranged], step.decisions) if arranged else step

    def _split(self, graph: Graph, given: Sequence[Node], chunks: int) -> Step:
        nodes = list(graph.nodes)
        batch = BatchRows(nodes, given, chunks)
        found = batch.refusal or _Chunks(Draft(graph), batch).build(nodes)
        if isinstance(found, Refusal):
            return self.step([], [self.decision(found.reason, found.sentence, blocking=found.blocking)])
        sentence = f"split the batch of {', '.join(node.name for node in given)} into {chunks} chunks"
        return self.step(found, [self.decision(Reason.APPLIED, sentence, *(node.name for node in given))])


def _stagger(dag: Dag, lag: int) -> list[int]:
    """An order in which each chunk is `lag` exchanges behind the chunk before it.

    A node's slot is the number of exchanges of its chunk before it, later for later chunks. Slots run in order, and in
    each of them the chunks in turn. Nodes that the chunks share run as soon as possible, and sums over
    chunks as soon as the last chunk is known.
    """
    slots: list[int] = []
    for node, preds in zip(dag.nodes, dag.preds, strict=True):
        chunk = _chunk_of(node)
        slot = max([slots[p] for p in preds], default=0)
        if chunk is not None:
            slot = max(slot, lag * chunk) + ops.is_wait(node.target)
        if node.op == "output":
            slot = len(dag.nodes)
        slots.append(slot)
    keys = [
        (slot, -1 if (chunk := _chunk_of(node)) is None else chunk) for slot, node in zip(slots, dag.nodes, strict=True)
    ]
    missing = [len(preds) for preds in dag.preds]
    ready = [(keys[i], i) for i, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(i)
        for succ in dag.succs[i]:
            missing[succ] -= 1
            if not missing[succ]:
                heapq.heappush(ready, (keys[succ], succ))
    return order


def _chunk_of(node: Node) -> int | None:
    """The number of the chunk that a node belongs to; None for a node that all chunks share."""
    found = re.search(rf"{CHUNK}(\d+)(_\d+)?$", node.name)
    return int(found[1]) if found else None


def _is_number(node: Node) -> bool:
    return isinstance(ops.value_of(node), torch.SymInt)


def _is_integers(node: Node) -> bool:
    value = ops.value_of(node)
    return isinstance(value, Tensor) and value.dtype in INTEGERS and value.dim() > 0


def _planned(graph: Graph, context: Context) -> Outcome:
    """The planner's order of the step: the shortest within the memory limit, or else one with the smallest peak."""
    return Planner(ScheduleOverlap(), graph, replace(context, effort="fast", strict=False)).best().outcome


def _rank(step_ns: int, peak_bytes: int, limit_bytes: int | None) -> tuple[bool, int, int]:
    return fit_rank(step_ns, peak_bytes, peak_bytes if limit_bytes is None else limit_bytes)


def _fit(outcome: Outcome, limit_bytes: int | None) -> tuple[bool, int, int]:
    return _rank(outcome.step_ns, outcome.peak_bytes, limit_bytes)


def _shown(outcome: Outcome, limit_bytes: int | None) -> str:
    """The step, with its peak memory if there is a limit."""
    step = f"{outcome.step_ns / 1e6:.3g} ms"
    if limit_bytes is None:
        return step
    fits = "" if outcome.peak_bytes <= limit_bytes else ", which does not fit"
    return f"{step} (peak {size_text(outcome.peak_bytes)}{fits})"


class _Chunks:
    """Plans the calls of all chunks."""

    def __init__(self, draft: Draft, batch: BatchRows) -> None:
        self.draft, self.batch = draft, batch
        self.parts: dict[Node, list[AnyNode]] = {}
        self.heirs: dict[Node, AnyNode] = {}
        """Nodes whose whole value is made of the chunks', with that value."""

    def build(self, nodes: Sequence[Node]) -> list[Rewrite] | Refusal:
        """The rewrites, one for each node that depends on the batch."""
        actions: list[Rewrite] = []
        try:
            for node in nodes:
                if node in self.batch.followed:
                    made = self._chunks_of(node)
                    texts = [write(each.name, each.target, each.args, each.kwargs) for each in made]
                    heirs = ((node.name, self.heirs[node].name),) if node in self.heirs else ()
                    is_call = node.op == "call_function"
                    before = node if is_call else node.next
                    if None in texts:
                        return Refusal(Reason.UNKNOWN_SIZE, f"the batch is not split: {node.name} has a symbolic size")
                    calls = tuple(text for text in texts if text is not None)
                    actions.append(Rewrite(calls, before.name, heirs, (node.name,) if is_call else ()))
        except GraphError as error:
            sentence = f"the batch is not split: {str(error).splitlines()[0]}"
            return Refusal(Reason.UNSUPPORTED_FORM, sentence)
        wrong = next((old for old, new in self.heirs.items() if not self._is_alike(old, new)), None)
        if wrong is not None:
            return Refusal(Reason.UNSUPPORTED_FORM, f"the batch is not split: {wrong.name} would get another type")
        return actions

    def _is_alike(self, old: Node, new: AnyNode) -> bool:
        return metadata.same(ops.value_of(old), self.draft.value(new))

    def _chunks_of(self, node: Node) -> list[New]:
        """The planned calls for a node: one for each chunk, and those that make its whole value."""
        made: list[New] = []
        followed = self.batch.followed[node]
        if node.op == "placeholder":
            self.parts[node] = [self._slice(node, 0, c, node.next, made) for c in range(self.batch.chunks)]
            return made
        self.parts[node] = [self._chunk(node, c, made) for c in range(self.batch.chunks)]
        for part in self.parts[node]:
            self.draft.value(part)  # raises if the operator refuses the chunk
        whole_users = [user for user in node.users if not self._is_chunked(user, node)]
        if whole_users and isinstance(followed.form, BatchDim | Sum):
            self.heirs[node] = self._whole(node, followed.form, made)
        elif whole_users and has_total(node, followed.form):
            self.heirs[node] = self._added(node, self.parts[node], made)
        elif whole_users and isinstance(followed.form, Routed):
            raise GraphError(f"{node.name} is on the way to an expert and used by {whole_users[0].name}")
        if whole_users and isinstance(followed.form, OfChunk):
            raise GraphError(f"{node.name} is the seed of an attention and used by {whole_users[0].name}")
        if isinstance(followed.form, Loss) and node.target is getitem:
            self.heirs[node] = self._loss(node, made)
        return made

    def _is_chunked(self, user: Node, node: Node) -> bool:
        """Whether a user takes the chunks of a node, not its whole value."""
        if user not in self.batch.followed:
            return False
        form, mine = self.batch.form(user), self.batch.form(node)
        return isinstance(form, Sum) if isinstance(mine, Sum) else True

    def _chunk(self, node: Node, c: int, made: list[New]) -> New:
        followed = self.batch.followed[node]
        slices = {source: self._slice(source, dim, c, node, made) for source, dim in followed.slices.items()}

        def taken(source: Node) -> Any:
            form = self.batch.form(source)
            if source in slices:
                return slices[source]
            if source in self.parts and not (isinstance(form, Sum) and not isinstance(followed.form, Sum)):
                is_item = isinstance(form, Loss) and source.target is getitem
                return self.heirs[source] if is_item else self.parts[source][c]
            return self.heirs.get(source, source)

        args, kwargs = map_arg((node.args, dict(node.kwargs)), taken)
        if followed.literals:
            bound = ops.bind_arguments(node.target, args, kwargs)
            bound.update(followed.literals)
            args, kwargs = _called(node.target, bound)
        if ops.launch_form(node.target) is not None:
            group = group_argument(node)
            args = tuple(GroupOf(node) if part is group else part for part in args)
        return self._call(node, node.target, args, kwargs, f"{node.name}{CHUNK}{c}", made)

    def _slice(self, source: Node, dim: int, c: int, before: Node, made: list[New]) -> New:
        whole = self.heirs.get(source, source)
        extent = ops.value_of(source).shape[dim] // self.batch.chunks
        args = (whole, dim, c * extent, (c + 1) * extent)
        return self._call(before, ops.op_of("slice"), args, {}, f"{source.name}{CHUNK}{c}", made)

    def _whole(self, node: Node, form: BatchDim | Sum, made: list[New]) -> AnyNode:
        parts = self.parts[node]
        if isinstance(form, BatchDim):
            if form.outer > 1:
                raise GraphError(f"{node.name} is returned with the rows of several blocks")
            return self._call(node, ops.op_of("cat"), (list(parts), form.dim), {}, f"{node.name}_whole", made)
        total = self._added(node, parts, made)
        if form.factor != 1.0:
            total = self._call(node, ops.op_of("mul.Scalar"), (total, form.factor), {}, f"{node.name}_mean", made)
        return total

    def _added(self, node: Node, parts: Sequence[AnyNode], made: list[New]) -> AnyNode:
        """The sum of the chunks, in their order."""
        total = parts[0]
        for part in parts[1:]:
            total = self._call(node, ops.op_of("add"), (total, part), {}, f"{node.name}_sum", made)
        return total

    def _loss(self, node: Node, made: list[New]) -> AnyNode:
        """The mean loss of the whole batch, or its weight, from the chunks' sums and weights."""
        total = self._added(node, self.parts[node], made)
        if node.args[1] == 1:
            return total
        both = [part.args[0] for part in self.parts[node]]
        weights = [
            self._call(node, getitem, (part, 1), {}, f"{node.name}_weight{c}", made) for c, part in enumerate(both)
        ]
        weight = self._added(node, weights, made)
        return self._call(node, ops.op_of("div"), (total, weight), {}, f"{node.name}_mean", made)

    def _call(self, before: Node, target: Any, args: Any, kwargs: Any, name: str, made: list[New]) -> New:
        call = self.draft.call(target, *args, before=before, name=name, **kwargs)
        made.append(call)
        return call


def _called(target: Any, bound: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name as a call takes them."""
    parameters = ops.parameters(target)
    args = tuple(bound[name] for name, by_keyword, _, _ in parameters if not by_keyword and name in bound)
    return args, {name: bound[name] for name, by_keyword, _, _ in parameters if by_keyword and name in bound}
