"""Index maps: where each element of a view, a copy, a slice, a permutation or a concatenation comes from.

Contract: derived from the meaning of the operators and from nothing else in Weft, in particular not from the code that
builds buckets. A map that cannot be followed raises `Undecided`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.verification.symbolic.casts import FILLABLE, is_seen_through
from weft.verification.symbolic.tensors import (
    MAX_RUNS,
    Run,
    Size,
    Terms,
    Undecided,
    Value,
    cut,
    divide,
    join,
    product,
    same_elements,
    settle,
)

CAST = "cast"
FILL = "fill"
"""Label of elements that are all one number, whatever the data."""
MAX_ROWS = 1 << 11
"""Maximum number of rows that one slice or concatenation may cut; buckets have one per rank, activations millions."""
MAX_BLOCKS = 1 << 11
"""Maximum number of blocks that one permutation may move."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its arguments by name, with tensors as values, and the types of its results."""

    terms: Terms
    arguments: Mapping[str, Any]
    results: Sequence[tuple[tuple[Size, ...], torch.dtype]]
    """Shape and dtype of each result."""
    same_device: bool
    """Whether everything is on one device."""
    device: str = ""
    """The device of the results."""
    operator: str = ""
    """The name of the operator, without namespace, overload and the underscore of an in-place call."""

    @property
    def source(self) -> Value:
        value = next((v for v in self.arguments.values() if isinstance(v, Value)), None)
        if value is None:
            raise Undecided
        return value

    @property
    def sources(self) -> list[Value]:
        values = self.arguments.get("tensors")
        if not isinstance(values, list | tuple) or not all(isinstance(v, Value) for v in values):
            raise Undecided
        return list(values)


LawRule = Callable[[Call], list[Value] | None]
"""Computes the results of a call; None where the rule does not apply."""


def relabel(call: Call) -> list[Value]:
    """The same elements in the same order, in another shape."""
    (shape, dtype), *_ = call.results
    if dtype != call.source.dtype:
        raise Undecided
    return [_shaped(call.source.runs, shape, dtype, call.source.shape)]


def copied(call: Call) -> list[Value]:
    """A copy on the same device, possibly in another dtype."""
    if not call.same_device:
        raise Undecided
    (shape, dtype), *_ = call.results
    found = cast(call.terms, call.source, dtype)
    return [_shaped(found.runs, shape, dtype, found.shape)]


def copied_over(call: Call) -> list[Value] | None:
    """`copy` and `copy_`: the source in the dtype of the target, if both have the same elements and device."""
    source, (shape, dtype) = call.arguments["src"], call.results[0]
    if not isinstance(source, Value) or not call.same_device or not same_elements(source.shape, shape):
        return None
    return [_shaped(cast(call.terms, source, dtype).runs, shape, dtype, source.shape)]


def cast(terms: Terms, value: Value, dtype: torch.dtype) -> Value:
    """A value converted to a dtype, element by element. A lossless cast before it is skipped."""
    if value.dtype == dtype:
        return value
    return Value(value.shape, dtype, join((_cast_atom(terms, a, dtype), s, n) for a, s, n in value.runs))


def _cast_atom(terms: Terms, atom: int, dtype: torch.dtype) -> int:
    label = terms.labels[atom]
    if isinstance(label, tuple) and label[0] == CAST:
        source = terms.operands[atom][0][0]
        if is_seen_through(terms.dtypes[source], terms.dtypes[atom], dtype):
            return source if terms.dtypes[source] == dtype else _cast_atom(terms, source, dtype)
    return terms.atom((CAST, dtype), terms.sizes[atom], dtype, ((atom, 0),))


HOST = "in host memory"
"""Label of elements that were copied to host memory, together with the device that they come from."""


def offloaded(terms: Terms, value: Value, device: str) -> Value:
    """A value in host memory. The mark keeps compute there apart from compute on the device: it may round otherwise."""
    marked = (
        (terms.atom((HOST, device), terms.sizes[a], value.dtype, ((a, 0),)), start, length)
        for a, start, length in value.runs
    )
    return Value(value.shape, value.dtype, join(marked))


