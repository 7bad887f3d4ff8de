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

from torch import Tensor
from torch.fx import Graph, Node

from weft.compat import OpOverload, schema_of
from weft.graph import ops
from weft.graph.dag import Dag
from weft.graph.profiles import FUNCTIONAL_WRAPPERS
from weft.passes.base import Context, Numerics, Pass
from weft.passes.draft import AnyNode, Draft, Refusal
from weft.passes.last_uses import LastUses, copied_back
from weft.planning.plan import Decision, Reason, Step

ITEM = ops.op_of("operator.getitem")
WRAPPERS = {ops.op_of(f"higher_order.{name}"): name for name in sorted(FUNCTIONAL_WRAPPERS)}


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
            call = _read(node)
            if isinstance(call, Refusal):
                decisions.append(self.decision(call.reason, call.sentence, node.name, blocking=call.blocking))
                continue
            copies = _write(draft, uses, node, call, heirs)
            copied = f"with copies of {', '.join(copies)}" if copies else "without a copy"
            decisions.append(self.decision(Reason.APPLIED, f"{node.name} is called as it is, {copied}", node.name))
        return self.step(draft.actions, decisions)


@dataclass(frozen=True)
class _View:
    """An argument as a view of one of the tensors that are written."""

    base: int
    target: str = ""
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class _Call:
    """What a wrapper stands for."""

    op: OpOverload
    kwargs: Mapping[str, Any]
    """Arguments; those that are written are views, or lists of views."""
    bases: tuple[Node, ...]
    num_returns: int
    items: Mapping[int, tuple[Node, ...]]
    """The users by the item that they take."""


def _read(node: Node) -> _Call | Refusal:
    op = node.args[0] if node.args else None
    if not isinstance(op, OpOverload):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: it wraps no operator but a kernel")
    items: dict[int, tuple[Node, ...]] = {}
    for user in node.users:
        if user.target is not ITEM or not isinstance(user.args[1], int):
            return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: {user.name} takes all results", user.name)
        items[user.args[1]] = (*items.get(user.args[1], ()), user)
    schema = schema_of(op)
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    read = _second if WRAPPERS[node.target].endswith("v2") else _first
    kwargs, bases = read(dict(node.kwargs), written)
    if not all(isinstance(base, Node) and isinstance(ops.value_of(base), Tensor) for base in bases):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: what it writes are not single tensors")
    loose = next((base for base in bases if not _is_plain(base)), None)
    if loose is not None:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{node.name} stays: {loose.name} is not contiguous", loose.name)
    if not items:
        return Refusal(Reason.ALONE, f"{node.name} stays: nobody takes its results")
    return _Call(op, kwargs, tuple(bases), max(len(schema.returns), 1), items)


def _is_plain(base: Node) -> bool:
    """Whether a copy has the same layout: strides are counted from the start of memory in strided views of it."""
    value = ops.value_of(base)
    return value.is_contiguous() and value.storage_offset() == 0


def _first(given: dict[str, Any], written: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """Arguments of the first version: what is written is given as it is, each a tensor of its own."""
    bases: list[Any] = []
    for name in written:
        if given.get(name) is not None:
            bases.append(given[name])
            given[name] = _View(len(bases) - 1)
    return given, bases


def _second(given: dict[str, Any], written: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """Arguments of the second version: what is written is a view of one of the bases."""
    bases = list(given.pop("_all_bases"))
    made: dict[str, Any] = {name: value for name, value in given.items() if not name.startswith("_")}
    for name in written:
        length = given.get(f"_{name}_length")
        prefixes = [f"_{name}_{k}" for k in range(length)] if length is not None else [f"_{name}"]
        views = [_view(given, prefix) for prefix in prefixes]
        made[name] = views if length is not None else views[0]
    return made, bases


def _view(given: Mapping[str, Any], prefix: str) -> _View | None:
    base = given.get(f"{prefix}_base_index")
    if base is None:
        return None
    if f"{prefix}_slice_dim" in given:
        return _View(base, "slice", tuple(given[f"{prefix}_slice_{part}"] for part in ("dim", "start", "end")))
    if f"{prefix}_size" in given:
        return _View(base, "as_strided", tuple(given[f"{prefix}_{p}"] for p in ("size", "stride", "storage_offset")))
    return _View(base)


def _write(draft: Draft, uses: LastUses, node: Node, call: _Call, heirs: dict[Any, AnyNode]) -> list[str]:
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
    if not isinstance(value, _View):
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
