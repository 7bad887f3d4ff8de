"""Rewrite rules: a pattern, a condition and a replacement; and the loop that applies them until none matches.

    def fused(draft: Draft, match: Match) -> AnyNode | Refusal | None:
        if draft.value(match["bias"]).dtype != draft.value(match.root).dtype:
            return Refusal(Reason.UNSUPPORTED_FORM, f"{match.root.name} stays: the dtypes differ")
        return draft.call("addmm", match["bias"], match["x"], match["w"], before=match.root)

    RULES = (Rule(op("add", op("mm", Var("x"), Var("w")), Var("bias")).either_way(), fused),)

`replace` returns a node or a planned call (one per root for patterns with several roots), a Refusal if the pattern
matched but the rewrite must not be made, or None if it does not apply after all.

Contract: the loop visits every node in graph order, and revisits everything that a rewrite may affect, so a second run
changes nothing. A match never spans a write to memory that it reads, nor an unknown call, which may change grad mode,
autocast or a seed. Operators that draw random numbers, write, or have effects outside the graph are never matched. A
replacement has the type and strides of the original, and creates no observable sharing of memory.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from weft.errors import PipelineError, compose
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft, New, sources
from weft.rewriting.pattern import Match, Op, match_at

Replacement = AnyNode | Sequence[AnyNode] | Refusal | None
REACH = 3
"""Number of levels of users that are revisited after a rewrite: the depth of the deepest pattern."""
MOST_USERS = 2
"""The largest number of users that a pattern asks for."""
MAX_REWRITES_PER_NODE = 20
"""Rewrites per node of the graph after which rules are taken to undo each other."""


@dataclass(frozen=True)
class Rule:
    """A pattern and its replacement."""

    pattern: Op | tuple[Op, ...]
    replace: Callable[[Draft, Match], Replacement]
    keeps_strides: bool = True
    """False if the replacement may have other strides. The types of its users are then computed again."""

    @functools.cached_property
    def guard(self) -> tuple[int, tuple[Any, ...]] | None:
        """An argument of the call below the root that must be a call too: its position and its possible operators."""
        root = self.pattern[0] if isinstance(self.pattern, tuple) else self.pattern
        inner = next((argument for argument in root.args if isinstance(argument, Op)), None)
        if inner is None or inner.commutes or root.commutes:
            return None
        below = [(place, a.targets) for place, a in enumerate(list(inner.args)) if isinstance(a, Op)]
        return below[0] if below else None

    @property
    def targets(self) -> tuple[Any, ...]:
        """The operators at the root of the pattern."""
        return (self.pattern[0] if isinstance(self.pattern, tuple) else self.pattern).targets


Applied = list[tuple[tuple[str, ...], tuple[str, ...]]]
Refused = list[tuple[tuple[str, ...], Refusal]]


def rewrite(draft: Draft, rules: Sequence[Rule]) -> tuple[Applied, Refused]:
    """Apply rules to a draft until none matches. Returns the names before and after each rewrite, and the refusals."""
    index = RuleIndex(rules)
    order = itertools.count()
    heap: list[tuple[int, int, AnyNode]] = []
    queued: set[AnyNode] = set()

    def look_at(nodes: Iterable[AnyNode]) -> None:
        for node in nodes:
            is_wanted = id(node.target) in index.targets and node.op == "call_function"
            if is_wanted and node not in queued and node not in draft.gone:
                queued.add(node)
                heapq.heappush(heap, (draft.position(node), next(order), node))

    look_at(draft.dag.nodes)
    applied: Applied = []
    refused: dict[tuple[AnyNode, int], tuple[tuple[str, ...], Refusal]] = {}
    later: dict[AnyNode, None] = {}
    limit = MAX_REWRITES_PER_NODE * len(draft.dag.nodes)
    retried_after = 0
    while heap or later or (refused and len(applied) > retried_after):
        if not heap:  # later rewrites may have removed the cause of a refusal
            retried_after = len(applied)
            look_at(dict.fromkeys([*later, *(node for node, _ in refused)]))
            later = {}
            continue
        node = heapq.heappop(heap)[2]
        queued.remove(node)
        for number, rule in index.rules_for(draft, node):
            if node in draft.gone:
                break
            refused.pop((node, number), None)
            outcome = _attempt(draft, rule, node)
            if isinstance(outcome, Refusal):
                refused[node, number] = ((node.name,), outcome)
            if isinstance(outcome, Done):
                replacements = outcome.replacements
                applied.append((tuple(n.name for n in replacements), tuple(n.name for n in replacements.values())))
                touched, freed = _touched(draft, outcome, index.has_pairs)
                look_at(touched)
                later.update(dict.fromkeys(freed))
        if len(applied) > limit:
            raise PipelineError(compose("rewrite", f"the rules for {node.name} undo each other"))
    return applied, [found for (node, _), found in refused.items() if node not in draft.gone]


@dataclass(frozen=True)
class Done:
    """A rewrite that has been made."""

    replacements: dict[AnyNode, AnyNode]
    moved: tuple[AnyNode, ...]
    """The nodes that used an original before, and use its replacement now."""


class RuleIndex:
    """Rules by the operator at their root, and by the operator that one of its arguments must be."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.targets = {id(target) for rule in rules for target in rule.targets}
        """The identities of the operators: hashing an operator runs Python code."""
        self.has_pairs = any(isinstance(rule.pattern, tuple) for rule in rules)
        """Whether a rule has several roots: a node that used the replacement before may match with a new user of it."""
        self._always: dict[Any, list[tuple[int, Rule]]] = {}
        self._guarded: dict[Any, dict[int, dict[Any, list[tuple[int, Rule]]]]] = {}
        """Rules by the root's operator, by the position of an argument, and by the operator of that argument."""
        for number, rule in enumerate(rules):
            root = rule.pattern[0] if isinstance(rule.pattern, tuple) else rule.pattern
            guards = _guards(root)
            for target in root.targets:
                if not guards:
                    self._always.setdefault(target, []).append((number, rule))
                places = self._guarded.setdefault(target, {})
                for place, inner in guards:
                    for below in inner.targets:
                        places.setdefault(place, {}).setdefault(below, []).append((number, rule))

    def rules_for(self, draft: Draft, node: AnyNode) -> list[tuple[int, Rule]]:
        """The rules that may match at a node, in order of preference."""
        found = list(self._always.get(node.target, ()))
        places = self._guarded.get(node.target)
        if not places:
            return found
        args, kwargs = draft.arguments(node)
        for place, below in places.items():
            if place < len(args):
                inner = args[place]
                found += [r for r in below.get(getattr(inner, "target", None), ()) if _may_fit(draft, r[1], inner)]
            elif kwargs:  # passed by keyword: any of the rules may match
                found += [rule for some in below.values() for rule in some]
        return sorted(dict(found).items(), key=lambda pair: pair[0])