def on_host(call: Call) -> list[Value]:
    """`weft::copy_to_host`: the elements of the sources one after the other, in host memory."""
    shape, dtype = call.results[0]
    if any(value.dtype != dtype for value in call.sources):
        raise Undecided
    found = _shaped(join(run for value in call.sources for run in value.runs), shape, dtype, None)
    return [found if call.same_device else offloaded(call.terms, found, "")]


def read_by_host(terms: Terms, value: Value) -> Value:
    """The value of a number without the mark of host memory: the host reads the same number there as on the device."""
    is_marked = (isinstance(label := terms.labels[a], tuple) and label[0] == HOST for a, _, _ in value.runs)
    runs = ((terms.operands[a][0][0] if m else a, s, n) for (a, s, n), m in zip(value.runs, is_marked, strict=True))
    return Value((), value.dtype, join(runs))


def fetched(terms: Terms, value: Value, device: str) -> Value:
    """The value on a device again, if it was copied to host memory from there."""
    if any(terms.labels[atom] != (HOST, device) for atom, _, _ in value.runs):
        raise Undecided
    return Value(value.shape, value.dtype, join((terms.operands[a][0][0], s, n) for a, s, n in value.runs))


def sliced(call: Call) -> list[Value]:
    """`slice`: a range of one dim."""
    a = call.arguments
    dim = _dim(a.get("dim", 0), call.source.shape)
    extent = call.source.shape[dim]
    if a.get("step", 1) != 1:
        raise Undecided
    start, end = _bound(a.get("start"), 0, extent), _bound(a.get("end"), extent, extent)
    kept = call.results[0][0][dim]
    if type(extent) is int and settle(end - start) != kept and not (kept == 0 and end <= start):
        raise Undecided
    return [_pieces(call, dim, [start, kept, settle(extent - start - kept)])[1]]


def narrowed(call: Call) -> list[Value]:
    """`narrow`: a range of one dim, given by its length."""
    dim = _dim(call.arguments["dim"], call.source.shape)
    extent, length = call.source.shape[dim], call.arguments["length"]
    start = _bound(call.arguments["start"], 0, extent)
    return [_pieces(call, dim, [start, length, settle(extent - start - length)])[1]]


def selected(call: Call) -> list[Value]:
    """`select`: one index of a dim, which disappears."""
    dim = _dim(call.arguments["dim"], call.source.shape)
    extent = call.source.shape[dim]
    index = _bound(call.arguments["index"], 0, extent)
    found = _pieces(call, dim, [index, 1, settle(extent - index - 1)])[1]
    return [_shaped(found.runs, call.results[0][0], call.source.dtype, found.shape)]


def parted(call: Call) -> list[Value]:
    """`split`, `split_with_sizes` and `chunk`: consecutive ranges of one dim, with the lengths of the results."""
    dim = _dim(call.arguments.get("dim", 0), call.source.shape)
    lengths = [shape[dim] for shape, _ in call.results]
    given = call.arguments.get("split_sizes", call.arguments.get("split_size"))
    if isinstance(given, list | tuple) and [settle(n) for n in given] != lengths:
        raise Undecided
    if type(given) is int and any(n != given for n in lengths[:-1]):
        raise Undecided
    return _pieces(call, dim, lengths)


def unbound(call: Call) -> list[Value]:
    """`unbind`: every index of one dim."""
    dim = _dim(call.arguments.get("dim", 0), call.source.shape)
    pieces = _pieces(call, dim, [1] * len(call.results))
    return [_shaped(p.runs, shape, dtype, p.shape) for p, (shape, dtype) in zip(pieces, call.results, strict=True)]


def concatenated(call: Call) -> list[Value]:
    """`cat`: the sources one after the other along one dim."""
    shape, dtype = call.results[0]
    dim = _dim(call.arguments.get("dim", 0), shape)
    sources = [v for v in call.sources if v.shape != (0,)]  # torch skips empty vectors, whatever the rank of the others
    return [_interleave(call, sources, dim, [v.shape[dim] for v in sources], shape, dtype)]


