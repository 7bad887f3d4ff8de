"""Cancel splits against concatenations that rejoin their pieces, and slices against concatenations they undo.

Why: separate parts of a model split and concatenate heads, experts and gates without seeing each other. Each
concatenation copies all of its inputs.

Before::

    parts: [f32[2, 4], f32[2, 4]] = split(h, 2)
    a: f32[2, 4] = parts[0]
    b: f32[2, 4] = parts[1]
    c: f32[4, 4] = cat([a, b])

After::

    (h itself)

The pass knows five simplifications:

- a concatenation of adjacent slices of one tensor, along the dim they were cut from, is one slice of that tensor, or
  the tensor itself; a stack of adjacent slices is a permutation of it;
- a slice of a slice is a slice of the original tensor;
- a slice of a concatenation that lies within one input is a slice of that input;
- a concatenation within a concatenation along the same dim is flattened;
- a slice of a concatenation, within another concatenation, is flattened too.

Slices come from split, chunk, slice, narrow, unbind and select. A dim of size 1 may be squeezed or unsqueezed, and the
inputs of a stack or a concatenation may be views, all of the same shape.

Declines: slices that are missing, out of order or of unequal sizes; a result that the graph returns or writes and that
would share memory with an input or another result; rewrites that would copy twice or save no copy.
Numerics: exact.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.graph import ops
from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.pattern import ANY, Match, Var, op
from weft.rewriting.rules import Replacement, Rule, why_not_apply
from weft.rewriting.slices import ITEM, NARROW, PARTS, RESHAPES, SELECT, SLICE, SPLITS, Slice, cut_dim, joined, slice_of

CAT, STACK = ops.op_of("cat"), ops.op_of("stack")
CUTS = SPLITS | {SLICE, NARROW}
MAX_PARTS = 64
"""Maximum number of inputs of a flattened concatenation; each level of slicing and concatenating may double them."""


@dataclass(frozen=True)
class CancelSplitsAndCats(RewritePass):
    """Cancel splits against concatenations."""

    numerics = Numerics.EXACT

    def rules(self, context: Context) -> Iterable[Rule]:
        cat = op("cat", Var("pieces"), dim=Var("dim")).named("cat")
        stack = op("stack", Var("pieces"), dim=Var("dim"))
        item = op("operator.getitem", op(PARTS).ignoring(), ANY)
        return [
            Rule(cat, _whole),
            Rule(cat, _flat),
            Rule(cat, _spanned),
            Rule(cat, _selected, keeps_strides=False),
            Rule(cat, _viewed, keeps_strides=False),
            Rule(stack, _unbound, keeps_strides=False),
            Rule(stack, _viewed, keeps_strides=False),
            Rule(item, _slice_of_part, keeps_strides=False),
            Rule(op(("slice", "narrow", "select.int")).ignoring(), _slice_of_part, keeps_strides=False),
        ]


def _whole(draft: Draft, match: Match) -> Replacement:
    """A concatenation with fewer inputs: adjacent slices of one tensor become one slice."""
    root, nodes = match.root, match["pieces"]
    value = draft.value(root)
    if not isinstance(value, Tensor) or not value.dim() or len(nodes) < 2:
        return None
    dim = match["dim"] % value.dim()
    parts = joined(draft, nodes, dim)
    if len(parts) == len(nodes):
        return _why_not_joined(root, parts)
    made = [_made(draft, part, root) for part in parts]
    return made[0] if len(made) == 1 else draft.call("cat", made, dim, before=root)


def _why_not_joined(root: AnyNode, parts: Sequence[Slice]) -> Refusal | None:
    """Why the slices are not one slice; None unless all of them are slices of one tensor."""
    sources = {id(part.source) if part.size else None for part in parts}
    if len(parts) < 2 or len(sources) > 1 or None in sources:
        return None
    sentence = f"{root.name} stays: its slices of {parts[0].source.name} are not adjacent in this order"
    return Refusal(Reason.UNSUPPORTED_FORM, sentence)


def _made(draft: Draft, part: Slice, root: AnyNode) -> AnyNode:
    if part.is_whole or part.node is not None:
        return part.source if part.node is None else part.node
    return _cut(draft, part, root)


def _cut(draft: Draft, part: Slice, root: AnyNode) -> AnyNode:
    """A slice of its source that keeps the dim it was cut along."""
    if part.is_whole:
        return part.source
    return draft.call("slice", part.source, part.dim, part.start, part.end, before=root)


def _flat(draft: Draft, match: Match) -> Replacement:
    """A concatenation with all nested concatenations flattened, if they have no other users.

    A concatenation that an outer one will absorb is skipped: the outermost one flattens all levels at once, so the cost
    is linear in the number of inputs however deep the nesting.
    """
    root, nodes = match.root, match["pieces"]
    cat = _cat(draft, root)
    if cat is None:
        return None
    dim = cat.dim
    users = draft.users(root) if draft.num_users(root) == 1 else ()
    if any(_is_inner(draft, root, dim, user, user) for user in users):
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
    match.nodes += inner  # their inputs are now read here
    return draft.call("cat", flat, dim, before=root) if inner else None


def _is_inner(draft: Draft, node: AnyNode, dim: int, outer: AnyNode, root: AnyNode) -> bool:
    """Whether a node is a concatenation that only `outer` uses, once, and that can be computed at `root` instead."""
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
    """The offset of each part along the dim; None if a size is unknown or a part has another type."""
    once: frozenset[AnyNode]
    """The parts that occur exactly once."""


def _cat(draft: Draft, node: Any) -> Cat | None:
    """The concatenation that a node is, or None; cached, since it is needed for every part and slice."""
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
    ranks_differ = any(v.dim() != value.dim() or v.dtype != value.dtype for v in values)  # cat skips 1-d empty tensors
    sizes: list[Any] = [] if ranks_differ else [v.shape[dim] for v in values]
    is_known = not ranks_differ and all(type(size) is int for size in sizes)
    begins = list(itertools.accumulate(sizes[:-1], initial=0)) if is_known else None
    once = frozenset(part for part, times in Counter(parts).items() if times == 1)
    return Cat(dim, parts, begins, once)


def _spanned(draft: Draft, match: Match) -> Replacement:
    """A concatenation that takes parts of other concatenations directly, where it took slices across several of them.

    Only if those concatenations have no other users.
    """
    root, cat = match.root, _cat(draft, match.root)
    if cat is None or cat.begins is None:
        return None
    pieces = [slice_of(draft, node, cat.dim) for node in cat.parts]
    sources = dict.fromkeys(p.source for p in pieces if p and _parts_of_cat(draft, p.source, cat.dim) is not None)
    inner = {source: None for source in sources if _is_only_for(draft, source, root)}
    flat: list[AnyNode] = []
    for node, piece in zip(cat.parts, pieces, strict=True):
        source = node if piece is None else piece.source
        found = _cat(draft, source) if source in inner else None
        if found is None or len(flat) + len(found.parts) > MAX_PARTS:
            flat.append(node)
        elif piece is None:
            flat += found.parts
        else:
            flat += [_cut(draft, part, root) for part in _within(draft, piece, found)]
    if len(flat) > len(cat.parts):
        match.nodes += inner  # their inputs are now read here
        return draft.call("cat", flat, cat.dim, before=root)
    needed = next((source for source in sources if source not in inner), None)
    if needed is None:
        return None
    return Refusal(Reason.NO_GAIN, f"{root.name} stays: {needed.name} has other users", needed.name)


def _is_only_for(draft: Draft, node: AnyNode, root: AnyNode) -> bool:
    """Whether only the root uses a node, directly or through slices."""
    return all(
        user is root or (user.target in CUTS and all(_is_taken_by(draft, u, root) for u in draft.users(user)))
        for user in draft.users(node)
    )


def _is_taken_by(draft: Draft, user: AnyNode, root: AnyNode) -> bool:
    return user is root or (user.target is ITEM and all(u is root for u in draft.users(user)))


def _within(draft: Draft, piece: Slice, cat: Cat) -> Iterator[Slice]:
    """A slice of a concatenation as slices of its parts."""
    begins = cat.begins
    if begins is None:
        return
    for k in range(bisect_right(begins, piece.start) - 1, len(begins)):
        if begins[k] >= piece.end:
            return
        size = draft.value(cat.parts[k]).shape[piece.dim]
        start, end = max(piece.start - begins[k], 0), min(piece.end - begins[k], size)
        if start < end:
            yield Slice(cat.parts[k], piece.dim, start, end, size)


def _parts_of_cat(draft: Draft, node: Any, dim: int) -> Sequence[AnyNode] | None:
    """The parts of a concatenation along a dim, if all their sizes along it are known; None otherwise."""
    cat = _cat(draft, node)
    return cat.parts if cat is not None and cat.dim == dim and cat.begins is not None else None


def _selected(draft: Draft, match: Match) -> Replacement:
    """A concatenation of adjacent selected elements: the dim they were selected along merges into the joined dim."""
    root, nodes = match.root, match["pieces"]
    value = draft.value(root)
    if not isinstance(value, Tensor) or not value.dim() or len(nodes) < 2:
        return None
    found = _neighbours(draft, root, nodes, value.dim() + 1)
    if not isinstance(found, Slice):
        return found
    to = match["dim"] % value.dim()
    if found.dim != to and not _are_only_for(draft, nodes, root):
        return _no_copy_saved(root, found.source)
    turned = _turned(draft, _cut(draft, found, root), found.dim, to, root)
    return draft.call("reshape", turned, list(value.shape), before=root)


def _unbound(draft: Draft, match: Match) -> Replacement:
    """A stack of adjacent elements that were selected along one dim."""
    root, nodes = match.root, match["pieces"]
    value = draft.value(root)
    if not isinstance(value, Tensor):
        return None
    found = _neighbours(draft, root, nodes, value.dim())
    if not isinstance(found, Slice):
        return found
    turned = _turned(draft, _cut(draft, found, root), found.dim, match["dim"] % value.dim(), root)
    return _fitting(draft, turned, root, nodes) if found.dim != match["dim"] % value.dim() else turned


def _fitting(draft: Draft, node: AnyNode, root: AnyNode, nodes: Sequence[AnyNode]) -> Replacement:
    """The view, or a copy of it where a user depends on the layout; refused if the copy saves nothing."""
    if draft.why_not_replace(root, node, keeps_strides=False) is None:
        return node
    if not _are_only_for(draft, nodes, root):
        return _no_copy_saved(root, nodes[0])
    return draft.call("clone", node, memory_format=torch.contiguous_format, before=root)


def _are_only_for(draft: Draft, nodes: Sequence[AnyNode], root: AnyNode) -> bool:
    return all(draft.num_users(node) == 1 for node in nodes) and all(draft.users(node) == [root] for node in nodes)


def _no_copy_saved(root: AnyNode, node: AnyNode) -> Refusal:
    sentence = f"{root.name} stays: {node.name} has other users, so the rewrite would save no copy"
    return Refusal(Reason.NO_GAIN, sentence, node.name)


def _neighbours(draft: Draft, root: AnyNode, nodes: Sequence[AnyNode], num_dims: int) -> Slice | Refusal | None:
    """The one slice that the selected elements form in their order, or why they form none."""
    dim = cut_dim(draft, nodes[0], num_dims, is_single=True)
    if dim is None:
        return None
    parts = joined(draft, nodes, dim, is_single=True)
    return parts[0] if len(parts) == 1 else _why_not_joined(root, parts)


def _turned(draft: Draft, node: AnyNode, dim: int, to: int, root: AnyNode) -> AnyNode:
    """The tensor with one dim moved to another position."""
    if dim == to:
        return node
    order = list(range(draft.value(node).dim()))
    order.insert(to, order.pop(dim))
    return draft.call("permute", node, order, before=root)


def _viewed(draft: Draft, match: Match) -> Replacement:
    """A view of the source, in place of a stack or concatenation of equally shaped views of its adjacent slices."""
    root, nodes = match.root, match["pieces"]
    value = draft.value(root)
    if len(nodes) < 2 or not all(isinstance(node, AnyNode) and node.target in RESHAPES for node in nodes):
        return None
    inner = [draft.bind(node)["self"] for node in nodes]
    whole = draft.value(inner[0])
    dim = cut_dim(draft, inner[0], whole.dim()) if isinstance(whole, Tensor) else None
    if dim is None or not isinstance(value, Tensor) or any(type(n) is not int for n in (*value.shape, *whole.shape)):
        return None
    parts = joined(draft, inner, dim)
    if len(parts) > 1:
        return _why_not_joined(root, parts)
    shapes = {
        (tuple(draft.value(node).shape), tuple(draft.value(i).shape)) for node, i in zip(nodes, inner, strict=True)
    }
    to = match["dim"] % value.dim()
    if len(shapes) > 1:
        return Refusal(
            Reason.UNSUPPORTED_FORM, f"{root.name} stays: its views of {parts[0].source.name} differ in size"
        )
    if dim and to:
        return Refusal(Reason.NO_GAIN, f"{root.name} stays: the rewrite would copy {parts[0].source.name} twice")
    ((shape, cut),) = shapes
    found = _cut(draft, parts[0], root)
    if dim:
        found = draft.call("reshape", found, [*cut[:dim], len(nodes), *cut[dim:]], before=root)
        found = _turned(draft, found, dim, 0, root)
    if to:
        found = _turned(draft, draft.call("reshape", found, [len(nodes), *shape], before=root), 0, to, root)
    if not to or root.target is not STACK:
        found = draft.call("reshape", found, list(value.shape), before=root)
    return _fitting(draft, found, root, nodes)


def _slice_of_part(draft: Draft, match: Match) -> Replacement:
    """A slice of a slice as a slice of the original; a slice of a concatenation as a slice of the part it lies in."""
    root = match.root
    value = draft.value(root)
    if not isinstance(value, Tensor):
        return None
    is_single = root.target is SELECT
    dim = cut_dim(draft, root, value.dim() + is_single, is_single=is_single)
    piece = None if dim is None else slice_of(draft, root, dim, is_single=is_single)
    if dim is None or piece is None:
        return None
    if not is_single and draft.num_users(root) == 1 and _cuts_along(draft, draft.users(root)[0], dim):
        return None  # within a chain of slices only the last one is rewritten, straight to the original
    whole = piece
    while (outer := slice_of(draft, whole.source, dim)) is not None:
        whole = Slice(outer.source, dim, outer.start + whole.start, outer.start + whole.end, outer.size)
    if whole is not piece:
        return _piece_or_element(draft, whole, is_single, root)
    cat = _cat(draft, piece.source)
    found = next(_within(draft, piece, cat), None) if cat is not None and cat.dim == dim else None
    if found is None or found.end - found.start < piece.end - piece.start:
        return None
    match.nodes.append(piece.source)  # its inputs are now read here
    return _piece_or_element(draft, found, is_single, root)


def _cuts_along(draft: Draft, node: AnyNode, dim: int) -> bool:
    if node.target not in CUTS and node.target is not SELECT:
        return False
    given = draft.bind(node)
    value = draft.value(given["self"])
    return isinstance(value, Tensor) and given["dim"] % value.dim() == dim


def _piece_or_element(draft: Draft, piece: Slice, is_single: bool, root: AnyNode) -> AnyNode:
    if is_single:
        return draft.call("select.int", piece.source, piece.dim, piece.start, before=root)
    return _cut(draft, piece, root)
