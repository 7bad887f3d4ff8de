"""Rewrites of arithmetic on special values: infinite, signed zeros, 0-d, empty, complex, unsigned, bools, 16 bits.

An exact pass keeps every bit, NaN's payload apart, and the strides of results. A pass that reassociates keeps whole
numbers, which every order adds exactly, and the places of infinite values and NaN. Tests take 60 programs for each
pass; WEFT_FUZZ=full takes 2 000.
"""

from __future__ import annotations

import os
from random import Random

import pytest
import torch
from torch.fx import GraphModule

from tests.property.checks import is_exact, same_bits
from tests.property.strategies.arithmetic import random_arithmetic
from tests.property.strategies.products import random_products
from tests.property.strategies.tensors import special_tensor
from tests.property.test_rewrites import SPECS
from weft.graph.listings.text import parse, render
from weft.passes.pipeline import Pipeline

NUM_SEEDS = 2000 if os.environ.get("WEFT_FUZZ") == "full" else 60
EXACT = [spec for spec in SPECS if is_exact(Pipeline.parse(spec))]
BATCHES = (
    "batch-linears{min-size=2 always=true}",
    "fuse-linears{always=true}",
    "batch-pointwise-ops{min-size=2 always=true}",
)
PRODUCTS = [*(spec for spec in SPECS if spec not in EXACT), *BATCHES]
IN_PLACE = ("reuse-buffers{pointwise=true}", "sink-views", "move-producers")
TOGETHER = "clean,algebra,fold-constant-cumsums"


def rewritten(listing: str, spec: str) -> tuple[GraphModule, GraphModule, bool]:
    before = parse(listing)
    run = Pipeline.parse(spec).run(before)
    return before, run.module, any(entry.changed for entry in run.log)


def whole_numbers(seed: int, value: torch.Tensor) -> torch.Tensor:
    """Small whole numbers, of which a few are infinite or not numbers where that is the same in every order."""
    rng = torch.Generator().manual_seed(seed)
    found = torch.randint(-2, 3, tuple(value.shape), generator=rng).to(torch.float64)
    if value.dtype.is_floating_point:
        odd = torch.tensor([float("inf"), float("-inf"), float("nan")], dtype=torch.float64)
        drawn = odd[torch.randint(0, 3, tuple(value.shape), generator=rng)]
        found = torch.where(torch.rand(tuple(value.shape), generator=rng) < 0.05, drawn, found)
    return found.to(value.dtype)


def inputs_of(module: GraphModule) -> list[torch.Tensor]:
    return [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]


@pytest.mark.parametrize("spec", [*EXACT, *IN_PLACE, TOGETHER])
def test_an_exact_rewrite_keeps_every_bit_of_special_values(spec: str) -> None:
    for seed in range(NUM_SEEDS):
        before, after, changed = rewritten(random_arithmetic(Random(seed)), spec)
        if not changed:
            continue
        values = [special_tensor(8 * seed + k, v.shape, v.dtype) for k, v in enumerate(inputs_of(before))]
        expected, found = (module(*(v.clone() for v in values)) for module in (before, after))
        for old, new in zip(expected, found, strict=True):
            told = f"seed {seed}, {spec}\n{render(before)}\n{render(after)}"
            assert same_bits(old, new), told
            assert old.stride() == new.stride(), told


@pytest.mark.parametrize("spec", PRODUCTS)
def test_products_keep_whole_numbers_and_what_is_infinite(spec: str) -> None:
    for seed in range(NUM_SEEDS):
        before, after, changed = rewritten(random_products(Random(seed)), spec)
        if not changed:
            continue
        values = [whole_numbers(8 * seed + k, v) for k, v in enumerate(inputs_of(before))]
        expected, found = (module(*values) for module in (before, after))
        for old, new in zip(expected, found, strict=True):
            told = f"seed {seed}, {spec}\n{render(before)}\n{render(after)}\n{old}\n{new}"
            assert old.dtype == new.dtype, told
            assert torch.equal(old.nan_to_num(nan=77), new.nan_to_num(nan=77)), told
