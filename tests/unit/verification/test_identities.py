"""Laws of the symbolic proof: what holds for every bit is known, what does not is not."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.verification.symbolic.equivalence import prove

F32 = "x: f32[2, 3]"
HOLDS = [
    (F32, "mul(x, 1)"),
    (F32, "mul(x, 1.0)"),
    (F32, "div(x, 1)"),
    (F32, "sub(x, 0)"),
    (F32, "add(x, -0.0)"),
    (F32, "add(full([2, 3], -0.0), x)"),
    (F32, "mul(ones([2, 3]), x)"),
    (F32, "mul(full([], 1), x)"),
    (F32, "neg(neg(x))"),
    (F32, "pow.Tensor_Scalar(x, 1)"),
    (F32, "pow.Tensor_Scalar(x, 1.0)"),
    (F32, "maximum(x, x)"),
    (F32, "where.self(gt.Scalar(x, 0), x, x)"),
    (F32, "repeat(x, [1, 1])"),
    (F32, "constant_pad_nd(x, [0, 0])"),
    (F32, "slice_scatter(neg(x), x)"),
    (F32, "copy(neg(x), x)"),
    (F32, "_to_copy(_to_copy(x, dtype=f64), dtype=f32)"),
    ("x: bf16[4]", "_to_copy(_to_copy(x, dtype=f32), dtype=bf16)"),
    ("x: i64[4]", "add(x, 0)"),
    ("x: i64[4]", "sub(x, 0)"),
    ("x: i64[4]", "floor(x)"),
    ("x: i64[4]", "bitwise_xor.Scalar(x, 0)"),
    ("x: i64[4]", "bitwise_not(bitwise_not(x))"),
    ("x: i8[4]", "_to_copy(_to_copy(x, dtype=f16), dtype=i8)"),
    ("x: i32[4]", "_to_copy(_to_copy(x, dtype=f64), dtype=i32)"),
    ("x: b8[4]", "logical_not(logical_not(x))"),
]
DOES_NOT_HOLD = [
    (F32, "add(x, 0.0)"),
    (F32, "add(x, 0)"),
    (F32, "sub(x, -0.0)"),
    (F32, "mul(x, 2)"),
    (F32, "mul(ones([2, 3]), neg(x))"),
    (F32, "div.Tensor_mode(x, 1, rounding_mode='floor')"),
    (F32, "neg(abs(x))"),
    (F32, "floor(x)"),
    (F32, "pow.Tensor_Scalar(x, 2)"),
    (F32, "maximum(x, neg(x))"),
    (F32, "slice_scatter(x, neg(slice(x, 0, 0, 1)), 0, 0, 1)"),
    (F32, "_to_copy(_to_copy(x, dtype=bf16), dtype=f32)"),
    (F32, "_to_copy(_to_copy(x, dtype=f16), dtype=f32)"),
    (F32, "_to_copy(_to_copy(x, dtype=i64), dtype=f32)"),
    ("x: f16[4]", "_to_copy(_to_copy(x, dtype=bf16), dtype=f16)"),
    ("x: i64[4]", "_to_copy(_to_copy(x, dtype=f64), dtype=i64)"),
    ("x: i32[4]", "_to_copy(_to_copy(x, dtype=f32), dtype=i32)"),
    ("x: i8[4]", "_to_copy(_to_copy(x, dtype=u8), dtype=f32)"),
    ("x: i64[4]", "_to_copy(logical_not(logical_not(x)), dtype=i64)"),
    ("x: i64[4]", "mul(x, 0)"),
]
SPECIAL = [0.0, -0.0, 1.5, -2.25, float("inf"), float("-inf"), float("nan"), 1e-40, 65504.0, 3e38, 0.1, -1e-7]
WHOLE = [3, 0, -7, 100]


def listing(inputs: str, expression: str) -> str:
    """A listing with a line for each call of a nested expression."""
    lines: list[str] = []

    def call(text: str) -> str:
        name, _, rest = text.partition("(")
        arguments: list[str] = []
        depth, start = 0, 0
        inner = rest[:-1]
        for k, letter in enumerate([*inner, ","]):
            depth += (letter in "([") - (letter in ")]")
            if letter == "," and depth == 0:
                arguments.append(inner[start:k].strip())
                start = k + 1
        made = ", ".join(call(a) if "(" in a else a for a in arguments)
        lines.append(f"    v{len(lines)} = {name}({made})")
        return f"v{len(lines) - 1}"

    last = call(expression)
    return "\n".join([f"def graph({inputs}):", *lines, f"    r = clone({last})", f"    return [r, {last}]", ""])


def plain(inputs: str) -> str:
    return f"def graph({inputs}):\n    r = clone(x)\n    return [r, x]\n"


def value(inputs: str) -> torch.Tensor:
    (node, *_) = weft.parse(plain(inputs)).graph.nodes
    like = node.meta["val"]
    numbers = SPECIAL if like.dtype.is_floating_point else WHOLE
    return torch.tensor(numbers[: like.numel()]).to(like.dtype).reshape(like.shape)


@pytest.mark.parametrize("reassociates", [False, True])
@pytest.mark.parametrize(("inputs", "expression"), HOLDS)
def test_a_law_is_proved_and_holds(inputs: str, expression: str, reassociates: bool):
    before, after = weft.parse(listing(inputs, expression)), weft.parse(plain(inputs))
    proof = prove(before, after, reassociates=reassociates)
    assert proof, str(proof)
    given = value(inputs)
    found, expected = before(given.clone())[1], after(given.clone())[1]
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    if found.is_floating_point():
        assert torch.equal(found.signbit() & ~found.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.parametrize(("inputs", "expression"), DOES_NOT_HOLD)
def test_what_changes_something_is_not_proved(inputs: str, expression: str):
    assert not prove(weft.parse(listing(inputs, expression)), weft.parse(plain(inputs)))


def test_whole_numbers_times_zero_are_zeros_and_floats_are_not():
    for dtype, expected in (("i64", True), ("f32", False)):
        before = f"def graph(x: {dtype}[4]):\n    a = mul(x, 0)\n    return [a]\n"
        after = f"def graph(x: {dtype}[4]):\n    a = zeros_like(x)\n    return [a]\n"
        assert prove(weft.parse(before), weft.parse(after)).proved == expected


def test_filled_tensors_are_told_apart_by_number_dtype_and_shape():
    def returned(call: str) -> str:
        return f"def graph(x: f32[4]):\n    a = {call}\n    return [a]\n"

    same = prove(weft.parse(returned("ones([4])")), weft.parse(returned("full_like(x, 1)")))
    assert same, str(same)
    for other in ("zeros([4])", "full([4], -1.0)", "ones([4], dtype=f64)", "ones([5])", "full([4], 1.0000001)"):
        assert not prove(weft.parse(returned("ones([4])")), weft.parse(returned(other)))


@pytest.mark.parametrize(("size", "expected"), [(1, True), (2, False)])
def test_the_only_rank_of_a_group_receives_what_it_sent(size: int, expected: bool):
    calls = ["all_reduce(x, 'sum', 'tp')", "all_reduce(x, 'avg', 'tp')", "all_to_all(x, [4], [4], 'tp')"]
    for call in [*calls, "broadcast(x, 0, 'tp')"]:
        if size == 2 and call.startswith("all_to_all"):
            continue
        before = f"group('tp', size={size})\n\ndef graph(x: f32[4]):\n    a = {call}\n    w = wait(a)\n    return [w]\n"
        after = "def graph(x: f32[4]):\n    w = clone(x)\n    return [w]\n"
        assert prove(weft.parse(before), weft.parse(after)).proved == expected


SCATTERED = """group('dp', size=2)
group('tp', size=2, stride=2)

def graph(x: f32[4, 2], y: f32[6]):
    rs = reduce_scatter(x, 'sum', 2, 'dp')
    w = wait(rs)
    ag = all_gather(w, 2, 'dp')
    v = wait(ag)
    return [v]
"""
REDUCED = """group('dp', size=2)
group('tp', size=2, stride=2)

def graph(x: f32[4, 2], y: f32[6]):
    ar = all_reduce(x, 'sum', 'dp')
    v = wait(ar)
    return [v]
"""


def test_a_scatter_that_is_gathered_is_the_reduction_only_where_rounding_may_differ():
    before, after = weft.parse(SCATTERED), weft.parse(REDUCED)
    assert not prove(before, after)
    assert prove(before, after, reassociates=True)
    wrong = [
        ("w, 2, 'dp'", "w, 2, 'tp'"),
        ("'sum', 2", "'avg', 2"),
        ("    ag = all_gather(w,", "    n = relu(w)\n    ag = all_gather(n,"),
    ]
    for old, new in wrong:
        changed = SCATTERED.replace(old, new)
        assert changed != SCATTERED
        assert not prove(weft.parse(changed), after, reassociates=True)
