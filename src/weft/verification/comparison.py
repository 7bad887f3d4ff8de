"""Compares the results of all ranks before and after a rewrite.

Contract: bitwise equality covers dtype, shape and bits (a NaN equals the same NaN, -0.0 differs from 0.0; strides are
not compared). The verdict states the tolerance.

Two orders of one sum of n terms differ by rounding errors that grow like sqrt(n) with high probability (Higham and
Mary, "A new approach to probabilistic rounding error analysis", 2019). So two values count as equal if they differ by
at most 2 * eps * sqrt(n) times the largest magnitude in the tensor. The tensor's magnitude is used because an element
that cancels to nearly zero carries the error of its terms. Sums of 2 to 4096 normal and uniform terms in f32, f16 and
bf16, in three orders and in f64, all stayed within 0.9 * eps * sqrt(n), except for bf16 sums of 1024 or more positive
terms, which stop growing. Hence the limit of 1/8, or of one eps if that is larger: a tolerance that explains every
difference proves nothing. Integers and bools must be equal.

A run in f64 serves as a reference if there is one (`rounding.py`). It shows the rounding error of the first side, which
the second may exceed by a factor. This covers errors that a count of terms misses, such as large terms that cancel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from weft.compat import hint_of, is_process_group, storage_key
from weft.errors import VerificationError, compose
from weft.graph import ops
from weft.graph.aliasing import constants_of_inputs
from weft.graph.listings.types import DTYPE_NAMES
from weft.verification.rank import RankResult, as_bytes, same_bits, view_of

FACTOR = 2
"""Tolerance in units of eps * sqrt(number of terms)."""
LIMIT = 1 / 8
"""Largest tolerance, relative to the largest magnitude in the tensor."""
NEAR = 8
"""Two runs may differ by this many times the error of the first run against the reference. The rounding errors of two
orders have the same magnitude, but a single element may have a small error by luck. The value was chosen; the tests of
`rounding.py` exercise it."""


@dataclass(frozen=True)
class Difference:
    """The first place where two runs differ."""

    rank: int
    position: str
    """`outputs[1][0]`, `inputs[3] after the step` or `constant 'scale' after the step`."""
    index: tuple[int, ...] | None
    """Index of the element; None if the two values differ in type or shape."""
    before: Any
    after: Any
    max_abs_difference: float | None = None
    """Largest difference in the tensor; None if it has no meaning."""

    def __str__(self) -> str:
        place = f"{self.position} on rank {self.rank}"
        if self.index is None:
            return f"{place} is {self.before} before and {self.after} after"
        element = f" at {list(self.index)}" if self.index else ""
        text = f"{place}{element} is {self.before!r} before and {self.after!r} after"
        if self.max_abs_difference is None:
            return text
        return f"{text}; the largest difference in this tensor is {self.max_abs_difference:.3g}"


@dataclass(frozen=True)
class Verdict:
    """Whether two graphs computed the same on every rank."""

    equal: bool
    bitwise: bool
    difference: Difference | None
    """The first difference beyond the tolerance, otherwise the first difference in bits, or None."""
    num_ranks: int
    backend: str
    tolerance: str

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        ranks = f"on {self.num_ranks} {self.backend} ranks"
        if self.bitwise:
            return f"bitwise equal {ranks}"
        if self.equal:
            return f"equal {ranks} within {self.tolerance}, not bitwise: {self.difference}"
        return f"different {ranks}: {self.difference} (tolerance: {self.tolerance})"


def compare(
    before: Sequence[RankResult],
    after: Sequence[RankResult],
    *,
    num_terms: int,
    backend: str = "virtual",
    compute_dtype: torch.dtype | None = None,
    reference: Sequence[RankResult] | None = None,
) -> Verdict:
    """Compare the results of two runs.

    `num_terms` is the number of terms of the longest sum, `compute_dtype` the coarsest dtype of intermediate results.
    `reference` holds the results of the first graph in a wider dtype.
    """
    if len(before) != len(after):
        what = f"{len(before)} ranks before, {len(after)} ranks after"
        raise VerificationError(compose("comparison", what, do="run both graphs on the same ranks"))
    factor = FACTOR * math.sqrt(max(num_terms, 1))
    least = torch.finfo(compute_dtype).eps if compute_dtype is not None else 0.0
    in_bits: Difference | None = None
    beyond: Difference | None = None
    for rank, (first, second) in enumerate(zip(before, after, strict=True)):
        exact = {p: value for p, _, value in _pairs(first, reference[rank])} if reference is not None else {}
        for position, old, new in _pairs(first, second):
            found = _compare_values(rank, position, old, new)
            in_bits = in_bits or found
            if found is not None and not _is_within(old, new, factor, least, exact.get(position)):
                beyond = beyond or found
    coarsest = f" of {DTYPE_NAMES.get(compute_dtype, compute_dtype)}" if compute_dtype is not None else ""
    seen = f" or {NEAR} times the error against f64" if reference is not None else ""
    tolerance = (
        f"{FACTOR} * eps{coarsest} * sqrt({num_terms}){seen}, at most 1/8, of the largest magnitude in the tensor"
    )
    return Verdict(beyond is None, in_bits is None, beyond or in_bits, len(before), backend, tolerance)


def _pairs(first: RankResult, second: RankResult) -> Iterator[tuple[str, Any, Any]]:
    yield from _leaves("outputs", first.outputs, second.outputs)
    for k in range(max(len(first.inputs), len(second.inputs))):
        both = [result.inputs[k] if k < len(result.inputs) else "missing" for result in (first, second)]
        yield from ((f"{position} after the step", a, b) for position, a, b in _leaves(f"inputs[{k}]", *both))
    for path in sorted({*first.constants, *second.constants}):
        old, new = (result.constants.get(path, "unchanged") for result in (first, second))
        yield f"constant {path!r} after the step", old, new


def _leaves(position: str, first: Any, second: Any) -> Iterator[tuple[str, Any, Any]]:
    """Pairs of leaves at the same position of two structures; where the structures differ, the two subtrees."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        for k, (a, b) in enumerate(zip(first, second, strict=True)):
            yield from _leaves(f"{position}[{k}]", a, b)
    elif isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        for key in first:
            yield from _leaves(f"{position}[{key!r}]", first[key], second[key])
    else:
        yield position, first, second