def _guards(root: Op) -> list[tuple[int, Op]]:
    """The first argument that must be a call, with its position; both positions if the root commutes."""
    found = [(place, argument) for place, argument in enumerate(list(root.args)) if isinstance(argument, Op)]
    if root.commutes:
        return [(place, inner) for _, inner in found[:1] for place in (0, 1)]
    return found[:1]


def _may_fit(draft: Draft, rule: Rule, node: AnyNode) -> bool:
    """A quick test one level further down: whether the call below the root takes the call that the rule requires."""
    guard = rule.guard
    if guard is None:
        return True
    args = draft.arguments(node)[0]
    place, targets = guard
    return place >= len(args) or getattr(args[place], "target", None) in targets


def _touched(draft: Draft, done: Done, has_pairs: bool) -> tuple[list[AnyNode], list[AnyNode]]:
    """The nodes that may match now and did not before, and nodes that lost one of many users, to be revisited later.

    The first are the new nodes and their users up to `REACH` levels down. Nodes that used a replacement before the
    rewrite see no difference, and are left out: revisiting them would make a replacement with ten thousand users
    quadratic.
    """
    replacements = done.replacements
    found: dict[AnyNode, None] = {}
    level = list(dict.fromkeys(replacements.values()))
    inputs = [s for node in level if isinstance(node, New) for s in sources(node.args, node.kwargs)]
    found.update(dict.fromkeys(node for node in inputs if isinstance(node, New)))
    found.update(dict.fromkeys(level))
    level = [user for node in level for user in draft.users(node)] if has_pairs else list(done.moved)
    for _ in range(REACH - 1):
        level = [node for node in dict.fromkeys(level) if node not in found and node.op != "output"]
        found.update(dict.fromkeys(level))
        level = [user for node in level for user in draft.users(node)]
    freed = dict.fromkeys(s for old in replacements if old in draft.gone for s in sources(*draft.arguments(old)))
    later: list[AnyNode] = []
    for node in freed:  # it lost a user, so a pattern that limits the number of users may match now
        if draft.num_users(node) <= MOST_USERS:
            found.update(dict.fromkeys([node, *draft.users(node)]))
        else:
            later.append(node)
    return list(found), later


