"""Members: keys, sizes, parts, and the reasons why a collective is none."""

from __future__ import annotations

import pytest
import torch

from tests.unit.plan.listings import GROUP, collective, dag_of, graph, node
from weft.bucketing.eligibility import (
    Key,
    Member,
    Strategy,
    Touches,
    is_bucket,
    payloads_of,
    read_member,
    uses_of,
    written_buffer,
)
from weft.graph.ops import Kind
from weft.plan.decision import Reason, Refusal


def read(
    inputs: str, *lines: str, strategy: Strategy = "concat", head: str = GROUP, returns: str = ""
) -> Member | Refusal:
    module = graph(inputs, *lines, returns=returns, head=head)
    return read_member(collective(module, "c"), dag_of(module), strategy)


def key(inputs: str, *lines: str, strategy: Strategy = "concat") -> Key:
    member = read(inputs, *lines, strategy=strategy)
    assert isinstance(member, Member)
    return member.key


def refusal(inputs: str, *lines: str, **options: str) -> Refusal:
    found = read(inputs, *lines, **options)  # type: ignore[arg-type]
    assert isinstance(found, Refusal)
    return found


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ("all_gather(x, 2, 'dp')", Key(Kind.ALL_GATHER, "dp", 2, None, None, "cpu", torch.float32)),
        ("reduce_scatter(x, 'avg', 2, 'dp')", Key(Kind.REDUCE_SCATTER, "dp", 2, "avg", None, "cpu", torch.float32)),
        ("all_reduce(x, 'max', 'dp')", Key(Kind.ALL_REDUCE, "dp", 1, "max", None, "cpu", torch.float32)),
        ("broadcast(x, 1, 'dp')", Key(Kind.BROADCAST, "dp", 1, None, 1, "cpu", torch.float32)),
        ("all_to_all(x, [2, 2], [2, 2], 'dp')", Key(Kind.ALL_TO_ALL, "dp", 2, None, None, "cpu", torch.float32)),
    ],
)
def test_the_key_holds_what_members_must_have_in_common(launch: str, expected: Key):
    assert key("x: f32[4]", f"c = {launch}", "w = wait(c)") == expected


def test_arguments_by_keywords_give_the_same_key():
    first = key("x: f32[4]", "c = reduce_scatter(x, 'sum', 2, 'dp')", "w = wait(c)")
    second = key("x: f32[4]", "c = reduce_scatter(x, group_name='dp', reduce_op='sum', group_size=2)", "w = wait(c)")
    assert first == second


@pytest.mark.parametrize(
    "launch", ["all_gather(x, 2, 'dp')", "broadcast(x, 0, 'dp')", "all_to_all(x, [2, 2], [2, 2], 'dp')"]
)
def test_dtypes_mix_only_in_a_pack_of_what_moves(launch: str):
    assert key("x: f32[4]", f"c = {launch}", "w = wait(c)", strategy="pack").dtype is None


@pytest.mark.parametrize("strategy", ["concat", "coalesced", "pack"])
@pytest.mark.parametrize("launch", ["all_reduce(x, 'sum', 'dp')", "reduce_scatter(x, 'sum', 2, 'dp')"])
def test_reductions_never_mix_dtypes(launch: str, strategy: Strategy):
    assert key("x: f32[4]", f"c = {launch}", "w = wait(c)", strategy=strategy).dtype is torch.float32


@pytest.mark.parametrize(
    ("launch", "num_bytes"),
    [("all_gather(x, 2, 'dp')", 32), ("reduce_scatter(x, 'sum', 2, 'dp')", 16), ("all_reduce(x, 'sum', 'dp')", 16)],
)
def test_the_size_is_the_larger_of_both_sides(launch: str, num_bytes: int):
    member = read("x: f32[4]", f"c = {launch}", "w = wait(c)")
    assert isinstance(member, Member)
    assert member.num_bytes == num_bytes


