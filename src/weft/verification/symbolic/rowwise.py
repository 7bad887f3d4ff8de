"""Operators that compute each row of their result from one row of some inputs and from all of the other inputs.

Contract: derived from the meaning of the operators and from nothing else in Weft, in particular not from the code that
chunks products. Used only where rounding may differ, since a product of some rows may use another kernel than the
product of all rows. A row of the result is named by the elements of its input rows and by the numbers of the whole
inputs. So the product of a concatenation of rows has the names of the products of its parts, in any order. A product
whose right operand is a few tensors, one below the other, is the sum of their products with the same parts of the left
operand.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.verification.symbolic import elementwise
from weft.verification.symbolic.index_maps import Call
from weft.verification.symbolic.tensors import Run, Size, Terms, Undecided, Value, cut, join, product

MAX_ROWS = 1 << 13
"""Maximum number of rows that are named one by one. Evenly spaced rows are named together and do not count."""
MAX_JOINED = 8
"""Maximum number of tensors that a right operand is taken apart into."""
LEFT_AND_RIGHT: Mapping[str, tuple[str, str]] = {
    "mm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "matmul": ("self", "other"),
    "linear": ("input", "weight"),
    "_scaled_mm": ("self", "mat2"),
}
ONE_BY_ONE: Mapping[str, str] = {"bmm": "mm", "baddbmm": "addmm"}
"""Batched products, and the product of each matrix of the batch."""
COMMUTES = ("add", "mul")
"""Commutative pointwise operators."""
ALONG_A_ROW = ("mean", "sum", "amax", "amin")


def multiplied(call: Call) -> list[Value]:
    """A product of matrices, in real arithmetic."""
    return [product_of(call.terms, call.operator, call.arguments, *call.results[0])]


def summed(call: Call) -> list[Value]:
    """A sum, a mean or an extremum along the last dims, in real arithmetic."""
    return [reduced(call.terms, call.operator, call.arguments, *call.results[0])]


def applied(call: Call) -> list[Value]:
    """A pointwise operator, in real arithmetic."""
    return [pointwise(call.terms, call.operator, call.arguments, *call.results[0])]


def applied_to_each(call: Call) -> list[Value]:
    """A `_foreach` operator, in real arithmetic."""
    return [item for one in elementwise.each(call) for item in applied(one)]


@dataclass(frozen=True)
class Rows:
    """An input that contributes one row to each row of the result."""

    runs: Sequence[Run]
    width: int
    """Number of elements in a row."""


def product_of(
    terms: Terms, name: str, arguments: Mapping[str, Any], shape: tuple[Size, ...], dtype: torch.dtype
) -> Value:
    """The result of a product of matrices."""
    left, right = LEFT_AND_RIGHT[name]
    values = {key: value for key, value in arguments.items() if isinstance(value, Value)}
    first, second = values[left], values[right]
    _check_numbers([*shape, *first.shape, *second.shape])
    if len(first.shape) < 2 or not second.shape:
        raise Undecided
    others = {key: value for key, value in values.items() if key not in (left, right)}
    if name == "_scaled_mm" and not all(_is_per_row(key, value, shape) for key, value in others.items()):
        raise Undecided  # with block scales, the scale depends on the position of the row
    if name in ("addmm", "baddbmm") and _is_plain_sum(arguments):
        return _added(terms, first, second, others["self"], shape, dtype)
    name = ONE_BY_ONE.get(name, name)
    left = LEFT_AND_RIGHT[name][0]
    label = (name, _constants(arguments))
    if len(second.shape) == 1:
        made = _whole(terms, label, [(left, first)], (second,), (*shape, 1), dtype, left)
        return Value(shape, dtype, made.runs)
    if name == "mm" and len(second.shape) == 2 and len(lengths := _joined_terms(second)) > 1:
        return _sum_of_products(terms, first, second, lengths, shape, dtype)
    if len(second.shape) == 2:
        return _whole(terms, label, [(left, first), *others.items()], (second,), shape, dtype, left)
    if first.shape[:-2] != second.shape[:-2]:
        raise Undecided
    num = product(first.shape[:-2])
    added = [(key, _batches(value, shape, num)) for key, value in others.items()]
    runs: list[Run] = []
    for k, (mine, theirs) in enumerate(zip(_batches(first, shape, num), _batches(second, shape, num), strict=True)):
        rows = [(left, mine), *((key, parts[k]) for key, parts in added)]
        runs += _whole(terms, label, rows, (theirs,), shape[-2:], dtype, left).runs
    return Value(shape, dtype, join(runs))


def _added(
    terms: Terms, first: Value, second: Value, added: Value, shape: tuple[Size, ...], dtype: torch.dtype
) -> Value:
    """A product, or one for each matrix of a batch, plus the value that is added to it."""
    num = product(shape[:-2])
    runs: list[Run] = []
    for mine, theirs, bias in zip(*(_batches(value, shape, num) for value in (first, second, added)), strict=True):
        found = product_of(terms, "mm", {"self": mine, "mat2": theirs}, shape[-2:], dtype)
        runs += pointwise(terms, "add", {"self": found, "other": bias}, shape[-2:], dtype).runs
    return Value(shape, dtype, join(runs))


def _joined_terms(right: Value) -> list[int]:
    """Numbers of rows of the tensors that a right operand consists of; one number if it is not a few tensors."""
    rows, width = right.shape
    if type(rows) is not int or type(width) is not int or len({atom for atom, _, _ in right.runs}) == 1:
        return [0]
    lengths: list[int] = []
    last: frozenset[int] | None = None
    for row in cut(right.runs, [width] * rows) if rows <= MAX_ROWS else ():
        atoms = frozenset(atom for atom, _, _ in row)
        lengths = [*lengths[:-1], lengths[-1] + 1] if atoms == last else [*lengths, 1]
        last = atoms
        if len(lengths) > MAX_JOINED:
            return [0]
    return lengths


def _sum_of_products(
    terms: Terms, first: Value, second: Value, lengths: Sequence[int], shape: tuple[Size, ...], dtype: torch.dtype
) -> Value:
    """A product of operands that are several side by side: the sum of the products of the parts."""
    rows, width = first.shape[0], second.shape[1]
    columns = cut(first.runs, [length for _ in range(int(rows)) for length in lengths])
    blocks = cut(second.runs, [length * width for length in lengths])
    total: Value | None = None
    for k, length in enumerate(lengths):
        mine = Value((rows, length), first.dtype, join(run for piece in columns[k :: len(lengths)] for run in piece))
        theirs = Value((length, width), second.dtype, join(blocks[k]))
        found = product_of(terms, "mm", {"self": mine, "mat2": theirs}, shape, dtype)
        total = found if total is None else pointwise(terms, "add", {"self": total, "other": found}, shape, dtype)
    if total is None:
        raise Undecided
    return total


def _is_per_row(key: str, value: Value, shape: tuple[Size, ...]) -> bool:
    """Whether an argument of a scaled product is one number, has one number per row, or is the same for all rows."""
    of_all = product(value.shape) == 1 or key == "bias"
    return of_all or value.shape == ((shape[0], 1) if key == "scale_a" else (1, shape[-1]))


def _is_plain_sum(arguments: Mapping[str, Any]) -> bool:
    """Whether a value is added to the product without scaling either."""
    return isinstance(arguments.get("self"), Value) and all(arguments.get(key, 1) == 1 for key in ("alpha", "beta"))


def reduced(
    terms: Terms, name: str, arguments: Mapping[str, Any], shape: tuple[Size, ...], dtype: torch.dtype
) -> Value:
    """A sum, a mean or an extremum along the last dims."""
    value, dims = arguments["self"], arguments.get("dim")
    if not isinstance(value, Value) or not isinstance(dims, list | tuple) or not dims:
        raise Undecided
    rank = len(value.shape)
    if rank == 0:  # a scalar has no rows
        raise Undecided
    gone = sorted(d % rank for d in dims)
    if gone != list(range(rank - len(gone), rank)):
        raise Undecided
    _check_numbers(value.shape)
    width = product(value.shape[gone[0] :])
    constants = _constants({key: item for key, item in arguments.items() if key not in ("dim", "keepdim")})
    runs = _named(terms, (name, constants), [Rows(value.runs, width)], (), product(shape), 1, dtype)
    return Value(shape, dtype, runs)


def pointwise(
    terms: Terms, name: str, arguments: Mapping[str, Any], shape: tuple[Size, ...], dtype: torch.dtype
) -> Value:
    """A pointwise operator: element by element, or by rows if an input is broadcast over or along rows."""
    try:
        return elementwise.apply(terms, name, arguments, shape, dtype, reassociates=True)
    except Undecided:
        if len(shape) < 2:
            raise
    values = [(key, value) for key, value in arguments.items() if isinstance(value, Value)]
    if name in COMMUTES and arguments.get("alpha", 1) == 1:  # larger terms first
        values = [("term", value) for _, value in sorted(values, key=lambda pair: -product(pair[1].shape))]
    return _whole(terms, ("pointwise", name, _constants(arguments)), values, (), shape, dtype)


def _whole(
    terms: Terms,
    label: Hashable,
    values: Sequence[tuple[str, Value]],
    wholes: Sequence[Value],
    shape: tuple[Size, ...],
    dtype: torch.dtype,
    by_rows: str = "",
) -> Value:
    """The result of a call that takes some values by rows, always `by_rows`, and the others whole."""
    _check_numbers(shape)
    count, rows, slots = product(shape[:-1]), list[Rows](), list[Hashable]()
    taken = list(wholes)
    for key, value in values:
        _check_numbers(value.shape)
        outer = (1,) * (len(shape) - len(value.shape)) + tuple(value.shape)
        if len(outer) > len(shape):
            outer = _without_ones(outer, len(shape))
        if outer[:-1] == tuple(shape[:-1]) and (count > 1 or key == by_rows):
            rows.append(Rows(value.runs, outer[-1]))
            slots.append((key, "rows"))
        elif all(n == 1 for n in outer[:-1]):
            taken.append(Value(outer[-1:], value.dtype, value.runs))
            slots.append((key, "whole"))
        else:
            raise Undecided
    if not rows:
        raise Undecided
    numbers = tuple(terms.number(value) for value in taken)
    full = (label, tuple(slots), tuple(value.dtype for _, value in values))
    return Value(shape, dtype, _named(terms, full, rows, numbers, count, shape[-1], dtype))


def _without_ones(shape: tuple[Size, ...], rank: int) -> tuple[Size, ...]:
    extra = len(shape) - rank
    if any(n != 1 for n in shape[:extra]):
        raise Undecided
    return shape[extra:]


def _batches(value: Value, shape: tuple[Size, ...], num: int) -> list[Value]:
    """The matrices of a batch; a value without batch dims is repeated."""
    if len(value.shape) <= 2:
        return [value] * num
    if product(value.shape[:-2]) != num or num > MAX_ROWS:
        raise Undecided
    inner = tuple(value.shape[-2:])
    strips = cut(value.runs, [product(inner)] * num)
    return [Value(inner, value.dtype, join(strip)) for strip in strips]


def _constants(arguments: Mapping[str, Any]) -> Hashable:
    """The arguments that are not tensors, as part of a label."""
    return tuple((key, repr(value)) for key, value in sorted(arguments.items()) if not isinstance(value, Value))


def _check_numbers(sizes: Sequence[Size]) -> None:
    if any(type(size) is not int for size in sizes):
        raise Undecided


# Names of rows.


def _named(
    terms: Terms,
    label: Hashable,
    operands: Sequence[Rows],
    wholes: tuple[int, ...],
    count: int,
    width: int,
    dtype: torch.dtype,
) -> tuple[Run, ...]:
    """The runs of a result with `count` rows."""
    found: list[Run] = []
    named_alone = 0
    readers = [_RowReader(operand) for operand in operands]
    done = 0
    while done < count:
        together = min([count - done, *(reader.whole_rows() for reader in readers)])
        if together == 0:
            named_alone += 1
            if named_alone > MAX_ROWS:
                raise Undecided
        pieces = [reader.take(max(together, 1)) for reader in readers]
        found.append(_row(terms, label, pieces, wholes, max(together, 1), width, dtype))
        done += max(together, 1)
    return join(found)


def _row(
    terms: Terms,
    label: Hashable,
    operands: Sequence[Sequence[Run]],
    wholes: tuple[int, ...],
    together: int,
    width: int,
    dtype: torch.dtype,
) -> Run:
    """A run of evenly spaced rows, named by the pieces of its first row.

    The first piece divides its atom into pieces of equal length, and its index among them is the number of the row. All
    other pieces are given by their distance from their own position for that number. So the name does not depend on
    where the rows begin, and no two rows share a name.
    """
    first, start, length = operands[0][0]
    if type(terms.sizes[first]) is not int:
        raise Undecided
    number, phase = divmod(start, length)
    pieces = tuple((atom, begin - number * size) for row in operands for atom, begin, size in row)
    lengths = tuple(tuple(size for _, _, size in row) for row in operands)
    full = ("rows", label, lengths, phase, width)
    size = (terms.sizes[first] // length + 1) * width
    return terms.atom(full, size, dtype, pieces, wholes), number * width, together * width


class _RowReader:
    """Takes the runs of a value row by row."""

    def __init__(self, rows: Rows) -> None:
        self.width = rows.width
        self.rest: Iterator[Run] = iter(rows.runs)
        self.run: Run | None = next(self.rest, None)

    def whole_rows(self) -> int:
        """Number of whole rows in the next run; 0 if the next row spans several runs."""
        if self.run is None or self.width == 0 or type(self.run[2]) is not int or type(self.run[1]) is not int:
            raise Undecided
        return self.run[2] // self.width

    def take(self, count: int) -> list[Run]:
        """The pieces of the next row; then skip `count` rows."""
        pieces: list[Run] = []
        need = self.width if self.whole_rows() == 0 else self.width * count
        while need:
            if self.run is None:
                raise Undecided
            atom, start, length = self.run
            part = min(need, length)
            pieces.append((atom, start, part))
            need -= part
            self.run = (atom, start + part, length - part) if part < length else next(self.rest, None)
        if len(pieces) == 1:
            atom, start, _ = pieces[0]
            return [(atom, start, self.width)]
        return pieces
