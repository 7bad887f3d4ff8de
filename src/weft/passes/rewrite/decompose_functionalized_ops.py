"""Unwrap functionalized operators: call the operator that writes its arguments directly, copying only where needed.

Why: tracing wraps an operator that writes its arguments in a functional call, which copies every argument that the
operator writes. The copy is wasted if nothing reads the old contents afterwards.

Before::

    h: f32[4, 4] = relu(x)
    f: (None, f32[4, 4]) = higher_order.auto_functionalized(operator('lib.bump_.default'), x=h, y=y)
    i: f32[4, 4] = f[1]

After::

    h: f32[4, 4] = relu(x)
    f_bump: None = lib.bump_.default(x=h, y=y)

The pass knows both versions of the wrapper: the first copies arguments; the second copies base tensors, and its
arguments are slices or strided views of them. It knows Triton kernels too, whose wrapper names the written arguments.
An input of the graph is written only if the graph copies the result back into it. A view of another dtype counts as the
same memory.

Declines: results that are not used item by item; tensors that are not contiguous, since their copy would be.
Numerics: exact. Memory: one tensor less for each copy removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, Node

from weft.compat import schema_of
from weft.errors import PlanError, compose
from weft.graph import ops
from weft.graph.edit import Edit
from weft.graph.versions import dag_of
from weft.passes.base import NamedNodes, Numerics
from weft.passes.graphwise_pass import GraphwisePass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Step, Unwrap
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.functionalized import (
    WRAPPERS,
    BaseView,
    FunctionalizedKernel,
    FunctionalizedOp,
    is_kernel,
    read_kernel,
    read_wrapper,
)
from weft.rewriting.last_uses import LastUses, copied_back

AS_DTYPE = ops.op_of("view.dtype")


@dataclass(frozen=True)
class DecomposeFunctionalizedOps(GraphwisePass):
    """Call operators that write their arguments directly, copying only where needed."""

    numerics = Numerics.EXACT
    why_not_nested = "a call that runs a graph with writes is a barrier for other passes"

    def plan_one(self, graph: Graph, context: Context) -> Step:
        calls = [node for node in graph.nodes if node.op == "call_function"]
        sites = [node for node in calls if node.target in WRAPPERS or is_kernel(node)]
        if not sites:
            return self.step([], [])
        draft, uses = Draft(graph), LastUses(dag_of(graph))
        decisions: list[Decision] = []
        kernels: list[Unwrap] = []
        replacements: dict[Any, AnyNode] = {}
        for node in sites:
            call = read_kernel(node) if is_kernel(node) else read_wrapper(node)
            if isinstance(call, Refusal):
                decisions.append(self.decision(call.reason, call.sentence, node.name, blocking=call.blocking))
                continue
            if isinstance(call, FunctionalizedKernel):
                kernels.append(_unwrapped(uses, node, call))
                copies = [call.bases[name].name for name in kernels[-1].copied]
            else:
                copies = _write(draft, uses, node, call, replacements)
            copied = f"with copies of {', '.join(copies)}" if copies else "without a copy"
            decisions.append(self.decision(Reason.APPLIED, f"unwrapped {node.name} {copied}", node.name))
        return self.step([*draft.actions, *kernels], decisions)

    def apply(self, edit: Edit, step: Step) -> None:
        kernels = [action for action in step.actions if isinstance(action, Unwrap)]
        others = tuple(action for action in step.actions if not isinstance(action, Unwrap))
        super().apply(edit, replace(step, actions=others))
        nodes = NamedNodes(edit.graph.nodes)
        for action in kernels:
            _unwrap(edit, nodes, action)


def _unwrapped(uses: LastUses, node: Node, kernel: FunctionalizedKernel) -> Unwrap:
    """How to call a kernel: the arguments to copy first, and the copies back that become unnecessary."""
    copied: list[str] = []
    backs: list[str] = []
    for name, base in kernel.bases.items():
        results = kernel.items.get(name, ())
        back = _copied_back(uses, results, base)
        if _needs_copy(uses, node, base, results, back):
            copied.append(name)
            continue
        backs += [back.name] if back is not None else []
        for result in results:
            uses.give(base, result)
    return Unwrap(node.name, tuple(copied), tuple(backs))


def _unwrap(edit: Edit, nodes: NamedNodes, action: Unwrap) -> None:
    """Call a kernel without its wrapper."""
    node = nodes[action.call]
    kernel = read_kernel(node)
    if isinstance(kernel, Refusal):
        raise PlanError(compose("decompose-functionalized-ops", kernel.sentence))
    memory = dict(kernel.bases)
    for name in action.copied:
        copy = edit.call(ops.op_of("clone"), (memory[name],), before=node, name=f"{node.name}_{name}", like=[node])
        memory[name] = copy
    given: Any = node.kwargs["kwargs"]
    kwargs = {**{k: v for k, v in node.kwargs.items() if k != "tensors_to_clone"}, "kwargs": {**given, **memory}}
    target = ops.op_of("higher_order.triton_kernel_wrapper_mutation")
    edit.call(target, (), kwargs, before=node, name=f"{node.name}_kernel", like=[node], value=())
    items = {item: memory[name] for name, users in kernel.items.items() for item in users}
    backs = {nodes[name]: ops.bind(nodes[name])["self"] for name in action.erased}
    edit.replace_each({**items, **backs})
    for gone in (*backs, *items, node):
        edit.erase(gone)


def _write(
    draft: Draft, uses: LastUses, node: Node, call: FunctionalizedOp, replacements: dict[Any, AnyNode]
) -> list[str]:
    """Plan the call; returns the names of the tensors that are copied for it."""
    copies: list[str] = []
    memory: list[AnyNode] = []
    backs: list[Node] = []
    for k, base in enumerate(call.bases):
        results = call.items.get(call.num_returns + k, ())
        back = _copied_back(uses, results, base)
        source = replacements.get(base, base)
        if _needs_copy(uses, node, base, results, back):
            copies.append(base.name)
            memory.append(draft.call("clone", source, before=node))
            continue
        memory.append(source)
        backs += [back] if back is not None else []
        for result in results:
            uses.give(base, result)
    kwargs = {name: _argument(draft, node, value, memory, replacements) for name, value in call.kwargs.items()}
    made = draft.call(call.op, before=node, **kwargs)
    several = len(schema_of(call.op).returns) > 1
    for k, users in sorted(call.items.items()):
        for user in users:
            replacement = memory[k - call.num_returns] if k >= call.num_returns else made
            if several and k < call.num_returns:
                replacement = draft.call("operator.getitem", made, k, before=node)
            replacements[user] = replacement
            draft.replace({user: replacement}, [user, node])
    for back in backs:
        replacements[back] = ops.bind(back)["self"]
        draft.replace({back: replacements[back]}, [back])
    return copies


def _argument(draft: Draft, node: Node, value: Any, memory: list[AnyNode], replacements: Mapping[Any, AnyNode]) -> Any:
    if isinstance(value, list | tuple):
        return [_argument(draft, node, item, memory, replacements) for item in value]
    if not isinstance(value, BaseView):
        return replacements.get(value, value) if isinstance(value, Node) else value
    base = memory[value.base]
    return draft.call(value.target, base, *value.args, before=node) if value.target else base


def _copied_back(uses: LastUses, results: tuple[Node, ...], base: Node) -> Node | None:
    """The node that copies a result back into the input it was made from, possibly through views of another dtype."""
    pairs: list[tuple[Node, Any]] = [(result, base) for result in results]
    if base.target is AS_DTYPE:
        pairs += [(user, base.args[0]) for result in results for user in result.users if user.target is AS_DTYPE]
    return next((back for pair in pairs if (back := copied_back(uses, *pair)) is not None), None)


def _needs_copy(uses: LastUses, node: Node, base: Node, results: tuple[Node, ...], back: Node | None) -> bool:
    """Whether anything else reads the old contents of a tensor."""
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
        parts = list(item.values()) if isinstance(item, Mapping) else item
        found += _leaves(list(parts)) if isinstance(parts, list | tuple) else [item] if isinstance(item, Node) else []
    return found
