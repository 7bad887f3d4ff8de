"""View a concatenation once instead of each of its inputs.

Why: heads and experts are reshaped one by one before they are concatenated. The views hide that the inputs are adjacent
slices of one tensor, and each is a call on the host.

Before::

    a: f32[2, 4] = view(x, [2, 4])
    b: f32[3, 4] = view(y, [3, 4])
    c: f32[5, 4] = cat([a, b])

After::

    c_cat: f32[5, 2, 2] = cat([x, y])
    c_view: f32[5, 4] = view(c_cat, [5, 4])

The views must keep the first dim: each input has as many rows as the tensor it is a view of.

Declines: views with other users; inputs that are not views, or that change the number of rows; concatenations along
other dims; unknown sizes.
Numerics: exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph

from weft.graph import ops
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.pattern import VIEWS, Match
from weft.rewriting.rules import why_not_apply

CAT = ops.op_of("cat")
VIEW_OPS = frozenset(ops.op_of(name) for name in VIEWS)


@dataclass(frozen=True)
class SinkViews(GraphwisePass):
    """View a concatenation once instead of each of its inputs."""

    numerics = Numerics.EXACT

    def plan_one(self, graph: Graph, context: Context) -> Step:
        sites = [n for n in graph.nodes if n.target is CAT and _is_of_views(ops.bind(n)["tensors"])]
        if not sites:
            return self.step([], [])
        draft = Draft(graph)
        decisions: list[Decision] = []
        for node in sites:
            parts: list[AnyNode] = draft.bind(node)["tensors"]
            refusal = _why_not(draft, node, parts)
            if refusal is None:
                whole = draft.call("cat", [draft.bind(part)["self"] for part in parts], before=node)
                replacement = draft.call("view", whole, list(draft.value(node).shape), before=node)
                refusal = draft.why_not_replace(node, replacement) or draft.replace({node: replacement}, [node, *parts])
            if refusal is not None:
                draft.forget()
                decisions.append(self.decision(refusal.reason, refusal.sentence, node.name, blocking=refusal.blocking))
                continue
            decisions.append(
                self.decision(
                    Reason.APPLIED, f"replaced the views of the inputs of {node.name} with one view", node.name
                )
            )
        return self.step(draft.actions, decisions)


def _is_of_views(parts: list[Any]) -> bool:
    return len(parts) > 1 and all(part.op == "call_function" and part.target in VIEW_OPS for part in parts)


def _why_not(draft: Draft, node: AnyNode, parts: list[AnyNode]) -> Refusal | None:
    name, value = node.name, draft.value(node)
    if any(part.target not in VIEW_OPS for part in parts):
        return Refusal(Reason.DEPENDENCY, f"{name} stays: an earlier rewrite changed one of its inputs")
    sources = [draft.value(draft.bind(part)["self"]) for part in parts]
    values = [draft.value(part) for part in parts]
    is_known = isinstance(value, Tensor) and all(type(n) is int for v in (*sources, *values) for n in v.shape)
    if not is_known or not all(v.dim() for v in (*sources, *values)) or draft.bind(node)["dim"] % value.dim():
        return Refusal(
            Reason.UNSUPPORTED_FORM, f"{name} stays: it does not join along the first dim, or a size is unknown"
        )
    rests = {tuple(v.shape[1:]) for v in sources}
    keeps_rows = all(a.shape[0] == b.shape[0] and a.dtype == b.dtype for a, b in zip(sources, values, strict=True))
    if len(rests) > 1 or not keeps_rows or {v.dtype for v in sources} != {value.dtype}:
        return Refusal(
            Reason.UNSUPPORTED_FORM,
            f"{name} stays: its views change the number of rows, or their sources differ in shape",
        )
    if not all(v.is_contiguous() for v in sources):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: the source of a view is not contiguous")
    other = next((user for part in parts for user in draft.users(part) if user is not node), None)
    if other is not None:
        return Refusal(Reason.NO_GAIN, f"{name} stays: {other.name} also uses one of its views", other.name)
    return why_not_apply(draft, Match(nodes=[node, *dict.fromkeys(parts)], roots=(node,)))
