"""Operators that `weft.rewriting.strides` calls blind give the same bits in every layout, for special values too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.property.checks import same_bits
from tests.property.strategies.tensors import LAYOUTS, laid_out, special_tensor
from weft.rewriting.strides import MOVES, ROUNDED, Change, is_stride_blind

REALS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8)
DTYPES = (*REALS, torch.complex64, torch.bool)
SHAPES = ((16, 17), (3, 5))
aten = torch.ops.aten
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")},
    **{name: lambda x, _, name=name: getattr(torch, name)(x) for name in ("neg", "abs", "relu", "sqrt", "clone")},
    "where": lambda x, y: torch.where(x == y, x, y),
    "_to_copy": lambda x, y: aten._to_copy.default(x, dtype=torch.float16 if not x.dtype.is_complex else None),
    "convert_element_type": lambda x, y: torch.ops.prims.convert_element_type.default(x, torch.int32),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y], 1),
}


@pytest.mark.parametrize("name", sorted(MOVES | ROUNDED))
def test_an_operator_that_is_blind_to_strides_gives_the_same_bits(name: str) -> None:
    tried = 0
    for dtype, shape in product(DTYPES if name in MOVES else REALS, SHAPES):
        x, y = (special_tensor(seed, shape, dtype) for seed in (1, 2))
        try:
            expected = CALLS[name](x, y)
        except RuntimeError:  # no such kernel
            continue
        for first, second in product(LAYOUTS, LAYOUTS):
            tried += 1
            assert same_bits(CALLS[name](laid_out(x, first), laid_out(y, second)), expected), (dtype, first, second)
    assert tried


def pointwise() -> list[Any]:
    """The operators of torch that make each element of one or two tensors of the elements at its place."""
    found: list[Any] = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if not name.startswith("aten::") or "polynomial" in name or "zeta" in name:  # their time is that of the value
            continue
        base, _, overload = name[6:].partition(".")
        operator = getattr(getattr(aten, base, None), overload or "default", None)
        if operator is None or torch.Tag.pointwise not in operator.tags:
            continue
        needed = [str(a.type) for a in operator._schema.arguments if not a.has_default_value()]
        if needed in (["Tensor"], ["Tensor", "Tensor"]):
            found.append(operator)
    return found


@pytest.mark.long
def test_operators_of_elements_do_not_mind_the_place() -> None:
    tried = set[str]()
    for operator, dtype, shape in product(pointwise(), (torch.float32, torch.bfloat16, torch.complex64), SHAPES):
        num_given = sum(not a.has_default_value() for a in operator._schema.arguments)
        given = [special_tensor(seed, shape, dtype) for seed in range(num_given)]
        if not is_stride_blind(operator, {}, given, Change.PLACE):
            continue
        try:
            expected = operator(*(x.clone() for x in given))  # some write what they are given
        except (RuntimeError, NotImplementedError):
            continue
        if not isinstance(expected, Tensor):
            continue
        tried.add(operator.name())
        assert same_bits(operator(*(laid_out(x, "moved by one") for x in given)), expected), (operator, dtype)
    assert len(tried) > 100


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda x, y: torch.maximum(0 * x, -0.0 * y), torch.float64),
        (lambda x, y: torch.add(x, y, alpha=0.1), torch.float16),
        (torch.mul, torch.complex64),
    ],
    ids=["the sign of a zero", "a factor of a sum", "complex products"],
)
def test_some_operators_mind_strides(call: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    """Why they are not on the list; where no layout tells any more, they can be."""
    x, y = (special_tensor(seed, (16, 17), dtype) for seed in (1, 2))
    expected = call(x, y)
    assert not all(same_bits(call(laid_out(x, a), laid_out(y, b)), expected) for a, b in product(LAYOUTS, LAYOUTS))
