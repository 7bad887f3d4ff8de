"""How large a merged collective of the planner may be."""

from __future__ import annotations

import pytest
from torch.fx import GraphModule

import weft
from weft.graph.collective import collectives

SIZES = (4, 8, 4, 16, 4)
GRADIENTS = "\n".join(
    [
        "group('dp', size=4)",
        "",
        f"def graph({', '.join(f'g{i}: f32[{size}, 256]' for i, size in enumerate(SIZES))}):",
        *(f"    ar{i}: f32[{size}, 256] = all_reduce(g{i}, 'sum', 'dp')" for i, size in enumerate(SIZES)),
        *(f"    w{i}: f32[{size}, 256] = wait(ar{i})" for i, size in enumerate(SIZES)),
        f"    return [{', '.join(f'w{i}' for i in range(len(SIZES)))}]",
        "",
    ]
)
KIB = 1024
"""A row of what is reduced."""


@pytest.fixture(scope="module")
def module() -> GraphModule:
    return weft.parse(GRADIENTS)


def sizes(module: GraphModule, max_bytes: int | None, limit_bytes: int | None = None) -> list[int]:
    option = "" if max_bytes is None else f"{{max-bucket-bytes={max_bytes}}}"
    done = weft.optimize(
        module, "ethernet-h100-1x8", pipeline=f"schedule-overlap{option}", memory_limit_bytes=limit_bytes
    )
    return sorted(each.input_bytes or 0 for each in collectives(done.module.graph))


def test_without_a_limit_all_that_is_ready_is_one(module: GraphModule):
    assert sizes(module, None) == [36 * KIB]


@pytest.mark.parametrize("max_kib", [35, 20, 16, 12, 8])
def test_no_merged_collective_is_larger_than_allowed(module: GraphModule, max_kib: int):
    found = sizes(module, max_kib * KIB)
    assert sum(found) == 36 * KIB
    assert len(found) < len(SIZES)
    assert all(size <= max_kib * KIB or size == 16 * KIB for size in found)  # what is larger by itself stays alone


def test_a_limit_below_every_collective_merges_none(module: GraphModule):
    assert sizes(module, 1) == sorted(size * KIB for size in SIZES)


def test_memory_that_is_short_merges_no_more(module: GraphModule):
    assert all(size <= 16 * KIB for size in sizes(module, 12 * KIB, limit_bytes=72 * KIB))
