"""Right rewrites that round otherwise are equal, and small errors that rounding could hide are found."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.verification.rounding import count_terms

PRODUCT = """def graph(x: f32[8, 4096], w: f32[4096, 8]):
    p: f32[8, 8] = mm(x, w)
    s: f32[8, 8] = sigmoid(p)
    return [s]
"""
SPLIT = """def graph(x: f32[8, 4096], w: f32[4096, 8]):
    x0: f32[8, 2048] = slice(x, 1, 0, 2048)
    x1: f32[8, 2048] = slice(x, 1, 2048, 4096)
    w0: f32[2048, 8] = slice(w, 0, 0, 2048)
    w1: f32[2048, 8] = slice(w, 0, 2048, 4096)
    p0: f32[8, 8] = mm(x0, w0)
    p1: f32[8, 8] = mm(x1, w1)
    p: f32[8, 8] = add(p0, p1)
    s: f32[8, 8] = sigmoid(p)
    return [s]
"""


def bare(text: str) -> str:
    """The product itself: where a sigmoid is flat it hides errors."""
    return text.replace("    s: f32[8, 8] = sigmoid(p)\n    return [s]", "    return [p]")


def verdict_of(before: str, after: str) -> weft.Verdict:
    return weft.verify(weft.parse(before), weft.parse(after), ranks=1)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
def test_a_product_in_two_parts_is_the_same_product(dtype: str):
    verdict = verdict_of(PRODUCT.replace("f32", dtype), SPLIT.replace("f32", dtype))
    assert verdict, str(verdict)


def test_a_long_sum_may_be_added_in_another_order():
    before = """def graph(x: f32[262144]):
    s: f32[()] = sum(x)
    return [s]
"""
    after = """def graph(x: f32[262144]):
    rows: f32[262144, 1] = view(x, [262144, 1])
    v: f32[512, 512] = view(rows, [512, 512])
    r: f32[512] = sum.dim_IntList(v, [0])
    s: f32[()] = sum(r)
    return [s]
"""
    verdict = verdict_of(before, after)
    assert verdict, str(verdict)


@pytest.mark.parametrize(
    "line",
    [
        "mul(p, 1.000001)",  # ten times what one rounding is, and a tenth of what 4096 of them may be
        "add(p, 0.0001)",
        "mul(p, 0.5)",
    ],
)
def test_an_error_that_rounding_could_hide_is_found_in_f64(line: str):
    assert verdict_of(bare(PRODUCT), bare(SPLIT))
    assert not verdict_of(bare(PRODUCT), bare(SPLIT).replace("return [p]", f"q: f32[8, 8] = {line}\n    return [q]"))


def test_one_term_too_few_is_found():
    after = SPLIT.replace("slice(x, 1, 2048, 4096)", "slice(x, 1, 2048, 4095)").replace(
        "f32[8, 2048] = slice(x, 1, 2048", "f32[8, 2047] = slice(x, 1, 2048"
    )
    after = after.replace("w1: f32[2048, 8] = slice(w, 0, 2048, 4096)", "w1: f32[2047, 8] = slice(w, 0, 2048, 4095)")
    assert not verdict_of(bare(PRODUCT), bare(after))


def test_a_product_in_a_coarser_dtype_is_found():
    """In f64 both are one graph; in its own dtypes the second rounds more than the first."""
    after = PRODUCT.replace(
        "    p: f32[8, 8] = mm(x, w)",
        "    h: bf16[8, 4096] = _to_copy(x, dtype=bf16)\n"
        "    y: f32[8, 4096] = _to_copy(h, dtype=f32)\n"
        "    p: f32[8, 8] = mm(y, w)",
    )
    assert not verdict_of(bare(PRODUCT), bare(after))


def test_random_draws_are_compared_as_before():
    """They are other draws in f64."""
    before = """def graph(x: f32[4096]):
    r: f32[4096] = rand_like(x)
    p: f32[4096] = mul(x, r)
    s: f32[()] = sum(p)
    return [s]
"""
    after = before.replace("s: f32[()] = sum(p)", "t: f32[()] = sum(p)\n    s: f32[()] = mul(t, 1.001)")
    assert verdict_of(before, before).bitwise
    assert not verdict_of(before, after)


def test_terms_are_counted_along_the_longest_way():
    module = weft.parse("""def graph(x: f32[8, 64], w: f32[64, 32]):
    p: f32[8, 32] = mm(x, w)
    q: f32[8, 32] = relu(p)
    s: f32[8] = sum.dim_IntList(q, [1])
    c: f32[16] = cat([s, s])
    return [c]
""")
    assert count_terms(module, 1) == 64 + 1 + 32 + 1


def test_values_are_compared_while_a_compiler_traces_with_fake_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert verdict_of(PRODUCT, PRODUCT).bitwise
    assert isinstance(torch.ones(1), torch.Tensor)
