"""Remove views that restore the original tensor, and merge consecutive views.

Why: sharding and autograd reshape and permute back and forth. Each view costs host time and hides patterns from other
rewrites.

Before::

    p: f32[8, 4] = permute(h, [1, 0])
    v: f32[8, 4] = view(p, [8, 4])
    q: f32[4, 8] = permute(v, [1, 0])
    r: f32[4, 8] = relu(q)

After::

    r: f32[4, 8] = relu(h)

A view is replaced with an ancestor of the same sizes, strides, offset and dtype, through up to 32 views. Two
consecutive reshapes become one, and so do two consecutive permutations, if the first has no other users.

Declines: a view that the graph returns, if its replacement is an input or is returned as well.
Numerics: exact.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.compat import OpOverload
from weft.passes.base import Numerics
from weft.passes.rewrite.remove_noops import layout_of
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.pattern import ANY, VIEWS, Match, Var, op
from weft.rewriting.rules import Replacement, Rule

PERMUTATIONS = ("permute", "t", "transpose.int")
ALL = (*VIEWS, *PERMUTATIONS, "squeeze", "squeeze.dim", "squeeze.dims", "unsqueeze", "expand", "alias", "slice")
MAX_VIEWS = 32
"""Maximum number of views between a tensor and its ancestor. It keeps the search linear in the length of a chain."""
MOST = (*ALL, "view.dtype", "as_strided", "detach", "select.int", "narrow", "flatten.using_ints")


@dataclass(frozen=True)
class CancelViews(RewritePass):
    """Remove views that restore the original tensor, and merge consecutive views."""

    numerics = Numerics.EXACT

    def rules(self, context: Context) -> Iterable[Rule]:
        inner = op(VIEWS, Var("x"), ANY).named("inner").used(1)
        turned = op(PERMUTATIONS, Var("x")).named("inner").used(1).ignoring()
        return [
            Rule(op(MOST).ignoring(), _ancestor),
            Rule(op(VIEWS, inner, Var("shape")), _one_view),
            Rule(op(PERMUTATIONS, turned).ignoring(), _one_permutation),
        ]


def _ancestor(draft: Draft, match: Match) -> Replacement:
    """An ancestor with the same layout as the view."""
    wanted = _layout(draft, match.root)
    node: Any = match.root
    for _ in range(MAX_VIEWS):
        if not isinstance(node, AnyNode) or node.op != "call_function" or not _is_view(draft, node):
            return None
        node = draft.bind(node)[draft.profile(node).aliases[0]]
        if wanted is not None and isinstance(node, AnyNode) and _layout(draft, node) == wanted:
            return node
    return None


def _layout(draft: Draft, node: AnyNode) -> Hashable | None:
    """The layout of a node's value; cached, since every view of a chain asks for it."""
    key = ("layout", node)
    if key not in draft.notes:
        draft.notes[key] = layout_of(draft.value(node))
    return draft.notes[key]


def _is_view(draft: Draft, node: AnyNode) -> bool:
    found = draft.profile(node)
    is_plain = isinstance(node.target, OpOverload) and not (found.wait or found.writes or found.opaque)
    return is_plain and bool(found.aliases) and draft.is_alias(node)


def _one_view(draft: Draft, match: Match) -> Replacement:
    inner = match["inner"]
    if not _is_view(draft, inner) or not _is_view(draft, match.root):
        return None
    return draft.call("view", match["x"], match["shape"], before=match.root)


def _one_permutation(draft: Draft, match: Match) -> Replacement:
    first, second = (_order(draft, node) for node in (match["inner"], match.root))
    if first is None or second is None:
        return None
    return draft.call("permute", match["x"], [first[d] for d in second], before=match.root)


def _order(draft: Draft, node: AnyNode) -> Sequence[int] | None:
    """The dims of a permutation, in order."""
    value, given = draft.value(node), draft.bind(node)
    if not isinstance(value, Tensor):
        return None
    order = list(range(value.dim()))
    if "dims" in given:
        return [d % value.dim() for d in given["dims"]]
    if "dim0" in given and order:
        a, b = given["dim0"], given["dim1"]
        order[a], order[b] = order[b], order[a]
        return order
    return order[::-1]
