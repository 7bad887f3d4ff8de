"""Pairs of graphs that look alike and are not equal: neither in bits nor in real arithmetic is one ever proved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

import weft
from weft.verification.symbolic.equivalence import prove

HEADER = "group('dp', size=4)\n\n"
UNEQUAL: dict[str, tuple[str, str]] = {
    "a draw with another bound moves the generator on by other steps": (
        "(x: f32[4]):\n u = randint(10, [4])\n r = rand([4])\n y = add(x, r)\n return [y]",
        "(x: f32[4]):\n u = randint(1099511627776, [4])\n r = rand([4])\n y = add(x, r)\n return [y]",
    ),
    "a draw of another size": (
        "(x: f32[4]):\n u = rand([4])\n r = rand([4])\n return [r]",
        "(x: f32[4]):\n u = rand([8])\n r = rand([4])\n return [r]",
    ),
    "a draw of another dtype": (
        "(x: f32[4]):\n u = rand([4], dtype=f64)\n r = rand([4])\n return [r]",
        "(x: f32[4]):\n u = rand([4], dtype=f32)\n r = rand([4])\n return [r]",
    ),
    "draws in another order": (
        "(x: f32[4]):\n u = rand([4])\n r = randn([4])\n return [u, r]",
        "(x: f32[4]):\n r = randn([4])\n u = rand([4])\n return [u, r]",
    ),
    "a draw in place with other bounds": (
        "(x: f32[4]):\n y = clone(x)\n u = uniform_(y, 0.0, 1.0)\n r = rand([4])\n return [r]",
        "(x: f32[4]):\n y = clone(x)\n u = uniform_(y, 0.0, 2.0)\n r = rand([4])\n return [r]",
    ),
    "a draw with another probability": (
        "(x: f32[4]):\n u = bernoulli.p(x, 0.5)\n r = rand([4])\n return [r]",
        "(x: f32[4]):\n u = bernoulli.p(x, 0.25)\n r = rand([4])\n return [r]",
    ),
    "an average of integers, which rounds": (
        "(a: i64[4], b: i64[4]):\n p = all_reduce(a, 'avg', 'dp')\n pw = wait(p)\n q = all_reduce(b, 'avg', 'dp')\n"
        " qw = wait(q)\n s = add(pw, qw)\n return [s]",
        "(a: i64[4], b: i64[4]):\n t = add(a, b)\n p = all_reduce(t, 'avg', 'dp')\n pw = wait(p)\n return [pw]",
    ),
    "rounding to tens after rounding to ones": (
        "(x: f32[4]):\n a = round(x)\n b = round.decimals(a, decimals=-1)\n return [b]",
        "(x: f32[4]):\n a = round(x)\n return [a]",
    ),
    "rounding to other decimals": (
        "(x: f32[4]):\n a = round.decimals(x, decimals=1)\n return [a]",
        "(x: f32[4]):\n a = round.decimals(x, decimals=2)\n return [a]",
    ),
    "unsigned integers by way of floats to signed ones": (
        "(x: u32[2]):\n d = _to_copy(x, dtype=f64)\n y = _to_copy(d, dtype=i32)\n return [y]",
        "(x: u32[2]):\n y = _to_copy(x, dtype=i32)\n return [y]",
    ),
    "floats by way of wider floats to integers that hold less": (
        "(x: f32[2]):\n d = _to_copy(x, dtype=f64)\n y = _to_copy(d, dtype=i8)\n return [y]",
        "(x: f32[2]):\n y = _to_copy(x, dtype=i8)\n return [y]",
    ),
    "an infinite complex number times one": (
        "(x: c64[2]):\n y = mul(x, 1)\n return [y]",
        "(x: c64[2]):\n y = clone(x)\n return [y]",
    ),
    "an infinite complex number divided by one": (
        "(x: c64[2]):\n y = div(x, 1)\n return [y]",
        "(x: c64[2]):\n y = clone(x)\n return [y]",
    ),
    "numbers that are made truths and back in place": (
        "(x: f32[4]):\n c = clone(x)\n a = logical_not_(c)\n b = logical_not_(c)\n return [c]",
        "(x: f32[4]):\n c = clone(x)\n return [c]",
    ),
    "a comparison with a number, which is rounded first, and with a tensor, which is not": (
        "(x: f32[1], y: f64[1]):\n n = view(y, [])\n a = eq(x, n)\n return [a]",
        "(x: f32[1], y: f64[1]):\n a = eq(x, y)\n return [a]",
    ),
    "an optional argument under another name": (
        "(x: f32[4]):\n y = nan_to_num(x, 1.0)\n return [y]",
        "(x: f32[4]):\n y = nan_to_num(x, None, 1.0)\n return [y]",
    ),
    "a view of strides that are not those of its source": (
        "(x: f32[2, 3]):\n y = _reshape_alias(x, [3, 2], [1, 3])\n return [y]",
        "(x: f32[2, 3]):\n y = view(x, [3, 2])\n return [y]",
    ),
    "wide unsigned integers by way of floats": (
        "(x: u64[4]):\n d = _to_copy(x, dtype=f64)\n y = _to_copy(d, dtype=u64)\n return [y]",
        "(x: u64[4]):\n y = clone(x)\n return [y]",
    ),
    "unsigned integers by way of half floats": (
        "(x: u16[4]):\n d = _to_copy(x, dtype=f16)\n y = _to_copy(d, dtype=u16)\n return [y]",
        "(x: u16[4]):\n y = clone(x)\n return [y]",
    ),
    "unsigned integers by way of signed ones": (
        "(x: u32[4]):\n d = _to_copy(x, dtype=i32)\n y = _to_copy(d, dtype=f32)\n return [y]",
        "(x: u32[4]):\n y = _to_copy(x, dtype=f32)\n return [y]",
    ),
    "a conjugate": (
        "(x: c64[4]):\n a = _conj(x)\n y = clone(a)\n return [y]",
        "(x: c64[4]):\n y = clone(x)\n return [y]",
    ),
    "a write to a part of the memory": (
        "(x: f32[4]):\n a = neg(x)\n b = as_strided(a, [2], [2], 1)\n c = zero_(b)\n d = neg(a)\n return [d]",
        "(x: f32[4]):\n a = neg(x)\n d = neg(a)\n return [d]",
    ),
    "a write to one of several rows": (
        "(x: f32[2, 2]):\n a = neg(x)\n b = unbind.int(a)\n b0 = b[0]\n c = zero_(b0)\n d = neg(a)\n return [d]",
        "(x: f32[2, 2]):\n a = neg(x)\n d = neg(a)\n return [d]",
    ),
    "a write to the parts of complex numbers": (
        "(x: c64[2]):\n a = neg(x)\n b = view_as_real(a)\n c = zero_(b)\n d = neg(a)\n return [d]",
        "(x: c64[2]):\n a = neg(x)\n d = neg(a)\n return [d]",
    ),
    "a write to memory that was put under another tensor": (
        "(x: f32[4], y: f32[4]):\n a = neg(x)\n b = set_.source_Tensor(a, y)\n c = zero_(b)\n d = neg(y)\n return [d]",
        "(x: f32[4], y: f32[4]):\n d = neg(y)\n return [d]",
    ),
    "a broadcast from another rank": (
        "(x: f32[4]):\n a = broadcast(x, 0, 'dp')\n b = wait(a)\n return [b]",
        "(x: f32[4]):\n a = broadcast(x, 1, 'dp')\n b = wait(a)\n return [b]",
    ),
    "a list is not a tuple": (
        "(x: f32[4]):\n y = neg(x)\n return [y]",
        "(x: f32[4]):\n y = neg(x)\n return (y,)",
    ),
    "a list in a list is not a tuple in a list": (
        "(x: f32[4]):\n y = neg(x)\n return [[y], y]",
        "(x: f32[4]):\n y = neg(x)\n return [(y,), y]",
    ),
    "a zero that is returned has a sign": (
        "(x: f32[4]):\n y = neg(x)\n return [y, 0.0]",
        "(x: f32[4]):\n y = neg(x)\n return [y, -0.0]",
    ),
}


def graph(text: str) -> GraphModule:
    return weft.parse(f"{HEADER}def graph{text}\n")


@pytest.mark.parametrize("reassociates", [False, True], ids=["in bits", "in real arithmetic"])
@pytest.mark.parametrize("case", UNEQUAL)
def test_graphs_that_differ_are_not_proved_equal(case: str, reassociates: bool) -> None:
    before, after = map(graph, UNEQUAL[case])
    assert not prove(before, after, reassociates=reassociates).proved
    assert prove(before, graph(UNEQUAL[case][0]), reassociates=reassociates).proved  # each is equal to itself
    assert prove(after, graph(UNEQUAL[case][1]), reassociates=reassociates).proved


@pytest.mark.parametrize("name", ["maximum", "minimum", "clamp_min.Tensor", "clamp_max.Tensor"])
def test_a_zero_among_extrema_may_change_its_sign_with_the_strides(name: str) -> None:
    """Torch takes the first or the second of 0.0 and -0.0 as its loop runs, so whoever restrides may change a bit."""
    before = f"(x: DTYPE[8, 6], z: DTYPE[8, 5]):\n s = slice(x, 1, 0, 5)\n y = {name}(s, z)\n return [y]"
    after = (
        f"(x: DTYPE[8, 6], z: DTYPE[8, 5]):\n s = slice(x, 1, 0, 5)\n c = contiguous(s)\n y = {name}(c, z)\n return [y]"
    )
    floats, whole = ([graph(text.replace("DTYPE", dtype)) for text in (before, after)] for dtype in ("f32", "i32"))
    assert not prove(*floats).proved
    assert prove(*floats, reassociates=True).proved
    assert prove(*whole).proved


def test_sums_beside_a_sum_over_dim_0_of_a_number_are_proved() -> None:
    head = "(x: f32[()], a: f32[4], b: f32[4]):\n y = sum.dim_IntList(x, [0])\n"
    before = graph(head + " p = add(a, b)\n q = add(p, b)\n return [q, y]")
    after = graph(head + " p = add(b, b)\n q = add(a, p)\n return [q, y]")
    assert prove(before, after, reassociates=True).proved


# Calls of Python functions.


def calls(function: Callable[..., object], *, waits_first: bool, container: type = list) -> GraphModule:
    """A graph that calls a function on the result of a launch, before or after its wait."""
    made = graph("(x: f32[4]):\n p = all_reduce(x, 'sum', 'dp')\n w = wait(p)\n return [w]")
    launch, wait = (node for node in made.graph.nodes if node.op == "call_function")
    with made.graph.inserting_before(wait if not waits_first else wait.next):
        call = made.graph.call_function(function, (container([launch]),))
    call.meta["val"] = launch.meta["val"]
    output = next(iter(reversed(made.graph.nodes)))
    output.args = ([wait, call],)
    made.recompile()
    return made


def first_of(tensors: list[Tensor]) -> Tensor:
    return tensors[0] + 1


def test_a_call_of_unknown_effects_before_a_wait_is_not_one_after_it() -> None:
    early, late = (calls(first_of, waits_first=first) for first in (False, True))
    assert not prove(late, early).proved
    assert not prove(early, late).proved
    assert prove(late, calls(first_of, waits_first=True)).proved


def test_a_function_that_takes_a_list_may_treat_a_tuple_differently() -> None:
    assert not prove(*(calls(first_of, waits_first=True, container=kind) for kind in (list, tuple))).proved


def test_two_functions_of_one_name_are_two_functions() -> None:
    def make(step: int) -> Callable[..., Tensor]:
        return lambda tensors: tensors[0] + step

    assert not prove(*(calls(make(step), waits_first=True) for step in (1, 2))).proved


# Nested graphs.


def nested(constant: Tensor, *, deep: bool = False) -> GraphModule:
    """A graph that runs another one, which adds a constant of its own, registered nowhere."""
    inner = Graph()
    x = inner.placeholder("x")
    inner.output(inner.call_function(torch.ops.aten.add.Tensor, (x, inner.get_attr("held"))))
    body = GraphModule({"held": constant}, inner)
    del body.held
    body.held = constant  # an attribute, not a buffer
    if deep:
        outer = Graph()
        x = outer.placeholder("x")
        outer.output(outer.call_function(torch.ops.higher_order.invoke_subgraph, (outer.get_attr("body"), "inner", x)))
        body = GraphModule({"body": body}, outer)
    made = Graph()
    value = torch.empty(4)
    y = made.placeholder("y")
    y.meta["val"] = value
    call = made.call_function(torch.ops.higher_order.invoke_subgraph, (made.get_attr("body"), "name", y))
    call.meta["val"] = value
    made.output([call])
    return GraphModule({"body": body}, made)


@pytest.mark.parametrize("deep", [False, True], ids=["one deep", "two deep"])
def test_constants_of_nested_graphs_are_compared(deep: bool) -> None:
    ones, same, others = torch.ones(4), torch.ones(4), torch.full((4,), 2.0)
    assert prove(nested(ones, deep=deep), nested(same, deep=deep)).proved
    assert not prove(nested(ones, deep=deep), nested(others, deep=deep)).proved


def test_padding_and_tensors_of_one_number_are_the_same_constants():
    text = """def graph(x: i64[2]):
    p: i64[4] = constant_pad_nd({}, [2, 0], 0)
    y: i64[4] = mul(p, 1)
    z: i64[4] = add(y, {})
    return [z]
"""
    zeros = "    o: i64[4] = zeros([4], dtype=i64)\n"
    before = text.format("x", "o").replace("    p:", zeros + "    p:")
    after = "def graph(x: i64[2]):\n    p: i64[4] = constant_pad_nd(x, [2, 0], 0)\n    return [p]\n"
    assert prove(weft.parse(before), weft.parse(after))
    assert not prove(weft.parse(before), weft.parse(after.replace("[2, 0], 0)", "[2, 0], 1)")))
