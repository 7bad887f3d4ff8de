"""Patterns that describe the nodes a rewrite looks for, and the matcher.

    x, w, bias = Var("x"), Var("w"), Var("bias")
    product = op("mm", x, w).named("product").used(1)
    total = op("add", product, bias).either_way()

    match = match_at(draft, total, node)        # None, or a Match:
    match["bias"], match["product"]             # arguments and nodes by name
    match.nodes                                 # the nodes that matched an `op`, the root first
    why_no_match(draft, total, node)            # "r is relu, expected mm"

A pattern names operators as listings do, one or several alternatives: `op(VIEWS, x, ANY)`. Arguments are matched by
schema: positional ones are the first parameters, whatever an operator calls them. An argument that the pattern does not
name must have its default value, unless `.ignoring("alpha")` or `.ignoring()` allows others. A `Var` matches anything,
and the same thing wherever it occurs again; `ANY` matches anything each time. A list matches a list of the same length;
`Each(item, "pieces")` matches any length, and binds one dict per item. A plain value matches itself: 0.0 is not -0.0,
True is not 1. `Either(a, b)` tries the alternatives in order.

Contract: matching never changes anything. A pattern is a value: it can be compared and printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from weft.compat import OpOverload
from weft.graph import ops
from weft.rewriting.draft import AnyNode, Draft, New

VIEWS = ("view", "reshape", "_unsafe_view")
"""Operators that reshape without changing the order of elements."""

Test = Callable[[Draft, Any], bool]


@dataclass(frozen=True)
class Var:
    """Any argument; the same one wherever the name occurs."""

    name: str
    test: Test | None = None
    says: str = ""
    """The condition in words."""

    def where(self, test: Test, says: str) -> Var:
        """The same, only for arguments that pass a test."""
        return replace(self, test=test, says=says)


ANY = Var("")


@dataclass(frozen=True)
class Each:
    """A list of any number of items that match one pattern."""

    item: Any
    name: str
    at_least: int = 1


@dataclass(frozen=True)
class Either:
    """The first of several patterns that matches."""

    patterns: tuple[Any, ...]

    def __init__(self, *patterns: Any) -> None:
        object.__setattr__(self, "patterns", patterns)


@dataclass(frozen=True)
class Op:
    """A call of one of several operators."""

    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    name: str = ""
    num_users: int | None = None
    commutes: bool = False
    ignored: tuple[str, ...] | None = ()
    """Arguments that may have any value; None: all arguments that the pattern does not name."""
    test: Test | None = None
    says: str = ""

    def named(self, name: str) -> Op:
        """The same, with a name for the node."""
        return replace(self, name=name)

    def used(self, times: int) -> Op:
        """The same, only for nodes with this number of users."""
        return replace(self, num_users=times)

    def either_way(self) -> Op:
        """The same with the first two arguments in either order."""
        return replace(self, commutes=True)

    def ignoring(self, *names: str) -> Op:
        """The same for any values of these arguments; without names, of all arguments not in the pattern."""
        return replace(self, ignored=names or None)

    def where(self, test: Test, says: str) -> Op:
        """The same, only for nodes that pass a test."""
        return replace(self, test=test, says=says)

    def arguments(self, target: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
        """For one of the targets: the patterns by argument name, and the defaults of the other arguments."""
        key = (id(self), target)
        if key not in _TABLES:
            _TABLES[key] = (self, _table(self, target))
        return _TABLES[key][1]


_TABLES: dict[Any, tuple[Op, tuple[list[tuple[str, Any]], list[tuple[str, Any]]]]] = {}
"""Cache of `Op.arguments` by pattern id; holding the pattern keeps its id from being reused."""


def op(names: str | tuple[str, ...], *args: Any, **kwargs: Any) -> Op:
    """A call of one of several operators, by their names in listings. Names unknown to this torch are left out."""
    found = [ops.op_of(name) for name in ((names,) if isinstance(names, str) else names)]
    return Op(tuple(target for target in found if target is not None), args, kwargs)


def _table(pattern: Op, target: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    if not isinstance(target, OpOverload):
        return [(str(k), argument) for k, argument in enumerate(pattern.args)], []
    parameters = ops.parameters(target)
    wanted = {parameters[k][0]: argument for k, argument in enumerate(pattern.args)} | dict(pattern.kwargs)
    rest = [
        (name, default)
        for name, _, has_default, default in parameters
        if has_default and name not in wanted and pattern.ignored is not None and name not in pattern.ignored
    ]
    return list(wanted.items()), rest


@dataclass
class Match:
    """The nodes and arguments that a pattern matched."""

    bound: dict[str, Any] = field(default_factory=dict[str, Any])
    nodes: list[AnyNode] = field(default_factory=list[AnyNode])
    roots: tuple[AnyNode, ...] = ()

    @property
    def root(self) -> AnyNode:
        return self.roots[0]

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def get(self, name: str) -> Any:
        """The argument of that name; None if the alternative that matched does not have it."""
        return self.bound.get(name)


def match_at(draft: Draft, pattern: Op | tuple[Op, ...], node: AnyNode) -> Match | None:
    """The match at a node. Of several patterns, the first matches the node; the others share bound names with it."""
    return _Matcher(draft).run(pattern, node)


def why_no_match(draft: Draft, pattern: Op | tuple[Op, ...], node: AnyNode) -> str | None:
    """Why a pattern does not match at a node, for the attempt that got furthest; None if it matches."""
    matcher = _Matcher(draft)
    return None if matcher.run(pattern, node) is not None else matcher.sentence()


class _Matcher:
    """One search. Alternatives are tried in order; bindings of a failed one are dropped."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.match = Match()
        self._progress = -1
        self._fault: tuple[Any, ...] = ()

    def run(self, pattern: Op | tuple[Op, ...], node: AnyNode) -> Match | None:
        first, *others = pattern if isinstance(pattern, tuple) else (pattern,)
        if not self._op(first, node):
            return None
        self.match.roots = (node,)
        return self.match if self._others(others) else None

    def _others(self, patterns: list[Op]) -> bool:
        """Match further roots among the users of bound nodes."""
        if not patterns:
            return True
        for node in self._candidates(patterns[0]):
            saved = self._save()
            if self._op(patterns[0], node):
                self.match.roots = (*self.match.roots, node)
                if self._others(patterns[1:]):
                    return True
            self._restore(saved)
        return False

    def _candidates(self, pattern: Op) -> Iterator[AnyNode]:
        start, depth = _shared(pattern, self.match.bound)
        if start is None:
            self._fail("the patterns of {} share no argument", self.match.roots[0])
            return
        found: list[AnyNode] = [start]
        for _ in range(depth):
            found = [user for node in found for user in self.draft.users(node)]
        for node in dict.fromkeys(found):
            if node.target in pattern.targets and node not in self.match.nodes:
                yield node

    # Arguments.

    def _any(self, pattern: Any, value: Any) -> bool:
        if isinstance(pattern, Op):
            return self._op(pattern, value)
        if isinstance(pattern, Var):
            return self._var(pattern, value)
        if isinstance(pattern, Each):
            return self._each(pattern, value)
        if isinstance(pattern, Either):
            return self._either(pattern, value)
        if isinstance(pattern, list | tuple):
            return self._list(pattern, value)
        return is_equal(pattern, value) or self._fail("{} is given, expected {}", value, pattern)

    def _var(self, pattern: Var, value: Any) -> bool:
        if pattern.test is not None and not pattern.test(self.draft, value):
            return self._fail("{} is not {}", value, pattern.says)
        if not pattern.name:
            return True
        if pattern.name in self.match.bound:
            known = self.match.bound[pattern.name]
            return is_equal(known, value) or self._fail("{} is not {}", value, known)
        self.match.bound[pattern.name] = value
        return True

    def _list(self, pattern: list[Any] | tuple[Any, ...], value: Any) -> bool:
        if not isinstance(value, list | tuple):
            return self._fail("{} is not a list", value)
        if len(value) != len(pattern):
            return self._fail("a list of {} is given, expected {}", len(value), len(pattern))
        return all(map(self._any, pattern, value))

    def _each(self, pattern: Each, value: Any) -> bool:
        if not isinstance(value, list | tuple) or len(value) < pattern.at_least:
            return self._fail("{} is not a list of at least {}", value, pattern.at_least)
        outer = self.match.bound
        found: list[dict[str, Any]] = []
        for item in value:
            self.match.bound = dict(outer)
            if not self._any(pattern.item, item):
                return False  # the caller that tries alternatives restores the bindings
            found.append(self.match.bound)
        self.match.bound = {**outer, pattern.name: found}
        return True

    def _either(self, pattern: Either, value: Any) -> bool:
        for one in pattern.patterns:
            saved = self._save()
            if self._any(one, value):
                return True
            self._restore(saved)
        return False

    # Calls.

    def _op(self, pattern: Op, node: Any) -> bool:
        if not isinstance(node, Node | New) or node.target not in pattern.targets:
            return self._fail("{} is {}, expected {}", node, _Called(node), _Names(pattern.targets))
        if pattern.num_users is not None and self.draft.num_users(node) != pattern.num_users:
            return self._fail("{} has {} users, expected {}", node, self.draft.num_users(node), pattern.num_users)
        if node not in self.match.nodes:
            self.match.nodes.append(node)
        saved = self._save()
        wanted, rest = pattern.arguments(node.target)
        if not self._call(node, wanted, rest):
            if not pattern.commutes or len(wanted) < 2:
                return False
            self._restore(saved)
            (first, a), (second, b), *others = wanted
            if not self._call(node, [(first, b), (second, a), *others], rest):
                return False
        if pattern.name:
            self.match.bound[pattern.name] = node
        if pattern.test is not None and not pattern.test(self.draft, node):
            return self._fail("{} is not {}", node, pattern.says)
        return True

    def _call(self, node: AnyNode, wanted: list[tuple[str, Any]], rest: list[tuple[str, Any]]) -> bool:
        if isinstance(node.target, OpOverload):
            given = self.draft.bind(node)
        else:
            given = {str(k): value for k, value in enumerate(self.draft.arguments(node)[0])}
        for name, default in rest:
            if name in given and not is_equal(given[name], default):
                return self._fail("{} has {}={}", node, name, given[name])
        for name, pattern in wanted:
            if name not in given:
                return self._fail("{} has no argument {}", node, name)
            if not self._any(pattern, given[name]):
                return False
        return True

    # Backtracking, and the reason of the failure that got furthest.

    def _save(self) -> tuple[dict[str, Any], int, tuple[AnyNode, ...]]:
        return dict(self.match.bound), len(self.match.nodes), self.match.roots

    def _restore(self, saved: tuple[dict[str, Any], int, tuple[AnyNode, ...]]) -> None:
        bound, count, self.match.roots = saved
        self.match.bound = dict(bound)
        del self.match.nodes[count:]

    def _fail(self, *fault: Any) -> bool:
        if len(self.match.nodes) > self._progress:
            self._progress, self._fault = len(self.match.nodes), fault
        return False

    def sentence(self) -> str:
        template, *values = self._fault
        return template.format(*(v.name if isinstance(v, Node | New) else v for v in values))


