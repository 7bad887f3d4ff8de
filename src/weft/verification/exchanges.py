"""Where each element that a collective delivers comes from.

Contract: written from what the collectives mean, element by element, and from nothing else in Weft. An element that is
received is named by the kind, the group and the elements that went into it, so the collective of a concatenation has
the names of the collectives of its parts. Moves of data commute with the reading of bytes; reductions do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.groups import Group
from weft.graph.ops import Kind
from weft.verification.index_maps import as_dtype, bytes_of
from weft.verification.terms import (
    Run,
    Segment,
    Size,
    Terms,
    Undecided,
    Value,
    align,
    cut,
    divide,
    join,
    product,
    settle,
)

REDUCE_SCATTER = "reduce_scatter"
EVEN = 5
"""Parts of the label of a scatter of which all parts lie in one atom, the last one being the step between them."""


def delivered(
    terms: Terms,
    collective: Collective,
    value: Any,
    group: Hashable,
    splits: Sequence[Any],
    shape: tuple[Size, ...],
    reassociates: bool = False,
) -> Value:
    """What a rank receives for one tensor that it sent. `splits` are those in and out of an all-to-all."""
    if not isinstance(value, Value):
        raise Undecided
    bound = ops.bind(collective.launch)
    kind, reduce_op = collective.kind, collective.reduce_op
    if not all(type(bound.get(name, 0)) is int for name in ("group_size", "src")):
        raise Undecided
    if isinstance(group, tuple) and any(isinstance(part, Group) and part.size == 1 for part in group):
        return alone(value, shape)
    if kind is Kind.ALL_REDUCE:
        return all_reduced(terms, value, group, reduce_op, shape)
    if kind is Kind.BROADCAST:
        return sent_from(terms, value, group, bound["src"], shape)
    if kind is Kind.ALL_GATHER:
        summed = scattered_and_gathered(terms, value, group, bound["group_size"], shape) if reassociates else None
        return summed or gathered(terms, value, group, bound["group_size"], shape)
    if kind is Kind.REDUCE_SCATTER:
        return scattered(terms, value, group, reduce_op, bound["group_size"], shape)
    into, out = splits
    if kind is not Kind.ALL_TO_ALL or not into or into != out or any(n != into[0] for n in into):
        raise Undecided
    return exchanged(terms, value, group, len(into), shape)


def alone(value: Value, shape: tuple[Size, ...]) -> Value:
    """The only rank of a group receives what it sent."""
    if product(shape) != product(value.shape):
        raise Undecided
    return Value(shape, value.dtype, value.runs)


def all_reduced(terms: Terms, value: Value, group: Hashable, reduce_op: str | None, shape: tuple[Size, ...]) -> Value:
    """Element i of the result is the sum (or another reduction) of element i on every rank."""
    label = ("all_reduce", reduce_op, group)
    runs = join((terms.atom(label, terms.sizes[a], value.dtype, ((a, 0),)), s, n) for a, s, n in value.runs)
    return Value(shape, value.dtype, runs)


def sent_from(terms: Terms, value: Value, group: Hashable, source: int, shape: tuple[Size, ...]) -> Value:
    """Element i of the result is element i on the source rank."""
    label = ("broadcast", source, group)
    return Value(shape, value.dtype, join((_moved(terms, label, a, 1), s, n) for a, s, n in value.runs))


def gathered(terms: Terms, value: Value, group: Hashable, num_ranks: int, shape: tuple[Size, ...]) -> Value:
    """Part k of the result is the value on rank k.

    The elements of an atom on rank k follow those on rank k - 1 in one larger atom: gathering a whole is one run.
    """
    label = ("all_gather", num_ranks, group)
    parts = [(_moved(terms, label, a, num_ranks), terms.sizes[a], s, n) for a, s, n in value.runs]
    runs = ((atom, settle(k * size + s), n) for k in range(num_ranks) for atom, size, s, n in parts)
    return Value(shape, value.dtype, join(runs))


def scattered_and_gathered(
    terms: Terms, value: Value, group: Hashable, num_ranks: int, shape: tuple[Size, ...]
) -> Value | None:
    """Parts that were reduced and scattered, gathered again, as the reduction of the whole; None where they are not.

    In real arithmetic: which ranks are added first is another matter.
    """
    runs: list[Run] = []
    for k in range(num_ranks):
        for atom, start, length in value.runs:
            label = _label(terms, atom)
            if label[0] != REDUCE_SCATTER or label[2] != group or not is_real(label[1], value.dtype):
                return None
            step = label[-1] if len(label) == EVEN else None
            source, shift = terms.operands[atom][0 if step is not None else k]
            shift = settle(k * step) if step is not None else shift
            reduced = terms.atom(("all_reduce", label[1], group), terms.sizes[source], value.dtype, ((source, 0),))
            runs.append((reduced, settle(start + shift), length))
    return Value(shape, value.dtype, join(runs))


def is_real(reduce_op: Hashable, dtype: torch.dtype | None) -> bool:
    """Whether a reduction is one of real numbers: an average of integers rounds, and where it does is not said."""
    return reduce_op != "avg" or (dtype is not None and (dtype.is_floating_point or dtype.is_complex))


def _label(terms: Terms, atom: int) -> tuple[Any, ...]:
    found: Any = terms.labels[atom]
    return found if isinstance(found, tuple) else (found,)  # pyright: ignore[reportUnknownVariableType]


def scattered(
    terms: Terms, value: Value, group: Hashable, reduce_op: str | None, num_ranks: int, shape: tuple[Size, ...]
) -> Value:
    """Element p of the result on rank r is the reduction of element p of part r on every rank.

    Which part is one's own is not known here; so an element is named by all the parts it may come from.
    """
    label = (REDUCE_SCATTER, reduce_op, group)
    parts = _parts(value, num_ranks)
    runs = join(_by_rank(terms, label, segment, value.dtype) for segment in align(parts))
    return Value(shape, value.dtype, runs)


def exchanged(terms: Terms, value: Value, group: Hashable, num_ranks: int, shape: tuple[Size, ...]) -> Value:
    """Element p of part k of the result on rank r is element p of part r on rank k."""
    segments = list(align(_parts(value, num_ranks)))
    runs: Iterable[Run] = (
        _from_rank(terms, ("all_to_all", k, group), segment, value.dtype)
        for k in range(num_ranks)
        for segment in segments
    )
    return Value(shape, value.dtype, join(runs))


def _parts(value: Value, num_ranks: int) -> list[list[Run]]:
    if num_ranks < 1:
        raise Undecided
    return cut(value.runs, [divide(product(value.shape), num_ranks)] * num_ranks)


def _by_rank(terms: Terms, label: tuple[Hashable, ...], segment: Segment, dtype: torch.dtype | None) -> Run:
    """A run named by one element per rank; where those are one atom at even steps, by the atom and the step."""
    atoms, starts, length = segment
    step = _even_step(atoms, starts)
    if step is None:
        return terms.combined(label, segment, dtype)
    operands = ((atoms[0], 0),)
    return terms.atom((*label, len(atoms), step), terms.sizes[atoms[0]], dtype, operands), starts[0], length


def _even_step(atoms: Sequence[int], starts: Sequence[Size]) -> Size | None:
    if len(atoms) < 2 or any(atom != atoms[0] for atom in atoms):
        return None
    step = settle(starts[1] - starts[0])
    even = all(settle(after - before) == step for before, after in itertools.pairwise(starts))
    return step if even else None


def _moved(terms: Terms, label: Hashable, atom: int, times: int) -> int:
    """The atom that a move delivers. The bytes of a moved atom are its moved bytes."""
    kind = terms.labels[atom]
    if kind == "bytes":
        return bytes_of(terms, _moved(terms, label, terms.operands[atom][0][0], times))
    dtype, size = terms.dtypes[atom], terms.sizes[atom]
    if kind == "of bytes" and dtype is not None:
        source = terms.operands[atom][0][0]
        if terms.sizes[source] == settle(size * dtype.itemsize):
            return as_dtype(terms, _moved(terms, label, source, times), dtype)
    return terms.atom(label, settle(size * times), dtype, ((atom, 0),))


def _from_rank(terms: Terms, label: tuple[Hashable, ...], segment: Segment, dtype: torch.dtype | None) -> Run:
    """As `_by_rank`, for a move: bytes of elements that move whole are the bytes of moved elements."""
    atoms, starts, length = segment
    sources = [terms.operands[a][0][0] for a in atoms if terms.labels[a] == "bytes"]
    dtypes = {terms.dtypes[source] for source in sources}
    if len(sources) < len(atoms) or len(dtypes) != 1:
        return _by_rank(terms, label, segment, dtype)
    (inner,) = dtypes
    if inner is None:
        return _by_rank(terms, label, segment, dtype)
    size = inner.itemsize
    try:
        steps = [divide(settle(start - starts[0]), size) for start in starts]
    except Undecided:
        return _by_rank(terms, label, segment, dtype)
    atom, _, _ = _by_rank(terms, label, (tuple(sources), tuple(steps), 1), inner)
    return bytes_of(terms, atom), starts[0], length
