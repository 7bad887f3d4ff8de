"""Create constants on the device where they are used.

Why: masks, positions and scales are often created on the host and copied. Each copy synchronises with the host and
prevents CUDA graph capture.

Before::

    c: i64[8](device='cpu') = arange(8, device=device('cpu'))
    m: i64[8](device='cpu') = mul(c, 2)
    g: i64[8] = _to_copy(m, device=device('cuda:0'))
    s: i64[8] = add(x, g)

After::

    c_arange: i64[8] = arange(8, device=device('cuda:0'))
    m: i64[8] = mul(c_arange, 2)
    g: i64[8] = _to_copy(m, device=device('cuda:0'))
    s: i64[8] = add(x, g)

The remaining `_to_copy` no longer copies; remove-noops removes it. Constants that feed the same operator move together
or not at all. Every operator that uses them on the host must compute its result from such constants alone.

Declines: constants that are returned, written, mixed with other tensors on the host, or given to operators that have
side effects or read values on the host; graphs with several devices.
Numerics: reassociates; another device may round floats computed from a constant differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from weft.compat import OpOverload, input_nodes
from weft.graph import ops
from weft.graph.operator_effects import profile
from weft.passes.base import Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step
from weft.rewriting.draft import Draft

CONSTRUCTORS = frozenset(
    ops.op_of(name)
    for name in (
        *("full", "zeros", "ones", "arange.default", "arange.start", "arange.start_step", "scalar_tensor", "eye"),
        *("linspace", "tril_indices", "triu_indices"),
    )
) - {None}
ON_HOST = frozenset(ops.op_of(name) for name in ("_local_scalar_dense", "item", "nonzero", "equal")) - {None}
INDEXED = frozenset(ops.op_of(name) for name in ("index_put", "index_put_", "index")) - {None}


@dataclass(frozen=True)
class MoveConstructors(GraphwisePass):
    """Create constants on the device where they are used."""

    numerics = Numerics.REASSOCIATES

    def plan_one(self, graph: Graph, context: Context) -> Step:
        values = [value for node in graph.nodes if isinstance(value := ops.value_of(node), Tensor)]
        devices = sorted({str(value.device) for value in values} - {"cpu", "meta"})
        made = [n for n in graph.nodes if n.target in CONSTRUCTORS and _is_on_host(n)]
        if not made or not devices:
            return self.step([], [])
        if len(devices) > 1:
            sentence = f"constants stay on the host: the graph uses {len(devices)} devices, {', '.join(devices)}"
            names = [node.name for node in made]
            return self.step([], [self.decision(Reason.UNSUPPORTED_FORM, sentence, *names)])
        draft = Draft(graph)
        decisions: list[Decision] = []
        for node, refusal in _judged(made).items():
            if refusal is not None:
                decisions.append(self.decision(refusal.reason, refusal.sentence, node.name, blocking=refusal.blocking))
                continue
            args, kwargs = draft.arguments(node)
            placed: dict[str, Any] = {**kwargs, "device": torch.device(devices[0])}
            replacement = draft.call(node.target, *args, before=node, **placed)
            draft.replace({node: replacement}, [node])
            sentence = f"created {node.name} on {devices[0]}"
            decisions.append(self.decision(Reason.APPLIED, sentence, node.name))
        return self.step(draft.actions, decisions)


def _is_on_host(node: Node) -> bool:
    value = ops.value_of(node)
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _judged(made: list[Node]) -> dict[Node, Refusal | None]:
    """For each constructor, why it or one that it must move with stays on the host; None if it moves."""
    reached = {node: _reached(node) for node in made}
    met: dict[Node, list[Node]] = {}
    for node in made:
        for other in reached[node]:
            met.setdefault(other, []).append(node)
    verdicts: dict[Node, Refusal | None] = {}
    movable = {*made, *met}
    for node in made:
        checks = (_why_not(node, user, movable) for one in (node, *reached[node]) for user in one.users)
        verdicts[node] = next(filter(None, checks), None)
    waiting = [node for node, refusal in verdicts.items() if refusal is not None]
    while waiting:  # a constructor that feeds the same operator as one that stays must stay too
        kept = waiting.pop()
        for other in {n for place in reached[kept] for n in met[place]}:
            if verdicts[other] is None:
                sentence = f"{other.name} stays: it is used together with {kept.name}, which stays"
                verdicts[other] = Refusal(Reason.DEPENDENCY, sentence, kept.name)
                waiting.append(other)
    return verdicts


def _reached(node: Node) -> dict[Node, None]:
    """The nodes on the host that depend on a constructor."""
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user not in found and user.op == "call_function" and _is_on_host(user):
                found[user] = None
                stack.append(user)
    return found


def _why_not(node: Node, user: Node, movable: set[Node]) -> Refusal | None:
    """Why a user keeps a constructor on the host."""
    name = node.name
    if user.op != "call_function" or not isinstance(user.target, OpOverload) or user.target in ON_HOST:
        return Refusal(Reason.ESCAPES, f"{name} stays: {user.name} needs it on the host", user.name)
    found: Any = profile(user.target)
    acts = found.writes or found.random or found.launch or found.ordered
    if acts or user.target.namespace not in ("aten", "prims"):
        return Refusal(Reason.HAS_EFFECT, f"{name} stays: {user.name} has side effects", user.name)
    given = [n for n in input_nodes(user) if _is_on_host(n) and n not in movable]
    if _is_on_host(user) and given:
        return Refusal(
            Reason.UNSUPPORTED_FORM, f"{name} stays: {user.name} also uses {given[0].name} on the host", given[0].name
        )
    bound = ops.bind(user)
    if _is_on_host(user) and bound.get("device") is not None:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: {user.name} names the host as its device", user.name)
    if user.target in INDEXED and not _is_on_host(user) and _would_wait(bound):
        sentence = f"{name} stays: {user.name} would synchronise with the device for its mask or value"
        return Refusal(Reason.UNSUPPORTED_FORM, sentence, user.name)
    return None


def _would_wait(given: dict[str, Any]) -> bool:
    """Whether a call indexes with a mask on the host, or stores a value from the host."""
    masks = [ops.value_of(n).dtype in (torch.bool, torch.uint8) for n in given["indices"] if n and _is_on_host(n)]
    return any(masks) or ("values" in given and _is_on_host(given["values"]))