def stacked(call: Call) -> list[Value]:
    """`stack`: the sources one after the other along a new dim."""
    shape, dtype = call.results[0]
    dim = _dim(call.arguments.get("dim", 0), shape)
    return [_interleave(call, call.sources, dim, [1] * len(call.sources), shape, dtype)]


def of_one_number(call: Call, number: Any, shape: tuple[Size, ...], dtype: torch.dtype) -> Value:
    """A tensor filled with one number, known by the number and the device."""
    if product(shape) == 0:
        return Value(shape, dtype, ())
    is_large = type(number) is int and number.bit_length() > 64
    if not isinstance(number, int | float) or dtype not in FILLABLE or is_large:
        raise Undecided
    number = bool(number) if dtype is torch.bool else float(number) if dtype.is_floating_point else number
    return call.terms.whole((FILL, repr(number), call.device), shape, dtype)


def number_of(label: Hashable) -> int | float | None:
    """The number that an atom with this label is filled with, or None."""
    if not (isinstance(label, tuple) and label[0] == FILL):
        return None
    number = ast.literal_eval(text) if (text := str(label[1])) not in ("inf", "-inf", "nan") else float(text)
    return int(number) if isinstance(number, bool) else number


def padded(call: Call) -> list[Value]:
    """`constant_pad_nd`: the source with copies of one number before and after it, along the last dims."""
    value, pad, number = call.source, call.arguments["pad"], call.arguments.get("value", 0)
    result, dtype = call.results[0]
    if any(type(n) is not int or n < 0 for n in pad) or value.dtype != dtype or not call.same_device:
        raise Undecided
    for k, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = len(value.shape) - 1 - k
        sides = [(*value.shape[:dim], n, *value.shape[dim + 1 :]) for n in (before, after)]
        front, back = (of_one_number(call, number, shape, dtype) for shape in sides)
        extents = [before, value.shape[dim], after]
        shape = (*value.shape[:dim], settle(sum(extents)), *value.shape[dim + 1 :])
        value = _interleave(call, [front, value, back], dim, extents, shape, dtype)
    if value.shape != result:
        raise Undecided
    return [value]


def permuted(call: Call) -> list[Value]:
    """`permute`, `transpose` and `t`: dims in another order."""
    value, (shape, dtype) = call.source, call.results[0]
    dims = _order_of(call.arguments, len(value.shape))
    moving = [d for d in dims if value.shape[d] != 1]
    kept = sorted(moving)
    flat = Value(tuple(value.shape[d] for d in kept), value.dtype, value.runs)
    runs = turned(call.terms, flat, tuple(kept.index(d) for d in moving))
    return [_shaped(runs, shape, dtype, value.shape)]


def expanded(call: Call) -> list[Value]:
    """`expand`: repeats, unless it only adds dims of size one."""
    value, (shape, dtype) = call.source, call.results[0]
    if product(shape) == product(value.shape):
        return [_shaped(value.runs, shape, dtype, value.shape)]
    flat = Value(value.shape, dtype, value.runs)
    return [call.terms.whole(("expand", shape), shape, dtype, (call.terms.number(flat),))]


def reinterpreted(call: Call) -> list[Value]:
    """`view.dtype`: the same bytes as another dtype."""
    shape, dtype = call.results[0]
    runs = from_bytes(call.terms, to_bytes(call.terms, call.source), dtype)
    return [_shaped(runs, shape, dtype, None)]


def packed(call: Call) -> list[Value]:
    """`weft::pack`: row k holds the converted k-th row of every tensor, each at an aligned byte."""
    terms, shape = call.terms, call.results[0][0]
    num_rows, alignment = call.arguments["num_rows"], call.arguments["alignment"]
    rows: list[list[Run]] = [[] for _ in range(num_rows)]
    filled = 0
    for value, dtype in zip(call.sources, call.arguments["dtypes"], strict=True):
        if not isinstance(dtype, torch.dtype):
            raise Undecided
        length = divide(settle(product(value.shape) * dtype.itemsize), num_rows)
        pad = _padding(terms, filled, alignment)
        for row, piece in zip(rows, cut(to_bytes(terms, cast(terms, value, dtype)), [length] * num_rows), strict=True):
            row += [*pad, *piece]
        filled = settle(filled + sum(n for _, _, n in pad) + length)
    end = _padding(terms, filled, alignment)
    return [_shaped(join(run for row in rows for run in [*row, *end]), shape, torch.uint8, None)]


