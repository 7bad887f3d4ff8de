"""Verdicts: bitwise, within the tolerance, or the first difference; and the inputs that runs are compared on."""

import math

import pytest
import torch
from torch import Tensor

from tests.unit.verification.communication import module_of
from weft.compat import storage_key
from weft.errors import VerificationError
from weft.verification.comparison import Difference, Verdict, compare, example_inputs
from weft.verification.rank import RankResult


def verdict_of(before: object, after: object, **arguments: object) -> Verdict:
    """The verdict on one rank's outputs."""
    return compare([RankResult(before, [])], [RankResult(after, [])], **({"num_terms": 1} | arguments))  # type: ignore[arg-type]


def test_the_same_bits_are_bitwise_equal_whatever_the_strides():
    before = torch.arange(6.0).reshape(2, 3)
    verdict = verdict_of([before], (before.t().contiguous().t(),))
    assert verdict
    assert (verdict.equal, verdict.bitwise, verdict.difference) == (True, True, None)
    assert str(verdict) == "bitwise equal on 1 virtual ranks"


def test_one_element_is_compared_whatever_its_stride():
    before = torch.arange(2.0, dtype=torch.float64)[::2]
    assert before.stride() == (2,)
    assert verdict_of(before, before.clone()).bitwise
    assert not verdict_of(before, before + 1)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.int64, torch.bool, torch.complex64]
)
def test_every_dtype_is_compared_by_its_bits(dtype: torch.dtype):
    before = torch.tensor([0.0, 1.0, 0.0]).to(dtype)
    after = torch.tensor([0.0, 1.0, 1.0]).to(dtype)
    assert verdict_of(before, before.clone()).bitwise
    verdict = verdict_of(before, after)
    assert not verdict
    assert verdict.difference is not None
    assert verdict.difference.index == (2,)


def test_a_nan_equals_the_same_nan_and_minus_zero_differs_from_zero_in_bits_only():
    nan = torch.tensor([math.nan, 1.0])
    assert verdict_of(nan, nan.clone()).bitwise
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    for before, after in ((torch.tensor([0.0]), torch.tensor([-0.0])), (nan[:1], other)):
        verdict = verdict_of(before, after)
        assert (verdict.equal, verdict.bitwise) == (True, False)


@pytest.mark.parametrize(
    ("before", "after"), [(math.nan, 0.5), (0.5, math.nan), (math.inf, -math.inf), (math.inf, 3.0e38)]
)
def test_what_is_not_finite_must_be_the_same(before: float, after: float):
    assert not verdict_of(torch.tensor([1.0, before]), torch.tensor([1.0, after])).equal


def test_a_difference_says_where_what_and_by_how_much():
    before = torch.zeros(2, 3)
    after = before.clone()
    after[1, 0], after[1, 2] = 0.25, -2.0
    results = [[RankResult([torch.ones(1), (tensor,)], [])] for tensor in (before, after)]
    same = RankResult([torch.ones(1), (before,)], [])
    verdict = compare([same, *results[0]], [same, *results[1]], num_terms=2)
    assert verdict.difference == Difference(1, "outputs[1][0]", (1, 0), 0.0, 0.25, 2.0)
    assert str(verdict) == (
        "different on 2 virtual ranks: outputs[1][0] on rank 1 at [1, 0] is 0.0 before and 0.25 after; "
        "the largest difference in this tensor is 2 "
        "(tolerance: 2 * eps * sqrt(2), at most 1/8, of the largest magnitude in the tensor)"
    )


def test_a_rounding_error_is_within_the_tolerance_and_is_shown():
    before = torch.tensor([1.0, 1000.0])
    after = torch.tensor([1.0001, 1000.0])  # eps of f32 is 1.2e-7: 2 * eps * sqrt(4) * 1000 is 4.8e-4
    verdict = verdict_of(before, after, num_terms=4)
    assert verdict
    assert not verdict.bitwise
    assert str(verdict) == (
        "equal on 1 virtual ranks within 2 * eps * sqrt(4), at most 1/8, of the largest magnitude in the tensor, "
        "not bitwise: outputs on rank 0 at [0] is 1.0 before and 1.000100016593933 after; "
        "the largest difference in this tensor is 0.0001"
    )
    assert not verdict_of(before[:1], after[:1], num_terms=4)


def test_more_terms_and_a_coarser_dtype_on_the_way_widen_the_tolerance():
    before, after = torch.tensor([1.0]), torch.tensor([1.00001])
    assert not verdict_of(before, after, num_terms=1)
    assert verdict_of(before, after, num_terms=4096)
    coarse = verdict_of(before, after, num_terms=1, compute_dtype=torch.bfloat16)
    assert coarse.tolerance == "2 * eps of bf16 * sqrt(1), at most 1/8, of the largest magnitude in the tensor"
    assert coarse.equal


