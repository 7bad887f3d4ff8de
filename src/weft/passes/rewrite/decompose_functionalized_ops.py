"""Call operators that write their arguments as they are, with only the copies that are needed.

Why: tracing makes calls of such operators functional by a wrapper that copies every argument they write. Where nobody
needs the old contents the copy is for nothing.

Before::

    h: f32[4, 4] = relu(x)
    f: (None, f32[4, 4]) = higher_order.auto_functionalized(operator('lib.bump_.default'), x=h, y=y)
    i: f32[4, 4] = f[1]

After::

    h: f32[4, 4] = relu(x)
    f_bump: None = lib.bump_.default(x=h, y=y)

Both versions of the wrapper are known: the first copies arguments, the second whole tensors of which the arguments are
slices or strided views. An input is written only where the graph ends by copying the very result back. A view of
another dtype is memory as any other.

Declines: wrappers of kernels (their table is the compiler's); results that are not taken one by one; tensors that are
not contiguous, which a copy would be.
Numerics: exact. Memory: one tensor less for each copy that goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from weft.compat import schema_of
from weft.graph import ops
from weft.graph.dag import Dag
from weft.passes.base import Context, Numerics, Pass
from weft.passes.draft import AnyNode, Draft, Refusal
from weft.passes.functionalized import WRAPPERS, Call, View, read_wrapper
from weft.passes.last_uses import LastUses, copied_back
from weft.planning.plan import Decision, Reason, Step


@dataclass(frozen=True)
class DecomposeFunctionalizedOps(Pass):
    """Call operators that write, with only the copies that are needed."""

    numerics = Numerics.EXACT

    def plan(self, graph: Graph, context: Context) -> Step:
        sites = [node for node in graph.nodes if node.op == "call_function" and node.target in WRAPPERS]
        if not sites:
            return self.step([], [])
        draft, uses = Draft(graph), LastUses(Dag(graph))
        decisions: list[Decision] = []
        heirs: dict[Any, AnyNode] = {}
        for node in sites:
            call = read_wrapper(node)
            if isinstance(call, Refusal):
                decisions.append(self.decision(call.reason, call.sentence, node.name, blocking=call.blocking))
                continue
            copies = _write(draft, uses, node, call, heirs)
            copied = f"with copies of {', '.join(copies)}" if copies else "without a copy"
            decisions.append(self.decision(Reason.APPLIED, f"{node.name} is called as it is, {copied}", node.name))
        return self.step(draft.actions, decisions)


def _write(draft: Draft, uses: LastUses, node: Node, call: Call, heirs: dict[Any, AnyNode]) -> list[str]:
    """Plan the call. Returns the tensors that are copied for it."""
    copies: list[str] = []
    memory: list[AnyNode] = []
    backs: list[Node] = []
    for k, base in enumerate(call.bases):
        results = call.items.get(call.num_returns + k, ())
        back = next((b for r in results if (b := copied_back(uses, r, base)) is not None), None)
        source = heirs.get(base, base)
        if _needs_copy(uses, node, base, results, back):
            copies.append(base.name)
            memory.append(draft.call("clone", source, before=node))
            continue
        memory.append(source)
        backs += [back] if back is not None else []
        for result in results:
            uses.give(base, result)
    kwargs = {name: _argument(draft, node, value, memory, heirs) for name, value in call.kwargs.items()}
    made = draft.call(call.op, before=node, **kwargs)
    several = len(schema_of(call.op).returns) > 1
    for k, users in sorted(call.items.items()):
        for user in users:
            heir = memory[k - call.num_returns] if k >= call.num_returns else made
            if several and k < call.num_returns:
                heir = draft.call("operator.getitem", made, k, before=node)
            heirs[user] = heir
            draft.replace({user: heir}, [user, node])
    for back in backs:
        heirs[back] = ops.bind(back)["self"]
        draft.replace({back: heirs[back]}, [back])
    return copies


def _argument(draft: Draft, node: Node, value: Any, memory: list[AnyNode], heirs: Mapping[Any, AnyNode]) -> Any:
    if isinstance(value, list | tuple):
        return [_argument(draft, node, item, memory, heirs) for item in value]
    if not isinstance(value, View):
        return heirs.get(value, value) if isinstance(value, Node) else value
    base = memory[value.base]
    return draft.call(value.target, base, *value.args, before=node) if value.target else base


def _needs_copy(uses: LastUses, node: Node, base: Node, results: tuple[Node, ...], back: Node | None) -> bool:
    """Whether somebody else needs what a tensor held before."""
    held = uses.held(base)
    if len(held) != 1 or len(results) > 1 or (held & uses.given and back is None):
        return True
    places = [k for k in _leaves([*node.args, *node.kwargs.values()]) if uses.held(k) & held]
    if len(places) > 1:
        return True
    if uses.first_use_after(node, base, but=back) is not None:
        return True
    returned = uses.dag.effects.held_by_outputs
    return back is not None and any(uses.held(result) & returned for result in results)


def _leaves(items: list[Any]) -> list[Node]:
    found: list[Node] = []
    for item in items:
        found += _leaves(list(item)) if isinstance(item, list | tuple) else [item] if isinstance(item, Node) else []
    return found
