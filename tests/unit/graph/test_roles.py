"""Roles: parameters, gradients and activations are told by where they come from and where they go."""

from __future__ import annotations

import pytest
import torch

from tests.unit.plan.listings import collective, dag_of, graph
from weft.graph.roles import Role, Roles, is_product

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
