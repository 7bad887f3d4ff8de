"""Layouts against torch itself: a tensor of the numbers of its elements is viewed, and the layout must say the same."""

from __future__ import annotations

from math import prod
from random import Random

import pytest
import torch
from torch import Tensor

from weft.streaming.layouts import Digit, Layout, Unfollowed, identity, joined


def elements(layout: Layout) -> Tensor:
    """The element of the base at each place of a view."""
    found = torch.tensor(layout.offset)
    for dim in layout.dims:
        steps = torch.tensor([0])
        for digit in dim:
            steps = (steps[:, None] + torch.arange(digit.size) * digit.stride).reshape(-1)
        found = found[..., None] + steps
    return found


def same(layout: Layout, tensor: Tensor) -> bool:
    return layout.shape == tuple(tensor.shape) and torch.equal(elements(layout), tensor)


def step(rng: Random, layout: Layout, tensor: Tensor) -> tuple[Layout, Tensor]:
    """One random view of both."""
    rank = tensor.dim()
    match rng.randrange(4):
        case 0:
            order = rng.sample(range(rank), rank)
            return layout.permuted(order), tensor.permute(order)
        case 1:
            shape = shuffled_shape(rng, tensor.numel())
            return layout.reshaped(shape), tensor.reshape(shape)
        case 2:
            dim = rng.randrange(rank)
            length = rng.choice([n for n in range(1, tensor.shape[dim] + 1) if tensor.shape[dim] % n == 0])
            start = length * rng.randrange(tensor.shape[dim] // length)
            return layout.sliced(dim, start, length), tensor.narrow(dim, start, length)
        case _:
            dim, other = rng.randrange(rank), rng.randrange(rank)
            count = rng.choice([n for n in range(1, tensor.shape[dim] + 1) if tensor.shape[dim] % n == 0])
            size = tensor.shape[dim] // count
            parts = [layout.sliced(dim, k * size, size) for k in range(count)]
            return joined(parts, other), torch.cat(tensor.split(size, dim), other)


def shuffled_shape(rng: Random, numel: int) -> list[int]:
    shape: list[int] = []
    while numel > 1:
        shape.append(rng.choice([n for n in range(1, numel + 1) if numel % n == 0]))
        numel //= shape[-1]
    return rng.sample(shape, len(shape)) or [1]


@pytest.mark.parametrize("seed", range(300))
def test_random_views_are_what_torch_makes_of_them(seed: int):
    rng = Random(seed)
    shape = [rng.choice((1, 2, 3, 4, 6)) for _ in range(rng.randint(1, 4))]
    layout, tensor = identity(shape), torch.arange(prod(shape)).reshape(shape)
    for _ in range(rng.randint(1, 6)):
        try:
            layout, tensor = step(rng, layout, tensor)
        except Unfollowed:
            return
        assert same(layout, tensor), f"seed {seed}: {layout}"


@pytest.mark.parametrize("seed", range(200))
def test_the_inverse_of_a_view_gives_the_base_back(seed: int):
    rng = Random(seed)
    shape = [rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(1, 4))]
    layout, tensor = identity(shape), torch.arange(prod(shape)).reshape(shape)
    try:
        for _ in range(3):
            order = rng.sample(range(tensor.dim()), tensor.dim())
            layout, tensor = layout.permuted(order), tensor.permute(order)
            size = shuffled_shape(rng, tensor.numel())
            layout, tensor = layout.reshaped(size), tensor.reshape(size)
        back = layout.inverse(shape)
    except Unfollowed:
        return
    assert layout.covers(prod(shape))
    assert torch.equal(tensor.reshape(-1)[elements(back)], torch.arange(prod(shape)).reshape(shape))
    assert same(layout.over(layout), torch.arange(prod(shape)).reshape(tensor.shape))


def test_parts_of_ranks_in_order_are_a_gather_along_any_dim():
    base = identity([4, 3, 5])
    parts = [base.sliced(0, 2 * k, 2) for k in range(2)]
    assert joined(parts, 1).dims == ((Digit(2, 15),), (Digit(2, 30), Digit(3, 5)), (Digit(5, 1),))
    assert joined(parts, 1).covers(60)


def test_parts_in_another_order_or_twice_do_not_cover_the_base():
    base = identity([4, 3])
    parts = [base.sliced(0, 2 * k, 2) for k in range(2)]
    assert not joined(parts[::-1], 1).covers(12)
    assert not joined([parts[0], parts[0]], 1).covers(12)


def test_parts_that_do_not_follow_each_other_evenly_are_no_layout():
    base = identity([8, 3])
    parts = [base.sliced(0, start, 2) for start in (0, 4, 2)]
    with pytest.raises(Unfollowed, match="are not evenly spaced"):
        joined(parts, 1)


def test_dims_that_cut_through_parts_are_no_layout():
    turned = identity([4, 6]).permuted([1, 0])
    with pytest.raises(Unfollowed, match="cut through the shards"):
        turned.reshaped([8, 3])
    with pytest.raises(Unfollowed, match="cuts through the shards"):
        turned.reshaped([24]).sliced(0, 2, 8)
