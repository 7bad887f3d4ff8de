"""Prologues: what is exactly a cast or a scaling folds, and nothing else does."""

from __future__ import annotations

import pytest
import torch

from tests.unit.plan.listings import dag_of, graph, node
from weft.bucketing.eligibility import Strategy, Touches
from weft.bucketing.prologues import foldable, prologue, step_of

TAIL = ("c = all_reduce(s, 'sum', 'dp')", "w = wait(c)")


def is_step(line: str, inputs: str = "x: f32[2, 3], y: f32[2, 3]") -> bool:
    return step_of(node(graph(inputs, line, returns="s"), "s")) is not None


@pytest.mark.parametrize(
    "line",
    [
        "s = div(x, 2)",
        "s = mul(x, 0.5)",
        "s = div.Scalar(x, 4)",
        "s = mul.Scalar(x, 4)",
        "s = _to_copy(x, dtype=bf16)",
        "s = _to_copy(x, dtype=bf16, memory_format=memory_format.preserve_format)",
        "s = prims.convert_element_type.default(x, bf16)",
    ],
)
def test_casts_and_scalings_by_numbers_are_steps(line: str):
    assert is_step(line)


@pytest.mark.parametrize(
    "line",
    [
        "s = div(x, y)",
        "s = add(x, 2)",
        "s = neg(x)",
        "s = view(x, [6])",
        "s = div.Tensor_mode(x, 2, rounding_mode='floor')",
        "s = _to_copy(x, dtype=bf16, memory_format=memory_format.contiguous_format)",
        "s = _to_copy(x, device=device('meta'))",
        "s = _to_copy(x, dtype=bf16, device=device('meta'))",
    ],
)
def test_w8_what_does_more_is_no_step(line: str):
    assert not is_step(line)


def test_a_scaling_that_broadcasts_is_no_step():
    assert not is_step("s = mul(x, y)", "x: f32[3], y: f32[2, 3]")


def chain(inputs: str, *lines: str) -> list[str]:
    module = graph(inputs, *lines, returns="w")
    return [n.name for n in prologue(node(module, "s"), Touches(dag_of(module)))]


def test_a_chain_begins_at_the_launch():
    assert chain("x: bf16[4]", "a = _to_copy(x, dtype=f32)", "s = div(a, 2)", *TAIL) == ["s", "a"]


def test_a_chain_ends_where_somebody_else_takes_the_tensor():
    lines = ("a = _to_copy(x, dtype=f32)", "s = div(a, 2)", *TAIL, "n = neg(a)")
    assert chain("x: bf16[4]", *lines) == ["s"]


def test_a_chain_ends_where_the_source_is_written_to():
    assert chain("x: f32[4]", "s = div(x, 2)", "z = zero_(x)", *TAIL) == []


def test_a_chain_ends_at_a_tensor_that_is_not_contiguous():
    assert chain("x: f32[4, 2](strides=(1, 4))", "s = div(x, 2)", *TAIL) == []


def folded(strategy: Strategy, *dtypes: str, to: str = "f32") -> tuple[str, ...]:
    inputs = ", ".join(f"x{i}: {dtype}[4]" for i, dtype in enumerate(dtypes))
    lines = [
        line
        for i in range(len(dtypes))
        for line in (
            f"c{i} = _to_copy(x{i}, dtype={to})",
            f"ar{i} = all_reduce(c{i}, 'sum', 'dp')",
            f"w{i} = wait(ar{i})",
        )
    ]
    module = graph(inputs, *lines, returns=", ".join(f"w{i}" for i in range(len(dtypes))))
    return foldable([node(module, f"c{i}") for i in range(len(dtypes))], strategy, Touches(dag_of(module)))


def test_equal_steps_fold_into_a_concatenation_and_others_do_not():
    assert folded("concat", "bf16", "bf16") == ("c0", "c1")
    assert folded("concat", "bf16", "f16") == ()


def test_a_narrowing_cast_stays_in_front_of_a_concatenation():
    assert folded("concat", "f32", "f32", to="bf16") == ()


def test_a_pack_takes_any_casts():
    assert folded("pack", "bf16", "f16") == ("c0", "c1")
    assert folded("pack", "f32", "f32", to="bf16") == ("c0", "c1")


def test_a_coalesced_bucket_folds_nothing():
    assert folded("coalesced", "bf16", "bf16") == ()


def test_a_scaling_by_a_size_is_no_step():
    head = "group('dp', size=2)\nsymbol('s0', hint=3)"
    module = graph("x: f32[s0]", "n = sym_size.int(x, 0)", "s = div(x, n)", returns="s", head=head)
    assert step_of(node(module, "s")) is None
    assert isinstance(node(module, "n").meta["val"], torch.SymInt)


@pytest.mark.parametrize(("first", "second"), [("0.0", "-0.0"), ("1", "True"), ("2", "4")])
def test_scalings_by_numbers_that_only_look_equal_are_not_one_step(first: str, second: str):
    module = graph("x: f32[4], y: f32[4]", f"a = mul(x, {first})", f"b = mul(y, {second})", returns="a, b")
    assert step_of(node(module, "a")) != step_of(node(module, "b"))