@pytest.mark.parametrize("num_terms", [2, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_two_orders_of_one_sum_are_equal_within_the_tolerance(dtype: torch.dtype, num_terms: int):
    terms = torch.randn(num_terms, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    sums: list[Tensor] = []
    for order in (terms, terms.flip(0)):
        total = torch.zeros(64, dtype=dtype)
        for term in order:
            total = total + term
        sums.append(total)
    assert verdict_of(*sums, num_terms=num_terms)


def test_no_number_of_terms_excuses_more_than_an_eighth():
    assert not verdict_of(torch.tensor([1.0]), torch.tensor([1.25]), num_terms=10**18)
    assert verdict_of(torch.tensor([1.0]), torch.tensor([1.125]), num_terms=10**18)


def test_whole_numbers_and_bools_have_no_tolerance():
    assert not verdict_of(torch.tensor([1_000_000]), torch.tensor([1_000_001]), num_terms=10**12)
    assert not verdict_of(torch.tensor([True]), torch.tensor([False]), num_terms=10**12)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (torch.ones(2), torch.ones(3), "outputs on rank 0 is f32[2] before and f32[3] after"),
        (torch.ones(2), torch.ones(2, dtype=torch.bfloat16), "outputs on rank 0 is f32[2] before and bf16[2] after"),
        ([torch.ones(2)], [], "outputs on rank 0 is a list of 1 before and a list of 0 after"),
        ([torch.ones(2)], [None], "outputs[0] on rank 0 is f32[2] before and None after"),
        ({"x": 1}, {"y": 1}, "outputs on rank 0 is a dict of 1 before and a dict of 1 after"),
        ({"x": 1}, {"x": 2}, "outputs['x'] on rank 0 is 1 before and 2 after"),
        ([1], [True], "outputs[0] on rank 0 is 1 before and True after"),
        (
            torch.tensor(1),
            torch.tensor(2),
            "outputs on rank 0 is 1 before and 2 after; the largest difference in this tensor is 1",
        ),
    ],
)
def test_a_difference_in_structure_is_a_difference(before: object, after: object, text: str):
    verdict = verdict_of(before, after)
    assert not verdict
    assert str(verdict.difference) == text


def test_inputs_and_constants_as_the_step_leaves_them_are_compared_too():
    one, two = torch.ones(1), torch.full((1,), 2.0)
    first, second = RankResult(None, [one, one], {}), RankResult(None, [one, two], {"count": two})
    (difference,) = [compare([first], [second], num_terms=1).difference]
    assert str(difference).startswith("inputs[1] after the step on rank 0 at [0] is 1.0 before and 2.0 after")
    (difference,) = [compare([RankResult(None, [], {})], [RankResult(None, [], {"c": two})], num_terms=1).difference]
    assert str(difference) == "constant 'c' after the step on rank 0 is unchanged before and f32[1] after"


def test_runs_on_different_numbers_of_ranks_cannot_be_compared():
    with pytest.raises(VerificationError) as caught:
        compare([RankResult(1, [])], [], num_terms=1)
    assert str(caught.value) == "comparison: 1 ranks before, 0 ranks after\nrun both graphs on the same ranks"


# Example inputs.


def test_example_inputs_have_the_layout_of_the_placeholders():
    module = module_of("""
        def graph(a: f32[2, 3](strides=(1, 2)), b: bf16[4], c: i32[8], d: b8[3], e: f8e4m3fn[2],
                  f: f32[2](offset=3, base='a'), n: int[7]):
            return [a]""")
    (a, b, c, d, e, f, n), _ = example_inputs(module, 2, seed=1)
    assert (a.shape, a.stride()) == ((2, 3), (1, 2))
    assert [t.dtype for t in (b, d, e)] == [torch.bfloat16, torch.bool, torch.float8_e4m3fn]
    assert set(c.tolist()) == {0, 1}
    assert (storage_key(f), f.storage_offset()) == (storage_key(a), 3)
    assert n == 7


def test_example_inputs_differ_by_rank_and_repeat_by_seed():
    module = module_of("def graph(x: f32[8], y: i64[32]):\n    return [x]")
    first, again, other = (example_inputs(module, 2, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for rank in range(2) for a, b in zip(first[rank], again[rank], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first[0], first[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first[0], other[0], strict=True))


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f8e4m3fn", "c64"])
def test_example_inputs_of_small_whole_numbers_add_exactly_in_every_order(dtype: str):
    module = module_of(f"def graph(x: {dtype}[64]):\n    return [x]")
    ((x,),) = example_inputs(module, 1, integers=True)
    assert {value.real for value in map(complex, x.tolist())} == {-2.0, -1.0, 0.0, 1.0, 2.0}


def test_symbolic_sizes_take_their_hints_and_a_size_without_one_is_refused():
    header = "symbol('s0', hint=5)\nsymbol('u0')\n"
    ((n, x),) = example_inputs(module_of("def graph(n: int[s0], x: f32[s0, 2]):\n    return [x]", header), 1)
    assert (n, tuple(x.shape)) == (5, (5, 2))
    with pytest.raises(VerificationError) as caught:
        example_inputs(module_of("def graph(x: f32[u0]):\n    return [x]", header), 1)
    assert str(caught.value) == "example inputs: input x has a size without a hint (u0)\ngive the inputs yourself"


def test_empty_expanded_and_scalar_inputs_have_examples():
    module = module_of("def graph(x: f32[0, 3], y: f32[4, 2](strides=(0, 1)), z: f32[()]):\n    return [x]")
    ((x, y, z),) = example_inputs(module, 1)
    assert (tuple(x.shape), y.stride(), z.dim()) == ((0, 3), (0, 1), 0)
    assert torch.equal(y[0], y[3])