@pytest.mark.parametrize(
    ("inputs", "launch", "options", "reason"),
    [
        (
            "x: f32[4]",
            "broadcast(x, 0, 'dp')",
            {"strategy": "coalesced"},
            Reason.UNSUPPORTED_FORM,
        ),
        (
            "x: f32[4]",
            "_c10d_functional_autograd.all_gather_into_tensor.default(x, 2, 'dp')",
            {},
            Reason.UNSUPPORTED_FORM,
        ),
        (
            "x: f32[4]",
            "all_reduce(x, 'sum', 'dp')",
            {"returns": "c"},
            Reason.ESCAPES,
        ),
        (
            "x: f32[u0]",
            "all_reduce(x, 'sum', 'dp')",
            {"head": f"{GROUP}\nsymbol('u0')"},
            Reason.UNKNOWN_SIZE,
        ),
        (
            "x: f32[s0]",
            "all_reduce(x, 'sum', 'dp')",
            {"head": f"{GROUP}\nsymbol('s0', hint=4)", "strategy": "pack"},
            Reason.UNKNOWN_SIZE,
        ),
        (
            "x: f32[4]",
            "all_to_all(x, [1, 3], [3, 1], 'dp')",
            {},
            Reason.UNSUPPORTED_FORM,
        ),
        (
            "x: f32[4]",
            "all_to_all(x, [2, 2], [1, 3], 'dp')",
            {},
            Reason.UNSUPPORTED_FORM,
        ),
    ],
)
def test_a_refusal_has_its_reason(inputs: str, launch: str, options: dict[str, str], reason: Reason):
    assert refusal(inputs, f"c = {launch}", "w = wait(c)", **options).reason is reason


def test_a_coalesced_launch_of_several_dtypes_is_refused_but_by_a_pack():
    lines = ("c = all_gather_coalesced([x, y], 2, 'dp')", "i = c[0]", "j = c[1]", "w = wait(i)", "v = wait(j)")
    assert refusal("x: f32[4], y: bf16[4]", *lines).reason is Reason.UNSUPPORTED_FORM
    assert isinstance(read("x: f32[4], y: bf16[4]", *lines, strategy="pack"), Member)


def test_payloads_of_a_coalesced_launch_are_its_tensors_with_every_item():
    lines = ("c = all_reduce_coalesced([x, y], 'sum', 'dp')", "i = c[1]", "j = c[1]", "w = wait(i)", "v = wait(j)")
    module = graph("x: f32[4], y: f32[2]", *lines, "k = c[0]", "u = wait(k)")
    found = [
        (payload.source.name, [n.name for n in payload.results]) for payload in payloads_of(collective(module, "c"))
    ]
    assert found == [("x", ["k"]), ("y", ["i", "j"])]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("c = all_reduce(x, 'sum', 'dp')",), None),
        (("c = all_reduce_(x, 'sum', 'dp')",), "x"),
        (("c = all_gather_out(x, 2, 'dp', out=o)",), "o"),
        (
            ("e = empty.memory_format([8], dtype=f32, device=device('cpu'))", "c = all_gather_out(x, 2, 'dp', out=e)"),
            None,
        ),
        (
            (
                "e = empty.memory_format([8], dtype=f32, device=device('cpu'))",
                "c = all_gather_out(x, 2, 'dp', out=e)",
                "n = neg(e)",
            ),
            "e",
        ),
    ],
)
def test_memory_that_somebody_else_sees_is_written_to(lines: tuple[str, ...], expected: str | None):
    module = graph("x: f32[4], o: f32[8]", *lines, "w = wait(c)")
    found = collective(module, "c")
    buffer = written_buffer(found, payloads_of(found)[0])
    assert (buffer and buffer.name) == expected


def test_waits_and_the_launch_itself_do_not_overwrite_a_result():
    module = graph("x: f32[4]", "c = all_reduce(x, 'sum', 'dp')", "v = view(c, [2, 2])", "w = wait(v)")
    assert not Touches(dag_of(module)).is_overwritten(node(module, "c"), node(module, "c"))
    module = graph("x: f32[4]", "c = all_reduce(x, 'sum', 'dp')", "w = wait(c)", "z = zero_(w)")
    assert Touches(dag_of(module)).is_overwritten(node(module, "c"), node(module, "c"))


def test_uses_are_found_behind_waits_and_views():
    lines = ("c = all_gather(x, 2, 'dp')", "w = wait(c)", "v = view(w, [2, 4])", "a = neg(v)", "b = relu(w)")
    module = graph("x: f32[4]", *lines, returns="a, b")
    assert {use.name for use in uses_of(collective(module, "c"))} == {"a", "b"}


def test_a_bucket_is_told_by_its_members():
    module = graph("x: f32[4]", "c = all_gather(x, 2, 'dp')", "w = wait(c)")
    launch = collective(module, "c")
    assert not is_bucket(launch)
    launch.launch.meta["weft.members"] = ("a", "b")
    assert is_bucket(launch)
