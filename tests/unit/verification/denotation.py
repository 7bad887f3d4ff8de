"""What symbolic values mean, in numbers: an independent reading of the labels of atoms, used to try the laws.

Each atom is computed from what it is made of, element by element, by torch itself on tensors of one element. Atoms
whose making is not known (inputs, opaque calls) have the numbers that they are given.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.graph.groups import Group
from weft.verification.symbolic.collectives import Reach
from weft.verification.symbolic.tensors import Terms, Value

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def concatenated(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Flat tensors one after the other, byte by byte: not every dtype has a kernel for that."""
    bytes_ = [packed(part).view(torch.uint8) for part in parts]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *bytes_]).view(dtype)


def packed(tensor: Tensor) -> Tensor:
    """The elements of a tensor in a row of their own."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))


def same(first: Tensor, second: Tensor) -> bool:
    """Whether dtype, shape and every bit are equal; a NaN is a NaN."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.dtype.is_complex:
        first, second = (torch.view_as_real(packed(t)) for t in (first, second))
    rows = [packed(t).reshape(-1, 1).view(torch.uint8) for t in (first, second)]
    if not first.dtype.is_floating_point:
        return torch.equal(*rows)
    nans = [t.reshape(-1).to(torch.float64).isnan() for t in (first, second)]
    return torch.equal(*nans) and torch.equal(rows[0][~nans[0]], rows[1][~nans[1]])


class Denotation:
    """The numbers of the atoms of a table, on each rank."""

    def __init__(self, terms: Terms, num_ranks: int = 1) -> None:
        self.terms, self.num_ranks = terms, num_ranks
        self.given: dict[tuple[int, int], Tensor] = {}
        """By atom and rank, the elements of atoms that are made of nothing."""
        self._known: dict[tuple[int, int], Tensor] = {}

    def value(self, value: Value, rank: int = 0) -> Tensor:
        """The numbers of a value."""
        assert value.dtype is not None
        parts = [self.atom(atom, rank)[start : start + length] for atom, start, length in value.runs]
        return concatenated(parts, value.dtype).reshape(value.shape)

    def atom(self, atom: int, rank: int) -> Tensor:
        """The elements of an atom."""
        key = (atom, rank)
        if key in self.given:
            return self.given[key]
        if key not in self._known:
            label: Any = self.terms.labels[atom]
            name, *rest = label if isinstance(label, tuple) else (label,)
            self._known[key] = MEANINGS[name](self, atom, rank, *rest)
        return self._known[key]

    def operand(self, atom: int, rank: int, number: int = 0) -> Tensor:
        """The elements of an atom that an atom is made of."""
        return self.atom(self.terms.operands[atom][number][0], rank)

    def members(self, group: Any, rank: int) -> Sequence[int]:
        """The ranks of the group that a rank is of."""
        if isinstance(group, Reach):
            start = rank - rank % sum(map(len, group.parts))
            return next([start + k for k in ranks] for ranks in group.parts if rank - start in ranks)
        found = next(part for part in group if isinstance(part, Group))
        return next(ranks for ranks in found.partition(self.num_ranks) if rank in ranks)


Meaning = Callable[..., Tensor]


def _cast(it: Denotation, atom: int, rank: int, dtype: torch.dtype) -> Tensor:
    return it.operand(atom, rank).to(dtype)


def _fill(it: Denotation, atom: int, rank: int, text: str, device: str) -> Tensor:
    number = float(text) if text in ("inf", "-inf", "nan") else ast.literal_eval(text)
    return torch.full((it.terms.sizes[atom],), number, dtype=it.terms.dtypes[atom])


def _bytes(it: Denotation, atom: int, rank: int) -> Tensor:
    return it.operand(atom, rank).view(torch.uint8)