def _compare_values(rank: int, position: str, old: Any, new: Any) -> Difference | None:
    """The first difference in bits, or None."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        same = type(old) is type(new) and (old is new or old == new or (old != old and new != new))
        return None if same else Difference(rank, position, None, _describe(old), _describe(new))
    if old.dtype != new.dtype or old.shape != new.shape:
        return Difference(rank, position, None, _describe(old), _describe(new))
    if same_bits(old, new):
        return None
    flat = int((as_bytes(old) != as_bytes(new)).any(1).nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), old.shape)) if old.dim() else ()
    first, second = _wide(old), _wide(new)
    gaps = (first - second).abs().nan_to_num(nan=math.inf)
    largest = float(gaps.masked_fill((first == second) | (first.isnan() & second.isnan()), 0.0).max())
    return Difference(rank, position, index, old[index].item(), new[index].item(), largest)


def _is_within(old: Any, new: Any, factor: float, least: float, exact: Any = None) -> bool:
    """Whether the difference of two values is within the tolerance."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor) or old.dtype != new.dtype or old.shape != new.shape:
        return False
    if not (old.dtype.is_floating_point or old.dtype.is_complex):
        return False
    first, second = _wide(old), _wide(new)
    finite = first.isfinite() & second.isfinite()
    same = (first == second) | (first.isnan() & second.isnan())
    if not bool((finite | same).all()):
        return False
    gap, largest = _largest(first[finite] - second[finite]), _largest(first[finite])
    eps = max(torch.finfo(old.dtype).eps, least)
    error = 0.0
    if isinstance(exact, Tensor) and exact.shape == first.shape:
        known = finite & exact.isfinite()
        error = _largest((first - exact)[known])
    return gap <= min(max(factor * eps * largest, NEAR * error), max(LIMIT, eps) * largest)


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    """The values in a dtype that is wide enough to compute differences."""
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{DTYPE_NAMES.get(value.dtype, value.dtype)}{list(value.shape)}"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return str(value)


