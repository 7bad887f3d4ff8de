"""Remove collectives over groups of one rank.

Why: a mesh axis of size one leaves its gathers and reductions in the graph. Each is a useless launch and copy.

Before::

    ar: f32[4, 4] = all_reduce(h, 'sum', 'tp')
    w: f32[4, 4] = wait(ar)
    r: f32[4, 4] = relu(w)

After::

    r: f32[4, 4] = relu(h)

With one rank the result of every collective is its input. It becomes a copy if it needs memory of its own, because the
result or the input is written or returned. A launch into a given buffer becomes a copy into that buffer; an in-place
launch is simply removed.

Declines: nothing. Sends and receives are not touched: they need a peer, which a group of one rank does not have.
Numerics: exact. Bytes on the wire: none before or after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from weft.graph import metadata, ops
from weft.graph.collective import Collective, collectives
from weft.graph.ops import Kind
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Step
from weft.rewriting.draft import AnyNode, Draft

KINDS = frozenset({Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.BROADCAST})


@dataclass(frozen=True)
class RemoveSingleRankCollectives(GraphwisePass):
    """Remove collectives over groups of one rank."""

    numerics = Numerics.EXACT

    def plan_one(self, graph: Graph, context: Context) -> Step:
        launches = [c for c in collectives(graph) if c.kind in KINDS]
        found = [c for c in launches if context.groups.group(c.group_argument).size == 1]
        if not found:
            return self.step([], [])
        draft = Draft(graph)
        decisions: list[Decision] = []
        for collective in found:
            _remove(draft, collective)
            sentence = f"removed {collective.launch.name}: its group has one rank"
            decisions.append(self.decision(Reason.APPLIED, sentence, collective.launch.name))
        return self.step(draft.actions, decisions)


def _remove(draft: Draft, collective: Collective) -> None:
    """Replace each result, and then each wait for it, with the tensor that was sent or a copy of it."""
    launch = collective.launch
    waits = sorted(collective.waits, key=draft.position)
    results: list[Node] = collective.results
    sent: list[AnyNode] = [draft.bind(launch)[collective.form.tensors]]
    if collective.form.coalesced:
        sent = [sent[0][node.args[1]] for node in results]  # type: ignore[index]
    for result, source in zip(results, sent, strict=True):
        _replace(draft, collective, result, source, waits)
    for wait in waits:
        waited = draft.arguments(wait)[0][0]
        draft.replace({wait: waited}, [wait])


def _replace(draft: Draft, collective: Collective, result: Node, source: AnyNode, waits: list[Node]) -> None:
    written = collective.form.written
    if written is not None:
        target = draft.bind(collective.launch)[written]
        target = target[result.args[1]] if collective.form.coalesced else target
        replacement = target if target is source else draft.call("copy_", target, source, before=result)
        draft.replace({result: replacement}, [result, collective.launch])
        return
    mine = [result, *(wait for wait in waits if wait.args[0] is result)]
    if all(draft.why_not_replace(node, source) is None for node in mine):
        draft.replace({result: source}, [result, collective.launch])
        return
    copy = draft.call("clone", source, before=result)
    if not metadata.same(draft.value(copy), ops.value_of(result)):
        draft.forget()
        copy = draft.call("clone", source, memory_format=torch.contiguous_format, before=result)
    draft.replace({result: copy}, [result, collective.launch])
