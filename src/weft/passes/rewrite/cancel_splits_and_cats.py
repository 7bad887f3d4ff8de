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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.passes.base import Context, Numerics
from weft.passes.draft import AnyNode, Draft
from weft.passes.pattern import ANY, Match, Var, op
from weft.passes.pieces import PARTS, Piece, joined, piece_of
from weft.passes.rewriting import Replacement, RewritePass, Rule


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
    """A concatenation of the parts of the concatenations in it, if nobody else needs those."""
    root, nodes = match.root, match["pieces"]
    dim = match["dim"] % draft.value(root).dim()
    flat: list[Any] = []
    for node in nodes:
        inner = _parts_of_cat(draft, node, dim)
        is_only_here = inner is not None and draft.users(node) == [root] and nodes.count(node) == 1
        flat += inner if inner is not None and is_only_here else [node]
        match.nodes += [node] if is_only_here else []  # what it reads is read here then
    return draft.call("cat", flat, dim, before=root) if len(flat) > len(nodes) else None


def _parts_of_cat(draft: Draft, node: Any, dim: int) -> Sequence[AnyNode] | None:
    """The parts of a concatenation along a dim, each with a size along it that is known; None for anything else."""
    if not isinstance(node, AnyNode) or str(node.target) != "aten.cat.default":
        return None
    given, value = draft.bind(node), draft.value(node)
    if not isinstance(value, Tensor) or given["dim"] % max(value.dim(), 1) != dim:
        return None
    parts = given["tensors"]
    values = [draft.value(part) for part in parts]
    ranks_differ = any(v.dim() != value.dim() or v.dtype != value.dtype for v in values)  # old-style empty tensors
    return None if ranks_differ or any(type(v.shape[dim]) is not int for v in values) else parts


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
        parts = _parts_of_cat(draft, piece.source, dim) if piece is not None else None
        if piece is None or parts is None:
            continue
        begin = 0
        for part in parts:
            size = draft.value(part).shape[dim]
            if begin <= piece.start and piece.end <= begin + size and piece.start < piece.end:
                inside = Piece(part, dim, piece.start - begin, piece.end - begin, size)
                match.nodes.append(piece.source)  # what it reads is read here then
                return _made(draft, inside, root)
            begin += size
    return None