def _attempt(draft: Draft, rule: Rule, node: AnyNode) -> Done | Refusal | None:
    """Try one rule at one node: the rewrite made, or why not; None if the rule does not match."""
    match = match_at(draft, rule.pattern, node)
    if match is None:
        return None
    made = rule.replace(draft, match)
    replacements: dict[AnyNode, AnyNode] = {}
    refusal = made if isinstance(made, Refusal) else None
    if made is not None and not isinstance(made, Refusal):
        each = [made] if isinstance(made, Node | New) else list(made)
        replacements = {old: new for old, new in zip(match.roots, each, strict=True) if old is not new}
        refusal = why_not_apply(draft, match) or next(filter(None, _refusals(draft, rule, replacements)), None)
    if refusal is None and replacements:
        moved = tuple(dict.fromkeys(user for old in replacements for user in draft.users(old)))
        refusal = draft.replace(replacements, match.nodes)
        if refusal is None:
            return Done(replacements, moved)
    draft.forget()
    return refusal


def _refusals(draft: Draft, rule: Rule, replacements: dict[AnyNode, AnyNode]) -> Iterable[Refusal | None]:
    for old, new in replacements.items():
        yield draft.why_not_replace(old, new, keeps_strides=rule.keeps_strides)
    if len(replacements) > 1:
        yield _why_not_together(draft, replacements)


def why_not_apply(draft: Draft, match: Match) -> Refusal | None:
    """Why the matched nodes cannot be computed at the position of the last root; None if they can."""
    end = max(map(draft.position, match.roots))
    name = match.root.name
    for node in match.nodes:
        found = draft.profile(node)
        if found.opaque or found.random or found.ordered or found.writes:
            what = "draws random numbers" if found.random else "has side effects"
            return Refusal(Reason.HAS_EFFECT, f"{name} stays: {node.name} {what}", node.name)
        begin = draft.position(node)
        if begin == end:
            continue
        block = draft.boundary(begin, end)
        if block is not None:
            sentence = f"{name} stays: the unknown call {block.name} lies in between"
            return Refusal(Reason.HAS_EFFECT, sentence, block.name)
        touched = set(draft.reads(node)) | (set() if draft.is_alias(node) else set(draft.held(node)))
        for storage in sorted(touched):
            write = draft.first_write(storage, begin, end)
            if write is not None:
                sentence = f"{name} stays: {write.name} writes memory that {node.name} reads or holds"
                return Refusal(Reason.MUTATED, sentence, write.name)
    return None


def _why_not_together(draft: Draft, replacements: dict[AnyNode, AnyNode]) -> Refusal | None:
    """Why several roots cannot be replaced together.

    The replacements are computed at the last root, so none of their inputs may depend on a root.
    """
    first = min(map(draft.position, replacements))
    last = max(replacements, key=draft.position)
    stack: list[AnyNode] = [
        s for new in replacements.values() if isinstance(new, New) for s in sources(new.args, new.kwargs)
    ]
    seen: set[AnyNode] = set()
    while stack:
        node = stack.pop()
        if node in replacements:
            return Refusal(Reason.DEPENDENCY, f"{last.name} stays: it depends on {node.name}", node.name)
        if node in seen or draft.position(node) < first:
            continue
        seen.add(node)
        stack += sources(*draft.arguments(node))
    return None
