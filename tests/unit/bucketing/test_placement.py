"""Placement: where buckets are launched and waited for, as data."""

from __future__ import annotations

from tests.unit.plan.listings import graph, merges

AG, RS = "bucket-all-gathers", "bucket-reduce-scatters"


def places(
    module_lines: list[str], inputs: str, spec: str, returns: str
) -> list[tuple[tuple[str, ...], str | None, str | None]]:
    found = merges(graph(inputs, *module_lines, returns=returns), spec)
    return [(merge.carried, merge.launch_before, merge.wait_before) for merge in found]


def test_a_bucket_of_inputs_is_launched_where_its_first_member_was_and_waited_for_at_its_first_use():
    lines = ["ag0 = all_gather(p, 2, 'dp')", "a = mm(x, x)", "w0 = wait(ag0)", "b = add(a, w0)"]
    lines += ["ag1 = all_gather(q, 2, 'dp')", "w1 = wait(ag1)", "c = add(b, w1)"]
    inputs = "p: f32[2, 4], q: f32[2, 4], x: f32[4, 4]"
    assert places(lines, inputs, AG, "c") == [((), "ag0", "b")]


def test_cheap_nodes_that_prepare_a_member_are_carried_along():
    lines = ["ag0 = all_gather(p, 2, 'dp')", "w0 = wait(ag0)", "a = mm(x, w0)", "v = view(q, [2, 4])", "n = neg(v)"]
    lines += ["ag1 = all_gather(n, 2, 'dp')", "w1 = wait(ag1)", "c = add(a, w1)"]
    assert places(lines, "p: f32[2, 4], q: f32[8], x: f32[4, 4]", AG, "c") == [(("v", "n"), "ag0", "a")]


def test_a_product_is_not_carried():
    lines = ["rs0 = reduce_scatter(x, 'sum', 2, 'dp')", "w0 = wait(rs0)", "g = mm(x, x)"]
    lines += ["rs1 = reduce_scatter(g, 'sum', 2, 'dp')", "w1 = wait(rs1)", "r = add(w0, w1)"]
    assert places(lines, "x: f32[4, 4]", RS, "r") == [((), None, "r")]


def backward(count: int) -> list[str]:
    return [
        line
        for i in range(count)
        for line in (
            f"g{i + 1} = mm(g{i}, g{i})",
            f"rs{i} = reduce_scatter(g{i + 1}, 'sum', 2, 'dp')",
            f"w{i} = wait(rs{i})",
        )
    ]


def waits(defer: int) -> list[str | None]:
    returns = ", ".join(f"w{i}" for i in range(6))
    spec = RS + f"{{max-bytes=128 alias-outputs=true defer={defer}}}"
    return [wait for _, _, wait in places(backward(6), "g0: f32[4, 4]", spec, returns)]


def test_a_late_bucket_is_waited_for_when_the_next_is_launched_or_one_later():
    assert waits(1) == ["rs3", "rs5", "output"]
    assert waits(2) == ["rs5", "output", "output"]


def test_a_prefetch_that_would_need_a_product_stays_where_it_is():
    lines = ["ag0 = all_gather(p, 2, 'dp')", "ag1 = all_gather(q, 2, 'dp')", "w0 = wait(ag0)", "w1 = wait(ag1)"]
    lines += ["a = mm(w0, w1)", "s = slice(a, 0, 0, 2)", "n = neg(s)", "ag2 = all_gather(s, 2, 'dp')"]
    lines += ["ag3 = all_gather(n, 2, 'dp')", "w2 = wait(ag2)", "w3 = wait(ag3)", "r = add(w2, w3)"]
    found = places(lines, "p: f32[2, 4], q: f32[2, 4]", AG + "{prefetch=1}", "r")
    assert found == [((), "ag0", "a"), ((), "ag2", "r")]
