"""Nested graphs: which graphs the calls of a graph run, and passes that plan each of them by itself.

Contract: a pass that works graph by graph rewrites the graphs that calls run too, or says of each that it would have
changed why it did not. Nothing in such a graph is skipped in silence.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph, GraphModule, Node

from weft.compat import HigherOrderOperator
from weft.passes.base import Context, Pass
from weft.plan.plan import Decision, Inside, Reason, Rewrite, Step

NESTING = frozenset(
    (
        *("cond", "while_loop", "scan", "map_impl", "invoke_subgraph", "wrap", "tag_activation_checkpoint"),
        *("wrap_activation_checkpoint", "wrap_with_set_grad_enabled", "wrap_with_autocast"),
    )
)
"""Operators that run a nested graph as it is; others may take it for a template of their own."""


def nested_graphs(graph: Graph, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Graph]]:
    """The graphs that calls of a graph run, at any depth, each with the names of the attributes that lead to it."""
    owner = graph.owning_module
    for node in graph.nodes:
        if node.op != "get_attr" or not node.users or owner is None:
            continue
        runs = all(isinstance(u.target, HigherOrderOperator) and u.target.name() in NESTING for u in node.users)
        nested = getattr(owner, str(node.target), None)
        if runs and isinstance(nested, GraphModule) and _has_types(nested):
            inner = (*path, str(node.target))
            yield inner, nested.graph
            yield from nested_graphs(nested.graph, inner)


def _has_types(module: GraphModule) -> bool:
    return all("val" in n.meta for n in module.graph.nodes if n.op in ("placeholder", "call_function"))


def taken_out(nodes: Sequence[Node]) -> list[Rewrite]:
    """The action that takes nodes out of a graph; none where there are none."""
    names = tuple(node.name for node in nodes)
    return [Rewrite((), names[0], (), names)] if names else []


@dataclass(frozen=True)
class GraphwisePass(Pass):
    """Base of the passes that plan each graph by itself."""

    why_not_nested: ClassVar[str] = ""
    """Why the pass leaves graphs that calls run as they are; empty: it does not."""

    @abstractmethod
    def plan_one(self, graph: Graph, context: Context) -> Step:
        """Decide what to do to one graph."""

    def plan(self, graph: Graph, context: Context) -> Step:
        step = self.plan_one(graph, context)
        actions: list[Any] = list(step.actions)
        decisions = list(step.decisions)
        for path, nested in nested_graphs(graph):
            inner = self.plan_one(nested, context)
            if inner.actions and self.why_not_nested:
                decisions.append(self._left(path, inner))
                continue
            decisions += inner.decisions
            rewrites = tuple(action for action in inner.actions if isinstance(action, Rewrite))
            actions += [Inside(path, rewrites)] if rewrites else []
        return self.step(actions, decisions)

    def _left(self, path: tuple[str, ...], step: Step) -> Decision:
        names = [name for decision in step.applied for name in decision.nodes]
        sentence = f"{', '.join(names)} in the nested graph {'.'.join(path)} stay: {self.why_not_nested}"
        return self.decision(Reason.HAS_EFFECT, sentence, *names)
