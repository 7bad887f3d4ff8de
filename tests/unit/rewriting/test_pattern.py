"""The matcher: what fits, what does not and why, and what no match reaches across."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node

import weft
from weft.compat import find_op, register_operators
from weft.graph.operator_effects import profile
from weft.graph.ops import op_of
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import Draft
from weft.rewriting.pattern import ANY, VIEWS, Each, Either, Match, Op, Var, is_equal, match_at, op, why_no_match
from weft.rewriting.rules import why_not_apply

X, W, BIAS = Var("x"), Var("w"), Var("bias")
PRODUCT = op("mm", X, W).named("product")


def look(body: str, inputs: str = "x: f32[4, 4], w: f32[4, 4], b: f32[4]") -> tuple[Draft, dict[str, Node]]:
    module = weft.parse(f"def graph({inputs}):\n" + "".join(f"    {line}\n" for line in body.splitlines()))
    draft = Draft(module.graph)
    draft.module = module  # type: ignore[attr-defined]  # keeps the graph alive
    return draft, {node.name: node for node in module.graph.nodes}


def found(pattern: Op | tuple[Op, ...], body: str, at: str) -> Match | None:
    draft, nodes = look(body)
    return match_at(draft, pattern, nodes[at])


def fault(pattern: Op | tuple[Op, ...], body: str, at: str) -> str | None:
    draft, nodes = look(body)
    return why_no_match(draft, pattern, nodes[at])


BODY = "m = mm(x, w)\ns = add(m, b)\nreturn [s]"


def test_arguments_and_nodes_are_bound_by_name():
    match = found(op("add", PRODUCT, BIAS), BODY, "s")
    assert match is not None
    assert {name: str(node) for name, node in match.bound.items()} == {"x": "x", "w": "w", "product": "m", "bias": "b"}
    assert [node.name for node in match.nodes] == ["s", "m"]
    assert match.root.name == "s"
    assert fault(op("add", PRODUCT, BIAS), BODY, "s") is None


@pytest.mark.parametrize(
    ("pattern", "body", "at", "sentence"),
    [
        (op("add", PRODUCT, BIAS), BODY, "m", "m is mm, expected add"),
        (op("add", BIAS, PRODUCT), BODY, "s", "b is placeholder, expected mm"),
        (op("add", op(("relu", "neg"), ANY), BIAS), BODY, "s", "m is mm, expected relu or neg"),
        (op("add", PRODUCT, BIAS), "m = mm(x, w)\ns = add(m, b, alpha=2)\nreturn [s]", "s", "s has alpha=2"),
        (op("add", PRODUCT.used(1), BIAS), BODY.replace("[s]", "[s, m]"), "s", "m has 2 users, expected 1"),
        (op("add", ANY, 2.0), BODY, "s", "b is given, expected 2.0"),
        (op("mm", X, X), BODY, "m", "w is not x"),
        (op("mm", X, X.where(lambda *_: False, "square")), BODY, "m", "w is not square"),
        (op("cat", [X, W]), "c = cat([x])\nreturn [c]", "c", "a list of 1 is given, expected 2"),
        (op("cat", Each(ANY, "xs", at_least=2)), "c = cat([x])\nreturn [c]", "c", "[x] is not a list of at least 2"),
        (op("mm", [X], W), BODY, "m", "x is not a list"),
        (op("mm", X, W).where(lambda *_: False, "wide"), BODY, "m", "m is not wide"),
        (op("add", PRODUCT, op("mm", X, W)), BODY, "s", "b is placeholder, expected mm"),
        (op("add", PRODUCT, 3), "m = mm(x, w)\ns = add(m, True)\nreturn [s]", "s", "True is given, expected 3"),
    ],
)
def test_a_match_that_fails_says_why(pattern: Op, body: str, at: str, sentence: str):
    assert fault(pattern, body, at) == sentence


def test_the_first_two_arguments_in_either_order():
    pattern = op("add", PRODUCT, BIAS).either_way()
    assert found(pattern, BODY, "s") is not None
    match = found(pattern, "m = mm(x, w)\ns = add(b, m)\nreturn [s]", "s")
    assert match is not None
    assert match["bias"].name == "b"
    assert fault(pattern, "s = add(b, w)\nreturn [s]", "s") == "b is placeholder, expected mm"


def test_arguments_are_found_by_schema_whatever_their_spelling():
    pattern = op("slice", X, 0, end=2)
    assert found(pattern, "s = slice(x, 0, None, 2)\nreturn [s]", "s") is not None
    assert found(pattern, "s = slice(x, dim=0, end=2)\nreturn [s]", "s") is not None
    assert fault(pattern, "s = slice(x, 0, 1, 2)\nreturn [s]", "s") == "s has start=1"
    assert found(pattern.ignoring("start"), "s = slice(x, 0, 1, 2)\nreturn [s]", "s") is not None
    assert found(op("slice").ignoring(), "s = slice(x, 0, 1, 2)\nreturn [s]", "s") is not None


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_every_name_are_alike(name: str):
    match = found(op(VIEWS, X, Var("shape")), f"v = {name}(x, [16])\nreturn [v]", "v")
    assert match is not None
    assert match["shape"] == [16]


def test_lists_of_any_length_bind_one_dict_for_each_item():
    body = "a = slice(x, 0, 0, 2)\nb2 = slice(x, 0, 2, 4)\nc = cat([a, b2])\nreturn [c]"
    item = op("slice", X, 0, Var("start"), Var("end")).named("piece")
    match = found(op("cat", Each(item, "pieces")), body, "c")
    assert match is not None
    assert [(p["piece"].name, p["start"], p["end"]) for p in match["pieces"]] == [("a", 0, 2), ("b2", 2, 4)]
    assert [node.name for node in match.nodes] == ["c", "a", "b2"]
    assert fault(op("cat", Each(item, "pieces")), body.replace("[a, b2]", "[a, w]"), "c") == (
        "w is placeholder, expected slice"
    )


def test_alternatives_are_tried_in_order_and_a_failed_one_binds_nothing():
    wide = op("mm", X, op("t", W))
    match = found(op("add", Either(wide, PRODUCT), BIAS), BODY, "s")
    assert match is not None
    assert match["product"].name == "m"
    assert match.get("nothing") is None


def test_items_of_a_split():
    body = "p = split(x, 2)\na = p[0]\nb2 = p[1]\nc = cat([b2, a])\nreturn [c]"
    piece = op("operator.getitem", op("split", X, 2).named("split"), Var("k"))
    match = found(op("cat", Each(piece, "pieces")), body, "c")
    assert match is not None
    assert [p["k"] for p in match["pieces"]] == [1, 0]
    assert match["pieces"][0]["split"] is match["pieces"][1]["split"]


def test_a_pattern_with_several_roots_finds_the_others_among_the_users_of_what_it_bound():
    body = "a = amax(x, [1])\nn = neg(x)\nb2 = amax(x)\nreturn [a, b2, n]"
    patterns = (op("amax", X, [1]), op("amax", X))
    match = found(patterns, body, "a")
    assert match is not None
    assert [node.name for node in match.roots] == ["a", "b2"]
    assert found(patterns, body.replace("amax(x)", "amin(x)"), "a") is None


def test_roots_are_found_through_several_users():
    body = "a = amax(x, [1])\nn = neg(x)\nv = view(n, [16])\nreturn [a, v]"
    match = found((op("amax", X, [1]), op(VIEWS, op("neg", X), ANY)), body, "a")
    assert match is not None
    assert [node.name for node in match.roots] == ["a", "v"]


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        *((1, 1.0, True), (1, True, False), (0.0, -0.0, False), ([1, 2], (1, 2), True), ([1], [1, 2], False)),
        *((None, 0, False), (torch.float32, torch.float32, True), ("a", "a", True), (1, 2, False)),
    ],
)
def test_equal_arguments(first: object, second: object, equal: bool):
    assert is_equal(first, second) is equal


# What no match reaches across.


def refusal(body: str, at: str = "s", pattern: Op | None = None) -> Refusal | None:
    draft, nodes = look(body)
    match = match_at(draft, pattern or op("add", PRODUCT, BIAS), nodes[at])
    assert match is not None
    return why_not_apply(draft, match)


def test_a_match_in_one_piece_may_be_made():
    assert refusal(BODY) is None
    assert refusal("m = mm(x, w)\nr = rand_like(x)\nb1 = mul_(b, 2.0)\ns = add(m, b)\nreturn [s, r]") is None


def test_a_write_in_between_stands_in_the_way():
    found = refusal("m = mm(x, w)\nv = view(w, [16])\nw1 = mul_(v, 2.0)\ns = add(m, b)\nreturn [s]")
    assert found is not None
    assert (found.reason, found.blocking) == (Reason.MUTATED, "w1")


def test_a_result_that_is_written_in_between_stands_in_the_way():
    found = refusal("m = mm(x, w)\nv = view(m, [16])\nm1 = mul_(v, 2.0)\ns = add(m, b)\nreturn [s]")
    assert found is not None
    assert (found.reason, found.blocking) == (Reason.MUTATED, "m1")


def test_an_operator_that_writes_to_memory_it_is_given_stands_in_the_way():
    found = refusal("m = mm(x, w)\no = mm.out(x, x, out=w)\ns = add(m, b)\nreturn [s, o]")
    assert found is not None
    assert found.blocking == "o"


def test_a_draw_is_never_part_of_a_match():
    found = refusal("m = rand_like(x)\ns = add(m, b)\nreturn [s]", pattern=op("add", op("rand_like", X), BIAS))
    assert found is not None
    assert (found.reason, found.blocking) == (Reason.HAS_EFFECT, "m")


@pytest.mark.parametrize(
    "call",
    [
        (torch._C._set_grad_enabled, (False,)),
        (torch.amp.autocast_mode._enter_autocast, ("cpu", None, True, None)),
        (torch.manual_seed, (0,)),
    ],
    ids=["grad mode", "autocast", "seed"],
)
def test_a_change_of_mode_stands_in_the_way(call: tuple[object, tuple[object, ...]]):
    _, nodes = look(BODY)
    graph = nodes["s"].graph
    with graph.inserting_before(nodes["s"]):
        block = graph.call_function(*call)  # type: ignore[arg-type]
    draft = Draft(graph)
    match = match_at(draft, op("add", PRODUCT, BIAS), nodes["s"])
    assert match is not None
    found = why_not_apply(draft, match)
    assert found is not None
    assert (found.reason, found.blocking) == (Reason.HAS_EFFECT, block.name)


def test_operators_that_this_torch_lacks_are_left_out():
    assert op(("mm", "no_such_operator"), X, W).targets == (op_of("mm"),)


@pytest.mark.parametrize(
    ("namespace", "name", "overload", "writes"),
    [
        ("_c10d_functional", "all_gather_into_tensor_out", "default", True),
        ("_c10d_functional", "all_gather_into_tensor", "default", False),
        ("aten", "resize_", "default", True),
        ("aten", "copy_", "default", True),
        ("aten", "mm", "out", True),
        ("fsdp", "copy_", "default", True),
        ("aten", "__rshift__", "Scalar", False),
        ("aten", "__irshift__", "Scalar", True),
        ("aten", "clone", "default", False),
    ],
)
def test_what_writes_is_known_by_its_schema(namespace: str, name: str, overload: str, writes: bool):
    register_operators(namespace)
    target = find_op(namespace, name, overload)
    assert target is not None
    assert bool(profile(target).writes) is writes
