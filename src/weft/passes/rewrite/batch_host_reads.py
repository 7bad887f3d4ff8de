"""Read several numbers from the device with one copy to the host.

Why: the host waits for the device at each read, and cannot run ahead. A mixture of experts reads two numbers for each
rank that it exchanges rows with.

Before::

    sent: i64[2] = sum.dim_IntList(a, [1])
    taken: i64[2] = sum.dim_IntList(b, [1])
    s0: i64[()] = select.int(sent, 0, 0)
    n0: int[u0] = _local_scalar_dense(s0)
    s1: i64[()] = select.int(taken, 0, 1)
    n1: int[u1] = _local_scalar_dense(s1)

After::

    n1_numbers: i64[4] = weft.copy_to_host.default([sent, taken])
    n1_number: i64[()] = select.int(n1_numbers, 0, 0)
    n0: int[u0] = _local_scalar_dense(n1_number)
    n1_number_1: i64[()] = select.int(n1_numbers, 0, 3)
    n1: int[u1] = _local_scalar_dense(n1_number_1)

A read joins the reads before it only if that delays nothing: every tensor that needs one of their numbers comes after
this read too. So the reads of different layers stay apart, and so do those of different chunks of a batch.

Declines: reads whose number is needed before the next one is known; numbers that are not elements of a vector, or of
vectors of several dtypes; elements that the device uses too; vectors that are written; reads inside nested graphs.
Numerics: exact. Memory: a few bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from weft.graph import ops
from weft.graph.contraction import Contraction
from weft.graph.dag import Dag
from weft.graph.effects import NUMBER_GUARDS
from weft.graph.host import is_read_on_host
from weft.graph.host_copies import COPY_TO_HOST
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.launches import is_written
from weft.rewriting.pattern import Match
from weft.rewriting.rules import why_not_apply

SELECT, UNBIND, ITEM = (ops.op_of(name) for name in ("select.int", "unbind.int", "operator.getitem"))
MAX_ELEMENTS = 4096
"""Maximum number of elements of a vector that is copied for some of them. A copy of 32 KiB is bound by its latency."""
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


@dataclass(frozen=True)
class Element:
    """One element of a vector."""

    vector: Node
    index: int
    size: int
    """Number of elements of the vector."""


@dataclass(frozen=True)
class BatchHostReads(GraphwisePass):
    """Read several numbers from the device with one copy."""

    numerics = Numerics.EXACT
    why_not_nested = "the host reads them inside a nested graph"

    def plan_one(self, graph: Graph, context: Context) -> Step:
        reads = [node for node in graph.nodes if node.target is ops.READ_NUMBER and is_read_on_host(node)]
        if not reads:
            return self.step([], [])
        draft, dag = Draft(graph), Dag(graph, register=reads, keep_issue_order=True)
        why = {read: _why_not_read(draft, read) for read in reads}
        decisions = [self._declined(refusal, read) for read, refusal in why.items() if refusal is not None]
        for batch, end in _batches(draft, dag, [read for read in reads if why[read] is None]):
            refusal = end if len(batch) == 1 else _build(draft, batch)
            if refusal is not None:
                decisions.append(self._declined(refusal, *batch))
                continue
            sentence = f"read {len(batch)} numbers with one copy: {batch[0].name} to {batch[-1].name}"
            decisions.append(self.decision(Reason.APPLIED, sentence, *(node.name for node in batch)))
        return self.step(draft.actions, decisions)

    def _declined(self, refusal: Refusal, *reads: Node) -> Decision:
        names = [read.name for read in reads]
        return self.decision(refusal.reason, refusal.sentence, *names, blocking=refusal.blocking)


def _batches(draft: Draft, dag: Dag, reads: Sequence[Node]) -> list[tuple[list[Node], Refusal]]:
    """Reads that become one copy, each with the reason that the next read does not join.

    A read joins the first batch that it can. Reads of several chunks of a batch may alternate.
    """
    contraction = Contraction(dag)
    batches: list[list[Node]] = []
    ends: dict[Node, Refusal] = {}
    for read in reads:
        for batch in batches:
            refusal = _why_not_join(draft, dag, contraction, batch, read)
            if refusal is None:
                batch.append(read)
                contraction.merge([dag.index[node] for node in batch])
                break
            ends.setdefault(batch[0], refusal)
        else:
            batches.append([read])
    alone = {batch[0]: Refusal(Reason.ALONE, f"{batch[0].name} stays: no other read can join it") for batch in batches}
    return [(batch, (alone | ends)[batch[0]]) for batch in batches]


def _why_not_read(draft: Draft, read: Node) -> Refusal | None:
    """Why a number cannot be read from a copy of a vector."""
    element = _element(read)
    if element is None:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{read.name} stays: it reads no element of a vector of known size")
    source = _source(read)
    user = next((user for user in source.users if user is not read), None)
    if user is not None:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{read.name} stays: {user.name} uses {source.name} too", user.name)
    if is_written(draft, element.vector):
        return Refusal(Reason.MUTATED, f"{read.name} stays: {element.vector.name} is written", element.vector.name)
    return None


def _why_not_join(
    draft: Draft, dag: Dag, contraction: Contraction, batch: Sequence[Node], read: Node
) -> Refusal | None:
    """Why the reads of a batch cannot wait for another read, or should not."""
    first = batch[0]
    if _kind(first) != _kind(read):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{first.name} stays: {read.name} has another dtype or device")
    needed = contraction.why_not_merge([dag.index[first], dag.index[read]])
    if needed is not None:
        sentence = f"{first.name} stays: {read.name} depends on {dag.nodes[needed].name}"
        return Refusal(Reason.DEPENDENCY, sentence, dag.nodes[needed].name)
    for earlier in batch:
        user = next((user for user in _tensor_users(earlier) if not dag.reaches(read, user)), None)
        if user is not None:
            sentence = f"{first.name} stays: {user.name} needs {earlier.name} and not {read.name}"
            return Refusal(Reason.NO_GAIN, sentence, user.name)
    return why_not_apply(draft, Match(nodes=[*batch, read], roots=(read,)))


def _tensor_users(read: Node) -> Iterable[Node]:
    """The calls that need a number, directly or through arithmetic, besides checks of it."""
    stack, seen = [read], {read}
    while stack:
        for user in stack.pop().users:
            if user in seen or user.op == "output" or ops.qualified_name(user.target) in NUMBER_GUARDS:
                continue
            seen.add(user)
            if isinstance(ops.value_of(user), NUMBERS):
                stack.append(user)
            else:
                yield user


def _build(draft: Draft, batch: Sequence[Node]) -> Refusal | None:
    """Plan one copy of all vectors that the reads need; each read takes its number from the copy."""
    elements = [element for read in batch if (element := _element(read)) is not None]
    begins: dict[Node, int] = {}
    length = 0
    for element in elements:
        if element.vector not in begins:
            begins[element.vector] = length
            length += element.size
    last = batch[-1]
    copied = draft.call(COPY_TO_HOST, list(begins), before=last, name=f"{last.name}_numbers")
    replacements: dict[AnyNode, AnyNode] = {
        _source(read): draft.call(
            "select.int", copied, 0, begins[e.vector] + e.index, before=last, name=f"{last.name}_number"
        )
        for read, e in zip(batch, elements, strict=True)
    }
    return draft.replace(replacements, [])


def _source(read: Node) -> Node:
    return read.all_input_nodes[0]


def _kind(read: Node) -> tuple[torch.dtype, torch.device]:
    value: Tensor = ops.value_of(_source(read))
    return value.dtype, value.device


def _element(read: Node) -> Element | None:
    """The element that a number is, if it is one of a vector of known size."""
    source = _source(read)
    if source.target is ITEM and isinstance(parts := source.args[0], Node) and parts.target is UNBIND:
        bound, index = ops.bind(parts), source.args[1]
    elif source.target is SELECT:
        bound = ops.bind(source)
        index = bound["index"]
    else:
        return None
    vector = bound["self"]
    value = ops.value_of(vector)
    if not isinstance(value, Tensor) or value.dim() != 1 or not isinstance(index, int):
        return None
    size = value.shape[0]
    is_known = type(size) is int and size <= MAX_ELEMENTS
    return Element(vector, index % size, size) if is_known else None
