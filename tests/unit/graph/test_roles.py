"""Roles: where parameters, gradients and activations come from and where they go tells them apart."""

from __future__ import annotations

import pytest
import torch

from tests.unit.plan.listings import collective, dag_of, graph
from weft.graph.products import is_product
from weft.graph.roles import Role, Roles

aten = torch.ops.aten


def role(inputs: str, *lines: str, of: str = "c", returns: str = "r") -> Role:
    module = graph(inputs, *lines, returns=returns)
    return Roles(dag_of(module)).of(collective(module, of))


GATHER = ("c = all_gather(s, 2, 'dp')", "w = wait(c)")
REDUCE = ("c = all_reduce(s, 'sum', 'dp')", "w = wait(c)")


@pytest.mark.parametrize(
    "prepare",
    [
        ("s = view(p, [16])",),
        ("s = _to_copy(p, dtype=bf16)",),
        ("t0 = t(p)", "s = clone(t0)"),
        ("m = mul(p, 0.5)", "s = _to_copy(m, dtype=f16)"),
    ],
)
def test_a_graph_input_is_a_parameter_through_cheap_operators(prepare: tuple[str, ...]):
    assert role("p: f32[4, 4]", *prepare, *GATHER, "r = neg(w)") is Role.PARAMETERS


def test_what_two_inputs_make_is_no_parameter():
    lines = ("s = add(p, q)", *GATHER, "r = mm(w, w.t)".replace("w.t", "p"))
    assert role("p: f32[4, 4], q: f32[4, 4]", *lines) is Role.ACTIVATIONS


def test_what_was_gathered_before_is_no_parameter():
    lines = ("a = all_gather(p, 2, 'dp')", "s = wait(a)", *GATHER, "r = mm(w, q)")
    assert role("p: f32[4, 4], q: f32[4, 4]", *lines) is Role.ACTIVATIONS


def test_a_reduction_of_a_graph_input_is_a_gradient_unless_a_product_follows():
    assert role("s: f32[4, 4]", *REDUCE, "r = neg(w)") is Role.GRADIENTS
    assert role("s: f32[4, 4]", *REDUCE, "r = mm(w, s)") is Role.ACTIVATIONS


@pytest.mark.parametrize(
    "behind",
    [
        ("r = copy_(g, w)",),
        ("r = add_(g, w)",),
        ("q = mul(w, w)", "m = sum(q)", "n = sqrt(m)", "r = div(w, n)"),
        ("b = all_gather(w, 2, 'dp')", "r = wait(b)"),
        ("a = addcdiv(g, w, g, value=-0.1)", "r = copy_(g, a)"),
    ],
)
def test_a_gradient_is_copied_accumulated_clipped_gathered_or_taken_by_the_optimizer(behind: tuple[str, ...]):
    assert role("x: f32[4, 4], g: f32[4, 4]", "s = mm(x, x)", *REDUCE, *behind) is Role.GRADIENTS


def test_a_product_far_behind_makes_an_activation():
    lines = ("s = mm(x, x)", *REDUCE, "a = relu(w)", "b = t(a)", "d = add(b, 1)", "r = mm(d, x)")
    assert role("x: f32[4, 4]", *lines) is Role.ACTIVATIONS


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.mm.default, True),
        (aten.addmm.default, True),
        (aten.bmm.default, True),
        (aten.convolution.default, True),
        (aten.embedding.default, True),
        (aten._scaled_dot_product_flash_attention.default, True),
        (aten.mul.Tensor, False),
        (aten.addcdiv.default, False),
        (torch.sym_max, False),
    ],
)
def test_products_are_told_by_their_operators(op: object, expected: bool):
    assert is_product(op) is expected


ROWS = "s: f32[4, 8], b: f32[8, 4], n: f32[8]"


@pytest.mark.parametrize(
    "behind",
    [
        ("r = mm(w, b)",),
        ("v = view(w, [2, 4, 8])", "r = matmul(v, b)"),
        ("h = _to_copy(w, dtype=bf16)", "d = _to_copy(b, dtype=bf16)", "r = mm(h, d)"),
        ("q = mul(w, w)", "m = mean.dim(q, [1], True)", "d = div(w, m)", "x = mul(d, n)", "r = mm(x, b)"),
        (
            "a = all_gather(b, 2, 'other')",
            "d = wait(a)",
            "e = t(d)",
            "f = slice(e, 1, 0, 8)",
            "g = t(f)",
            "r = mm(w, g)",
        ),
    ],
)
def test_a_graph_input_that_is_multiplied_as_rows_is_an_activation(behind: tuple[str, ...]):
    head = "group('dp', size=2)\ngroup('other', size=2, stride=2)"
    module = graph(ROWS, *GATHER, *behind, returns="r", head=head)
    assert Roles(dag_of(module)).of(collective(module, "c")) is Role.ACTIVATIONS


@pytest.mark.parametrize(
    "behind",
    [
        ("t0 = t(w)", "r = mm(x, t0)"),
        ("r = mm(g, w)",),
        ("t0 = t(x)", "h = relu(t0)", "m = sum.dim_IntList(h, [1], True)", "y = mul(h, m)", "r = mm(w, y)"),
        ("a = all_gather(x, 2, 'dp')", "d = wait(a)", "t0 = t(d)", "r = mm(w, t0)"),
    ],
    ids=["forward", "backward", "left of an activation", "next to a weight of the same group"],
)
def test_a_weight_on_either_side_of_a_product_is_a_parameter(behind: tuple[str, ...]):
    assert role("s: f32[4, 8], x: f32[6, 8], g: f32[6, 8]", *GATHER, *behind) is Role.PARAMETERS


def test_the_weight_of_a_norm_is_a_parameter():
    lines = ("h = mul(x, x)", "y = mul(h, w)", "r = mm(y, b)")
    assert role("s: f32[4], x: f32[6, 8], b: f32[8, 4]", *GATHER, *lines) is Role.PARAMETERS


TENSOR = ("a = all_gather(x, 2, 'dp')", "v = wait(a)", "h = mm(v, b)", "y = mm(h, d)")
SCATTER = ("c = reduce_scatter(s, 'sum', 2, 'dp')", "r = wait(c)")


def test_a_scatter_of_products_that_is_returned_is_an_activation_next_to_gathered_rows():
    inputs = "x: f32[4, 8], b: f32[8, 4], d: f32[4, 8]"
    assert role(inputs, *TENSOR, "s = add(y, 1)", *SCATTER) is Role.ACTIVATIONS
    assert role(inputs, *TENSOR, "s = cumsum(y, 0)", *SCATTER) is Role.GRADIENTS


def test_a_scatter_of_products_is_a_gradient_in_a_group_that_gathers_parameters():
    lines = ("a = all_gather(p, 2, 'dp')", "v = wait(a)", "t0 = t(v)", "h = mm(x, t0)", "t1 = t(h)", "s = mm(t1, x)")
    assert role("p: f32[4, 8], x: f32[6, 8]", *lines, *SCATTER) is Role.GRADIENTS
