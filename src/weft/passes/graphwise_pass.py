"""Base of the passes that plan each graph by itself, nested graphs included.

Contract: such a pass rewrites nested graphs too, or reports why it left one that it would have changed. It skips
nothing silently.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph

from weft.passes.base import Pass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Inside, Rewrite, Step
from weft.rewriting.nested import all_nested_graphs


@dataclass(frozen=True)
class GraphwisePass(Pass):
    """Base of the passes that plan each graph by itself."""

    why_not_nested: ClassVar[str] = ""
    """Why the pass does not rewrite nested graphs; empty if it does."""

    @abstractmethod
    def plan_one(self, graph: Graph, context: Context) -> Step:
        """Plan the step for one graph."""

    def plan(self, graph: Graph, context: Context) -> Step:
        step = self.plan_one(graph, context)
        actions: list[Any] = list(step.actions)
        decisions = list(step.decisions)
        for path, nested in all_nested_graphs(graph):
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