@dataclass(frozen=True)
class _Called:
    node: Any

    def __str__(self) -> str:
        if not isinstance(self.node, Node | New):
            return "no node"
        return str(ops.name_of(self.node.target) if self.node.op == "call_function" else self.node.op)


@dataclass(frozen=True)
class _Names:
    targets: tuple[Any, ...]

    def __str__(self) -> str:
        return " or ".join(str(ops.name_of(target)) for target in self.targets)


def _shared(pattern: Any, bound: Mapping[str, Any], depth: int = 0) -> tuple[AnyNode | None, int]:
    """A bound node that occurs in a pattern, and its depth below the pattern's root."""
    name = getattr(pattern, "name", "")
    if name and isinstance(bound.get(name), Node | New):
        return bound[name], depth
    parts: list[Any] = []
    if isinstance(pattern, Op):
        parts = [*pattern.args, *pattern.kwargs.values()]
    elif isinstance(pattern, list | tuple):
        return next((f for p in pattern if (f := _shared(p, bound, depth))[0] is not None), (None, 0))
    elif isinstance(pattern, Either):
        parts = list(pattern.patterns)
        depth -= 1
    for part in parts:
        found = _shared(part, bound, depth + 1)
        if found[0] is not None:
            return found
    return None, 0


def is_equal(first: Any, second: Any) -> bool:
    """Whether two arguments are equal: nodes by identity, numbers by value and sign; True is not 1."""
    if first is second:
        return True
    if isinstance(first, Node | New) or isinstance(second, Node | New):
        return False
    if isinstance(first, bool) or isinstance(second, bool):
        return False
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(is_equal, first, second))
    if isinstance(first, int | float) and isinstance(second, int | float):
        return first == second and math.copysign(1, first) == math.copysign(1, second)
    return type(first) is type(second) and bool(first == second)