def _padding(terms: Terms, filled: Size, alignment: int) -> list[Run]:
    if type(filled) is not int:
        divide(filled, alignment)
        return []
    gap = -filled % alignment
    return [(terms.atom(("padding", gap), gap, torch.uint8), 0, gap)] if gap else []


# Bytes.


def to_bytes(terms: Terms, value: Value) -> tuple[Run, ...]:
    """The bytes of a value."""
    size = _item_size(value.dtype)
    return join((bytes_of(terms, a), settle(s * size), settle(n * size)) for a, s, n in value.runs)


def from_bytes(terms: Terms, runs: Sequence[Run], dtype: torch.dtype) -> tuple[Run, ...]:
    """Bytes read as elements of a dtype; each element must lie within one run."""
    size = dtype.itemsize
    return join((as_dtype(terms, a, dtype), divide(s, size), divide(n, size)) for a, s, n in runs)


def bytes_of(terms: Terms, atom: int) -> int:
    """The atom of an atom's bytes."""
    dtype, label = terms.dtypes[atom], terms.labels[atom]
    if dtype is torch.uint8:
        return atom
    if label == "of bytes":
        return terms.operands[atom][0][0]
    return terms.atom("bytes", settle(terms.sizes[atom] * _item_size(dtype)), torch.uint8, ((atom, 0),))


def as_dtype(terms: Terms, atom: int, dtype: torch.dtype) -> int:
    """The atom of another dtype that has the same bytes as `atom`."""
    if dtype is torch.uint8:
        return atom
    if terms.labels[atom] == "bytes":
        source = terms.operands[atom][0][0]
        if terms.dtypes[source] is dtype:
            return source
    size = terms.sizes[atom]
    whole = size // dtype.itemsize if type(size) is int else divide(size, dtype.itemsize)
    return terms.atom("of bytes", whole, dtype, ((atom, 0),))


def _item_size(dtype: torch.dtype | None) -> int:
    if dtype is None:
        raise Undecided
    return dtype.itemsize


# Ranges of dims.


def _dim(dim: Any, shape: Sequence[Size]) -> int:
    if type(dim) is not int or not -len(shape) <= dim < len(shape):
        raise Undecided
    return dim % len(shape)


def _bound(given: Any, default: Size, extent: Size) -> Size:
    """A start or an end as torch reads it: counted from the end if negative, and clamped."""
    if given is None:
        return default
    if type(given) is int:
        if type(extent) is int:
            return min(max(given + extent if given < 0 else given, 0), extent)
        if given >= 1 << 62:
            return extent
        return given if given >= 0 else settle(extent + given)
    return settle(given)


def _around(shape: Sequence[Size], dim: int) -> tuple[int, Size]:
    """The number of rows outside a dim, and the number of elements at one index of it."""
    outer, inner = product(shape[:dim]), product(shape[dim + 1 :])
    if type(outer) is not int or outer > MAX_ROWS:
        raise Undecided
    return outer, inner


def _pieces(call: Call, dim: int, lengths: Sequence[Size]) -> list[Value]:
    """A value cut along one dim into ranges of these lengths."""
    value = call.source
    outer, inner = _around(value.shape, dim)
    if outer * len(lengths) > MAX_RUNS or any(type(n) is int and n < 0 for n in lengths):
        raise Undecided
    strips = cut(value.runs, [settle(n * inner) for n in lengths] * outer)
    count = len(lengths)
    return [
        Value(
            (*value.shape[:dim], length, *value.shape[dim + 1 :]),
            value.dtype,
            join(run for strip in strips[k::count] for run in strip),
        )
        for k, length in enumerate(lengths)
    ]


