"""Cancel splits against the concatenations that put their pieces together again, and the other way round.

Why: heads, experts and gates are cut apart and laid side by side by code that does not see the whole; each
concatenation copies all of it.

Before::

    parts: [f32[2, 4], f32[2, 4]] = split(h, 2)
    a: f32[2, 4] = parts[0]
    b: f32[2, 4] = parts[1]
    c: f32[4, 4] = cat([a, b])

After::

    (h itself)

A concatenation of neighbouring pieces of one tensor along the dim that they were cut from is that tensor, or one piece
of it. A piece of a concatenation that lies in one of its parts is a piece of that part. A concatenation inside another
along the same dim is part of it. Pieces are those of split, chunk, slice, narrow, unbind and select.

Declines: pieces that are missing, out of order, of another dim or of unknown size; results that would share memory
with an input or with each other where the graph returns or writes them.
Numerics: exact.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.graph import ops
from weft.passes.base import Context, Numerics
from weft.passes.draft import AnyNode, Draft
from weft.passes.pattern import ANY, Match, Var, op
from weft.passes.pieces import PARTS, Piece, joined, piece_of
from weft.passes.rewriting import Replacement, RewritePass, Rule, why_not_apply

CAT = ops.op_of("cat")


@dataclass(frozen=True)
class CancelSplitsAndCats(RewritePass):
    """Cancel splits against concatenations."""

    numerics = Numerics.EXACT

    def rules(self, context: Context) -> Iterable[Rule]:
        cat = op("cat", Var("pieces"), dim=Var("dim")).named("cat")
        item = op("operator.getitem", op(PARTS).ignoring(), ANY)
        return [
            Rule(cat, _whole),
            Rule(cat, _flat),
            Rule(cat, _selected),
            Rule(op("stack", Var("pieces"), dim=Var("dim")), _unbound),
            Rule(item, _of_part, keeps_strides=False),
            Rule(op(("slice", "narrow")).ignoring(), _of_part, keeps_strides=False),
        ]


def _whole(draft: Draft, match: Match) -> Replacement:
    """A concatenation with fewer parts: neighbouring pieces of one tensor are one piece."""
    root, nodes = match.root, match["pieces"]
    value = draft.value(root)
    if not isinstance(value, Tensor) or not value.dim() or len(nodes) < 2:
        return None
    dim = match["dim"] % value.dim()
    parts = joined(draft, nodes, dim)
    if len(parts) == len(nodes):
        return None
    made = [_made(draft, part, root) for part in parts]
    return made[0] if len(made) == 1 else draft.call("cat", made, dim, before=root)


def _made(draft: Draft, part: Piece, root: AnyNode) -> AnyNode:
    if part.is_whole or part.node is not None:
        return part.source if part.node is None else part.node
    return draft.call("slice", part.source, part.dim, part.start, part.end, before=root)


def _flat(draft: Draft, match: Match) -> Replacement:
    """A concatenation of the parts of the concatenations in it, and in those, if nobody else needs them.

    One that becomes part of another itself is left to that one: each part is written down once however deep it lies.
    """
    root, nodes = match.root, match["pieces"]
    dim = match["dim"] % draft.value(root).dim()
    cat = _cat(draft, root)
    users = draft.users(root) if draft.num_users(root) == 1 else ()
    if cat is not None and any(_is_inner(draft, root, dim, user, user) for user in users):
        return None
    flat: list[AnyNode] = []
    inner: list[AnyNode] = []
    stack = [(node, root) for node in reversed(nodes)]
    while stack:
        node, outer = stack.pop()
        if _is_inner(draft, node, dim, outer, root):
            inner.append(node)
            stack += [(part, node) for part in reversed(_parts_of_cat(draft, node, dim) or ())]
        else:
            flat.append(node)
    match.nodes += inner  # what they read is read here then
    return draft.call("cat", flat, dim, before=root) if inner else None


def _is_inner(draft: Draft, node: AnyNode, dim: int, outer: AnyNode, root: AnyNode) -> bool:
    """Whether a node is a concatenation that only another one takes, once, and that can be part of it at a root."""
    if draft.num_users(node) != 1 or _parts_of_cat(draft, node, dim) is None:
        return False
    taker = _cat(draft, outer)
    is_once = taker is not None and taker.dim == dim and node in taker.once
    return is_once and why_not_apply(draft, Match(nodes=[node], roots=(root,))) is None


@dataclass(frozen=True)
class Cat:
    """A concatenation."""

    dim: int
    parts: Sequence[AnyNode]
    begins: Sequence[int] | None
    """Where each part begins along the dim; None where that is not known, or a part has another type."""
    once: frozenset[AnyNode]
    """The parts that occur once."""


def _cat(draft: Draft, node: Any) -> Cat | None:
    """What a node concatenates; kept, since each part and each piece of it asks. None for anything else."""
    if not isinstance(node, AnyNode) or node.target is not CAT:
        return None
    arguments = draft.arguments(node)
    known = draft.notes.get(("cat", node))
    if known is None or known[0] is not arguments:
        known = draft.notes["cat", node] = (arguments, _read_cat(draft, node))
    return known[1]


def _read_cat(draft: Draft, node: AnyNode) -> Cat | None:
    given, value = draft.bind(node), draft.value(node)
    if not isinstance(value, Tensor) or not value.dim():
        return None
    dim, parts = given["dim"] % value.dim(), given["tensors"]
    values = [draft.value(part) for part in parts]
    ranks_differ = any(v.dim() != value.dim() or v.dtype != value.dtype for v in values)  # old-style empty tensors
    sizes: list[Any] = [] if ranks_differ else [v.shape[dim] for v in values]
    is_known = not ranks_differ and all(type(size) is int for size in sizes)
    begins = list(itertools.accumulate(sizes[:-1], initial=0)) if is_known else None
    once = frozenset(part for part, times in Counter(parts).items() if times == 1)
    return Cat(dim, parts, begins, once)


def _parts_of_cat(draft: Draft, node: Any, dim: int) -> Sequence[AnyNode] | None:
    """The parts of a concatenation along a dim, each with a size along it that is known; None for anything else."""
    cat = _cat(draft, node)
    return cat.parts if cat is not None and cat.dim == dim and cat.begins is not None else None


def _selected(draft: Draft, match: Match) -> Replacement:
    """A concatenation of all that was selected along the dim in front of the one it joins: the two dims become one."""
    value, nodes = draft.value(match.root), match["pieces"]
    if not isinstance(value, Tensor) or not value.dim() or len(nodes) < 2:
        return None
    parts = joined(draft, nodes, match["dim"] % value.dim(), is_single=True)
    if len(parts) > 1 or not parts[0].is_whole:
        return None
    return draft.call("reshape", parts[0].source, list(value.shape), before=match.root)


def _unbound(draft: Draft, match: Match) -> Replacement:
    """A stack of all that was unbound along the same dim."""
    value, nodes = draft.value(match.root), match["pieces"]
    dim = match["dim"] % value.dim()
    parts = joined(draft, nodes, dim, is_single=True)
    return parts[0].source if len(parts) == 1 and parts[0].is_whole else None


def _of_part(draft: Draft, match: Match) -> Replacement:
    """A piece of a concatenation, as a piece of the part that it lies in."""
    root = match.root
    value = draft.value(root)
    if not isinstance(value, Tensor):
        return None
    for dim in range(value.dim()):
        piece = piece_of(draft, root, dim)
        cat = _cat(draft, piece.source) if piece is not None and piece.start < piece.end else None
        if piece is None or cat is None or cat.dim != dim or cat.begins is None:
            continue
        k = bisect_right(cat.begins, piece.start) - 1
        part, begin = cat.parts[k], cat.begins[k]
        size = draft.value(part).shape[dim]
        if piece.end <= begin + size:
            inside = Piece(part, dim, piece.start - begin, piece.end - begin, size)
            match.nodes.append(piece.source)  # what it reads is read here then
            return _made(draft, inside, root)
    return None
