"""Compressed communication: the error of each element is within what the passes declare."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.graph.groups import read_groups
from weft.passes.pipeline import Pipeline
from weft.verification.virtual.cluster import VirtualCluster

GATHER = """group('dp', size=2)

def graph(p: f32[8, 16], x: f32[4, 16]):
    ag: f32[16, 16] = all_gather(p, 2, 'dp')
    w: f32[16, 16] = wait(ag)
    t: f32[16, 16] = t(w)
    y: f32[4, 16] = mm(x, t)
    return [w, y]
"""
SCATTER = """group('dp', size=4)

def graph(x: f32[8, 16]):
    g: f32[8, 16] = neg(x)
    rs: f32[2, 16] = reduce_scatter(g, 'avg', 4, 'dp')
    w: f32[2, 16] = wait(rs)
    return [w]
"""


def odd_rows(seed: int) -> torch.Tensor:
    """Rows of very different sizes; one of zeros, and one with tiny elements beside a large one."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(8, 16, generator=generator) * 10.0 ** torch.arange(-20, 20, 5.0).unsqueeze(1)
    rows[0] = 0.0
    rows[1, :8] *= 1e-7
    return rows


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("dtype", "relative", "of_largest"), [("bf16", 1 / 256, 0.0), ("fp8", 1 / 16, 1 / 458752)])
def test_a_gathered_element_is_near_its_original(seed: int, dtype: str, relative: float, of_largest: float):
    module = weft.parse(GATHER)
    inputs = [[odd_rows(2 * seed + rank), torch.ones(4, 16)] for rank in range(2)]
    changed = Pipeline.parse(f"compress-all-gathers{{dtype={dtype} always=true}}").run(module).module
    whole = torch.cat([inputs[0][0], inputs[1][0]])
    bound = torch.maximum(whole.abs() * relative, whole.abs().amax(1, keepdim=True) * of_largest) * (1 + 1e-6)
    for result in VirtualCluster(2).run(changed, inputs, read_groups(changed)):
        found = result.outputs[0]
        assert ((found - whole).abs() <= bound).all()
        assert (found != whole).any()


@pytest.mark.parametrize("seed", range(3))
def test_a_sum_is_near_that_of_its_exact_terms(seed: int):
    module = weft.parse(SCATTER)
    inputs = [[odd_rows(4 * seed + rank)] for rank in range(4)]
    changed = Pipeline.parse("compress-reduce-scatters{always=true}").run(module).module
    terms = torch.stack([-given.double() for (given,) in inputs])
    wanted, bound = terms.mean(0), terms.abs().mean(0) / 256 * (1 + 1e-4)
    found = torch.cat([result.outputs[0] for result in VirtualCluster(4).run(changed, inputs, read_groups(changed))])
    assert ((found - wanted).abs() <= bound).all()
    assert (found != wanted.float()).any()
