"""Write results into buffers that are no longer needed.

Why: a functional graph copies a whole cache to change one row of it. If nothing reads the old tensor afterwards, the
row can be written in place.

Before::

    h: f32[1024, 64] = relu(x)
    i: f32[1024, 64] = index_put(h, [rows], values)
    r: f32[1024, 64] = neg(i)

After::

    h: f32[1024, 64] = relu(x)
    i_index_put: f32[1024, 64] = index_put_(h, [rows], values)
    r: f32[1024, 64] = neg(i_index_put)

Run this pass last: writes restrict the order of other nodes. Inputs and constants belong to the caller; an input is
written only if the graph copies the result back into it, and that copy is removed. slice_scatter and similar operators
become a copy into a view. Pointwise operators are left to compilers, which fuse them and reuse memory themselves,
unless `pointwise` is set.

Declines: a tensor that is used later, also through a view or by a launch in flight; one that is returned or belongs to
the caller; one that overlaps with another argument.
Numerics: exact. Memory: one tensor less per rewrite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from weft.compat import OpOverload, find_op, input_nodes
from weft.graph import metadata, ops
from weft.graph.operator_effects import is_pointwise, profile
from weft.graph.versions import dag_of
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step
from weft.rewriting.draft import Draft
from weft.rewriting.last_uses import LastUses, copied_back

SCATTERS = frozenset(
    (
        *("index_put", "_unsafe_index_put", "index_add", "index_copy", "index_fill", "scatter", "scatter_add"),
        *("scatter_reduce", "masked_scatter", "masked_fill", "put"),
    )
)
VIEW_SCATTERS = {
    "slice_scatter": "slice",
    "select_scatter": "select.int",
    "diagonal_scatter": "diagonal",
    "as_strided_scatter": "as_strided",
}


@dataclass(frozen=True)
class ReuseBuffers(GraphwisePass):
    """Write results into buffers that are no longer needed."""

    numerics = Numerics.EXACT
    why_not_nested = "a call that runs a graph with writes is a barrier for other passes"

    pointwise: bool = False
    """Write the results of pointwise operators in place too."""

    def plan_one(self, graph: Graph, context: Context) -> Step:
        dag = dag_of(graph)
        sites = [(node, source) for node in dag.nodes if (source := self._source(node)) is not None]
        if not sites:
            return self.step([], [])
        draft, uses = Draft(graph), LastUses(dag)
        decisions: list[Decision] = []
        for node, source in sites:
            back = copied_back(uses, node, source)
            refusal = _why_not(uses, node, source, back)
            if refusal is not None:
                decisions.append(self.decision(refusal.reason, refusal.sentence, node.name, blocking=refusal.blocking))
                continue
            uses.give(source, node)
            _write(draft, node, back)
            sentence = f"wrote {node.name} into {source.name}" + (f" and removed the copy {back.name}" if back else "")
            decisions.append(self.decision(Reason.APPLIED, sentence, node.name, source.name))
        return self.step(draft.actions, decisions)

    def _source(self, node: Node) -> Node | None:
        """The argument that the result of a node could be written into."""
        name = _base(node.target)
        known = name in VIEW_SCATTERS or (in_place(node.target) and (name in SCATTERS or self.pointwise))
        if not known or (name not in SCATTERS and name not in VIEW_SCATTERS and not is_pointwise(node.target)):
            return None
        source = ops.bind(node).get("self")
        value = ops.value_of(source) if isinstance(source, Node) else None
        is_fit = isinstance(value, Tensor) and metadata.same(value, ops.value_of(node))
        return source if is_fit and isinstance(source, Node) else None


def _base(target: Any) -> str:
    plain = isinstance(target, OpOverload) and target.namespace == "aten" and profile(target).plain
    return target.name().partition("::")[2].partition(".")[0] if plain else ""


def in_place(target: Any) -> OpOverload | None:
    """The in-place variant of an operator, which writes its result into its first argument."""
    if not isinstance(target, OpOverload):
        return None
    name, _, overload = target.name().partition("::")[2].partition(".")
    found = find_op("aten", f"{name.removeprefix('_unsafe_')}_", overload or "default")
    if found is None or [p[0] for p in ops.parameters(found)] != [p[0] for p in ops.parameters(target)]:
        return None
    return found if profile(found).writes == ("self",) else None


def _why_not(uses: LastUses, node: Node, source: Node, back: Node | None) -> Refusal | None:
    name = node.name
    if len(uses.held(source)) != 1 or len(uses.held(node)) != 1:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: the memory of {source.name} is not known")
    if uses.held(source) & uses.given and back is None:
        sentence = f"{name} stays: {source.name} belongs to the caller, and the result is not copied back into it"
        return Refusal(Reason.ESCAPES, sentence, source.name)
    others = [n for n in input_nodes(node) if n is not source and uses.held(n) & uses.held(source)]
    twice = _occurrences(node, source) > 1 and not is_pointwise(node.target)
    if others or twice:
        overlaps = (others or [source])[0].name
        return Refusal(Reason.MUTATED, f"{name} stays: {overlaps} overlaps with the memory to be written", overlaps)
    later = uses.first_use_after(node, source, but=back)
    if later is not None:
        return Refusal(Reason.DEPENDENCY, f"{name} stays: {later.name} uses {source.name} later", later.name)
    if back is None:
        return None
    place = uses.dag.index[back]
    writes = uses.dag.effects.memory.writes
    last_write = max(writes[storage][-1] for storage in uses.held(source) if storage in writes)
    if last_write != place or uses.held(node) & uses.dag.effects.held_by_outputs:
        return Refusal(Reason.ESCAPES, f"{name} stays: the graph needs it besides the copy {back.name}", back.name)
    return None


def _occurrences(node: Node, source: Node) -> int:
    return sum(a is source for a in ops.bind(node).values())


def _write(draft: Draft, node: Node, back: Node | None) -> None:
    given = draft.bind(node)
    source = given["self"]
    view = VIEW_SCATTERS.get(_base(node.target))
    if view is not None:
        rest = [value for name, value in given.items() if name not in ("self", "src")]
        part = draft.call(view, source, *rest, before=node)
        draft.call("copy_", part, given["src"], before=node)
        replacement = source
    else:
        args, kwargs = draft.arguments(node)
        replacement = draft.call(in_place(node.target), *args, before=node, **kwargs)
    draft.replace({node: replacement}, [node])
    if back is not None:
        draft.replace({back: replacement}, [back])
