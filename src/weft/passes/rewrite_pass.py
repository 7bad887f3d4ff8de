"""Base of the passes that apply rewrite rules until none matches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph

from weft.graph.dag import collector_paused
from weft.passes.base import Pass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Inside, Rewrite, Step
from weft.rewriting.draft import Draft
from weft.rewriting.nested import all_nested_graphs
from weft.rewriting.rules import Rule, rewrite


@dataclass(frozen=True)
class RewritePass(Pass):
    """Base of the passes that consist of rewrite rules."""

    @abstractmethod
    def rules(self, context: Context) -> Iterable[Rule]:
        """The rules, in order of preference."""

    def plan(self, graph: Graph, context: Context) -> Step:
        rules = list(self.rules(context))
        actions: list[Any] = []
        decisions: list[Decision] = []
        with collector_paused():
            for path, found in ((), graph), *all_nested_graphs(graph):
                rewrites, decided = self._plan_one(found, rules)
                decisions += decided
                actions += rewrites if not path else [Inside(path, tuple(rewrites))] if rewrites else []
        return self.step(actions, decisions)

    def _plan_one(self, graph: Graph, rules: Sequence[Rule]) -> tuple[list[Rewrite], list[Decision]]:
        wanted = {id(target) for rule in rules for target in rule.targets}
        if not any(id(node.target) in wanted for node in graph.nodes):  # no rule can match: save the cost of a draft
            return [], []
        draft = Draft(graph)
        applied, refused = rewrite(draft, rules)
        decisions = [self._applied(*made) for made in applied]
        decisions += [self._declined(names, refusal) for names, refusal in refused]
        return draft.actions, decisions

    def _applied(self, old: tuple[str, ...], new: tuple[str, ...]) -> Decision:
        return self.decision(Reason.APPLIED, f"replaced {', '.join(old)} with {', '.join(new)}", *old)

    def _declined(self, names: tuple[str, ...], refusal: Refusal) -> Decision:
        return self.decision(refusal.reason, refusal.sentence, *names, blocking=refusal.blocking)