def _interleave(
    call: Call, sources: Sequence[Value], dim: int, extents: Sequence[Size], shape: tuple[Size, ...], dtype: torch.dtype
) -> Value:
    """The rows of all sources, taken in turn."""
    if settle(sum(extents)) != (shape[dim] if sources else 0):
        raise Undecided
    outer, inner = _around(shape, dim)
    if outer * len(sources) > MAX_RUNS:
        raise Undecided
    strips = [
        cut(cast(call.terms, value, dtype).runs, [settle(extent * inner)] * outer)
        for value, extent in zip(sources, extents, strict=True)
    ]
    return Value(shape, dtype, join(run for row in zip(*strips, strict=True) for strip in row for run in strip))


def _order_of(arguments: Mapping[str, Any], rank: int) -> list[int]:
    dims = arguments.get("dims")
    if dims is not None:
        return [_dim(d, range(rank)) for d in dims]
    found = list(range(rank))
    if rank < 2:
        return found
    first, second = _dim(arguments.get("dim0", 0), found), _dim(arguments.get("dim1", 1), found)
    found[first], found[second] = second, first
    return found


def _shaped(
    runs: tuple[Run, ...], shape: tuple[Size, ...], dtype: torch.dtype | None, before: tuple[Size, ...] | None
) -> Value:
    """A value in another shape; undecided if the number of elements would change."""
    if before is None:
        count = settle(sum(n for _, _, n in runs))
    else:
        count = product(before)
    if product(shape) != count:
        raise Undecided
    return Value(shape, dtype, runs)


# Dims in another order.


def turned(terms: Terms, value: Value, order: tuple[int, ...]) -> tuple[Run, ...]:
    """The elements of a value after a permutation of its dims, all of size two or more.

    Elements that stay together are followed as blocks, and the matrices of a batch are permuted one by one. Where that
    would give too many blocks, the result is a new atom, named by the order and by everything that is permuted.
    """
    value, order = _unturned(terms, value, order)
    if order == tuple(range(len(order))):
        return value.runs
    blocks = _blocks(value.shape, order)
    if blocks is not None:
        inner, places = blocks
        strips = cut(value.runs, [inner] * len(places))
        return join(run for place in places for run in strips[place])
    fixed = next(k for k, d in enumerate(order) if d != k)
    count = product(value.shape[:fixed])
    if fixed and type(count) is int and count <= MAX_BLOCKS:
        shape, rest = tuple(value.shape[fixed:]), tuple(d - fixed for d in order[fixed:])
        parts = cut(value.runs, [product(shape)] * count)
        return join(run for part in parts for run in turned(terms, Value(shape, value.dtype, join(part)), rest))
    shape = tuple(value.shape[d] for d in order)
    return terms.whole(("permute", order), shape, value.dtype, (terms.number(value),)).runs


def _unturned(terms: Terms, value: Value, order: tuple[int, ...]) -> tuple[Value, tuple[int, ...]]:
    """Two permutations in a row as one permutation of the original value."""
    label = terms.labels[value.runs[0][0]] if len(value.runs) == 1 else None
    if not (isinstance(label, tuple) and label[0] == "permute" and value.runs[0][1:] == (0, product(value.shape))):
        return value, order
    before = terms.numbered[terms.values[value.runs[0][0]][0]]
    first: tuple[int, ...] = label[1]
    if tuple(before.shape[d] for d in first) != value.shape:
        return value, order
    return before, tuple(first[d] for d in order)


def _blocks(extents: tuple[Size, ...], order: tuple[int, ...]) -> tuple[Size, list[int]] | None:
    """Elements per block that stays together, and the source of each block; None if there are too many blocks."""
    still = 0
    while order[-1 - still] == len(order) - 1 - still:
        still += 1
    moved = order[: len(order) - still]
    sizes = extents[: len(moved)]
    if any(type(n) is not int for n in sizes) or product(sizes) > MAX_BLOCKS:
        return None
    steps = [product(sizes[d + 1 :]) for d in range(len(sizes))]
    places = [0]
    for d in moved:
        places = [place + k * steps[d] for place in places for k in range(sizes[d])]
    return product(extents[len(moved) :]), places