def _of_bytes(it: Denotation, atom: int, rank: int) -> Tensor:
    dtype, found = it.terms.dtypes[atom], it.operand(atom, rank)
    assert dtype is not None
    return found[: len(found) // dtype.itemsize * dtype.itemsize].clone().view(dtype)


def _expand(it: Denotation, atom: int, rank: int, shape: tuple[int, ...]) -> Tensor:
    (number,) = it.terms.values[atom]
    return it.value(it.terms.numbered[number], rank).expand(shape).reshape(-1)


def _permute(it: Denotation, atom: int, rank: int, order: tuple[int, ...]) -> Tensor:
    (number,) = it.terms.values[atom]
    return it.value(it.terms.numbered[number], rank).permute(order).reshape(-1)


def _padding(it: Denotation, atom: int, rank: int, gap: int) -> Tensor:
    return torch.zeros(gap, dtype=torch.uint8)


def _elementwise(it: Denotation, atom: int, rank: int, name: str, dtype: torch.dtype, slots: tuple[Any, ...]) -> Tensor:
    """Element by element, each computed alone."""
    operands = [(it.atom(a, rank), shift) for a, shift in it.terms.operands[atom]]
    size = it.terms.sizes[atom]
    first = max(-shift for _, shift in operands)
    last = min(len(data) - shift for data, shift in operands)
    operator = getattr(torch.ops.aten, name)
    made: list[Tensor] = []
    for e in range(first, last):
        rest = iter(operands)
        arguments: dict[str, Any] = {}
        for argument, *what in slots:
            if len(what) == 1:
                arguments[argument] = _constant(*what[0])
            elif what[1] == "for all":
                arguments[argument] = it.value(it.terms.numbered[what[0]], rank)
            else:
                data, shift = next(rest)
                arguments[argument] = data[e + shift] if what[1] else data[e + shift : e + shift + 1]
        if name == "masked_fill" and isinstance(arguments["value"], Tensor):
            arguments["value"] = arguments["value"].reshape(())  # torch takes no other
        made.append(operator(**arguments).reshape(1).to(dtype))
    spare = torch.zeros(size, dtype=dtype)
    return concatenated([spare[:first], *made, spare[max(last, first) :]], dtype)


def _constant(kind: str, text: str) -> Any:
    return {"float": float, "int": int, "bool": "True".__eq__, "NoneType": lambda _: None, "str": ast.literal_eval}[
        kind
    ](text)


def _sum(it: Denotation, atom: int, rank: int, dtype: torch.dtype) -> Tensor:
    operands = [(it.atom(a, rank), shift) for a, shift in it.terms.operands[atom]]
    size = it.terms.sizes[atom]
    made = torch.zeros(size, dtype=dtype)
    for data, shift in operands:
        index = torch.arange(size) + shift
        kept = (index >= 0) & (index < len(data))
        made[kept] += data[index[kept]]
    return made


def _rows(
    it: Denotation, atom: int, rank: int, label: Any, lengths: tuple[tuple[int, ...], ...], phase: int, width: int
) -> Tensor:
    """Row by row, each computed alone."""
    dtype = it.terms.dtypes[atom]
    assert dtype is not None
    wholes = [it.value(it.terms.numbered[number], rank) for number in it.terms.values[atom]]
    made: list[Tensor] = []
    for number in range(it.terms.sizes[atom] // width):
        pieces = iter(it.terms.operands[atom])
        rows: list[Tensor] = []
        for sizes in lengths:
            found = [(next(pieces), length) for length in sizes]
            parts = [
                it.atom(a, rank)[begin + number * n :][:n] if begin + number * n >= 0 else None
                for (a, begin), n in found
            ]
            if any(part is None or len(part) < n for part, n in zip(parts, sizes, strict=True)):
                break
            rows.append(torch.cat([part for part in parts if part is not None]))
        is_there = len(rows) == len(lengths)
        made.append(
            _row(label, rows, list(wholes)).to(dtype).reshape(-1) if is_there else torch.zeros(width, dtype=dtype)
        )
    return concatenated(made, dtype)


def _row(label: Any, rows: list[Tensor], wholes: list[Tensor]) -> Tensor:
    if isinstance(label[0], str):  # along a row
        name, constants = label
        given = {key: ast.literal_eval(text) for key, text in constants if "torch" not in text}
        found = getattr(torch, name)(rows[0].to(torch.float64), **{key: v for key, v in given.items() if v is not None})
        return found
    (*_, name, constants), slots, _ = label
    if label[0][0] == "pointwise":
        return _pointwise_row(name, dict(constants), slots, rows, wholes)
    second, *others = wholes
    left, *added = [(key, rows.pop(0) if how == "rows" else others.pop(0)) for key, how in slots]
    row = left[1][None]
    if name in ("mm", "matmul"):
        return row @ second
    if name == "linear":
        return torch.nn.functional.linear(row, second, added[0][1] if added else None)
    factors = {key: ast.literal_eval(text) for key, text in constants}
    return torch.addmm(added[0][1], row, second, beta=factors["beta"], alpha=factors["alpha"])


def _pointwise_row(
    name: str, constants: dict[str, str], slots: Any, rows: list[Tensor], wholes: list[Tensor]
) -> Tensor:
    values = [(key, rows.pop(0) if how == "rows" else wholes.pop(0)) for key, how in slots]
    given = {key: ast.literal_eval(text) for key, text in constants.items()}
    operator = getattr(torch.ops.aten, name)
    if values[0][0] == "term":
        return operator(*(value for _, value in values), **given)
    return operator(**dict(values), **given)


def reduced(tensors: Sequence[Tensor], reduce_op: str) -> Tensor:
    """A reduction over ranks, in their order."""
    found = functools.reduce(REDUCTIONS[reduce_op], tensors)
    return found / len(tensors) if reduce_op == "avg" else found


def _all_reduce(it: Denotation, atom: int, rank: int, reduce_op: str, group: Any) -> Tensor:
    return reduced([it.operand(atom, k) for k in it.members(group, rank)], reduce_op)


def _broadcast(it: Denotation, atom: int, rank: int, source: int, group: Any) -> Tensor:
    return it.operand(atom, it.members(group, rank)[source])


def _all_gather(it: Denotation, atom: int, rank: int, num_ranks: int, group: Any) -> Tensor:
    return torch.cat([it.operand(atom, k) for k in it.members(group, rank)])


def _own_part(it: Denotation, atom: int, rank: int, group: Any, even: tuple[int, ...], sender: int) -> Tensor:
    """From each element on, the one that lies in this rank's part on a sender; zeros where there is none."""
    place = list(it.members(group, rank)).index(rank)
    source, shift = it.terms.operands[atom][0 if even else place]
    data = it.atom(source, sender)
    index = torch.arange(it.terms.sizes[atom]) + (place * even[1] if even else shift)
    return torch.where(
        (index >= 0) & (index < len(data)), data[index.clamp(0, len(data) - 1)], torch.zeros_like(data[0])
    )


def _reduce_scatter(it: Denotation, atom: int, rank: int, reduce_op: str, group: Any, *even: int) -> Tensor:
    return reduced([_own_part(it, atom, rank, group, even, k) for k in it.members(group, rank)], reduce_op)


def _all_to_all(it: Denotation, atom: int, rank: int, sender: int, group: Any, *even: int) -> Tensor:
    return _own_part(it, atom, rank, group, even, it.members(group, rank)[sender])


MEANINGS: dict[Any, Meaning] = {
    "cast": _cast,
    "fill": _fill,
    "bytes": _bytes,
    "of bytes": _of_bytes,
    "expand": _expand,
    "permute": _permute,
    "padding": _padding,
    "elementwise": _elementwise,
    "sum": _sum,
    "rows": _rows,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