# Inputs to compare on.


def example_inputs(module: GraphModule, num_ranks: int, *, seed: int = 0, integers: bool = False) -> list[list[Any]]:
    """Random arguments for each rank, by the fake values of the placeholders; they depend on the rank and the seed.

    Integers are 0 or 1, so that they are valid indices. With `integers`, floats are whole numbers from -2 to 2, so that
    every order of addition is exact.
    """
    return [_inputs_of_rank(module, seed * 1_000_003 + rank, integers) for rank in range(num_ranks)]


def _inputs_of_rank(module: GraphModule, seed: int, integers: bool) -> list[Any]:
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    fakes: list[tuple[str, Any]] = [(node.name, ops.value_of(node)) for node in nodes]
    inside = {node.name: ops.attribute(module, path) for node, path in constants_of_inputs(module).items()}
    generator = torch.Generator().manual_seed(seed)
    extents: dict[int, int] = {}
    for name, fake in fakes:
        if isinstance(fake, Tensor):
            key = storage_key(fake)
            extents[key] = max(extents.get(key, 0), _extent(name, fake) * fake.element_size())
    storages: dict[int, Tensor] = {}
    values: list[Any] = []
    for name, fake in fakes:
        if not isinstance(fake, Tensor):
            values.append(_number(name, fake))
            continue
        if name in inside:
            values.append(_in_constant(name, fake, inside[name]))
            continue
        key = storage_key(fake)
        if key not in storages:
            storages[key] = _draw(fake.dtype, -(-extents[key] // fake.element_size()), generator, integers)
        sizes, strides = ([_hint(name, n) for n in numbers] for numbers in (fake.shape, fake.stride()))
        values.append(view_of(storages[key], fake.dtype, _hint(name, fake.storage_offset()), sizes, strides))
    return values


def _in_constant(name: str, fake: Tensor, constant: Tensor) -> Tensor:
    """An input that shares the memory of a constant, and so has the values of the constant."""
    sizes, strides = ([_hint(name, n) for n in numbers] for numbers in (fake.shape, fake.stride()))
    if _extent(name, fake) * fake.element_size() > constant.untyped_storage().nbytes():
        what = f"input {name} shares the memory of a constant but is larger than it"
        raise VerificationError(compose("example inputs", what, do="give the inputs yourself"))
    made = torch.empty(0, dtype=fake.dtype, device=constant.device)
    return made.set_(constant.untyped_storage(), _hint(name, fake.storage_offset()), sizes, strides)  # type: ignore[arg-type]


def _extent(name: str, fake: Tensor) -> int:
    """Number of elements from the start of the storage to the last one used."""
    sizes = [_hint(name, n) for n in fake.shape]
    if 0 in sizes:
        return _hint(name, fake.storage_offset())
    steps = (_hint(name, step) * (n - 1) for n, step in zip(sizes, fake.stride(), strict=True))
    return _hint(name, fake.storage_offset()) + sum(steps) + 1


def _hint(name: str, number: Any) -> int:
    hint = hint_of(number)
    if hint is None:
        what = f"input {name} has a size without a hint ({number})"
        raise VerificationError(compose("example inputs", what, do="give the inputs yourself"))
    return hint


def _number(name: str, fake: Any) -> Any:
    if isinstance(fake, torch.SymInt):
        return _hint(name, fake)
    if fake is None or isinstance(fake, bool | int | float | complex | str) or is_process_group(fake):
        return fake
    what = f"no example can be made for input {name}, which is a {type(fake).__name__}"
    raise VerificationError(compose("example inputs", what, do="give the inputs yourself"))


def _draw(dtype: torch.dtype, count: int, generator: torch.Generator, integers: bool) -> Tensor:
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2, (count,), generator=generator).to(dtype)
    if integers:
        return torch.randint(-2, 3, (count,), generator=generator).to(torch.float32).to(dtype)
    wide = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    return torch.randn((count,), generator=generator, dtype=wide).to(dtype)
