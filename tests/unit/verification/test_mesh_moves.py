"""Proofs about collectives over one axis of a mesh after the other: they hold exactly where the values agree."""

from __future__ import annotations

import pytest

import weft
from weft.verification.symbolic.equivalence import prove

HEAD = """
group('inner', size=2)
group('outer', size={outer}, stride=2)
group('all', size={ranks})

def graph(x: f32[{rows}, 3], g: f32[4], h: f32[4], k: f32[4]):
    a = all_reduce(g, 'sum', 'inner')
    a1 = wait(a)
    b = all_reduce(h, 'sum', 'outer')
    b1 = wait(b)
    c = all_reduce(k, 'sum', 'all')
    c1 = wait(c)
{body}
    return [a1, b1, c1, y]
"""
GATHER_INNER = "    {to}_l = all_gather({of}, 2, 'inner')\n    {to} = wait({to}_l)\n"
GATHER_OUTER = "    {to}_l = all_gather({of}, {outer}, 'outer')\n    {to} = wait({to}_l)\n"
SCATTER_INNER = "    {to}_l = reduce_scatter({of}, '{op}', 2, 'inner')\n    {to} = wait({to}_l)\n"
SCATTER_OUTER = "    {to}_l = reduce_scatter({of}, '{op}', {outer}, 'outer')\n    {to} = wait({to}_l)\n"
SORT = (
    "    {of}_v = view({of}, [{first}, {second}, -1])\n    {of}_t = transpose.int({of}_v, 0, 1)\n"
    "    {of}_c = clone({of}_t, memory_format=memory_format.contiguous_format)\n    {to} = view({of}_c, [-1, 3])\n"
)
EXCHANGE_INNER = "    {to}_l = all_to_all({of}, [1, 1], [1, 1], 'inner')\n    {to} = wait({to}_l)\n"
EXCHANGE_OUTER = "    {to}_l = all_to_all({of}, {even}, {even}, 'outer')\n    {to} = wait({to}_l)\n"


def graph(body: str, rows: int, outer: int) -> str:
    return HEAD.format(outer=outer, ranks=2 * outer, rows=rows, body=body.rstrip("\n"))


def gathers(outer: int) -> dict[str, str]:
    num: dict[str, int] = {"outer": outer}
    flat = f"    l = all_gather(x, {2 * outer}, 'all')\n    y = wait(l)\n"
    inner_first = GATHER_INNER.format(of="x", to="u") + GATHER_OUTER.format(of="u", to="y", **num)
    outer_first = GATHER_OUTER.format(of="x", to="u", **num) + GATHER_INNER.format(of="u", to="v")
    bytes_last = (
        GATHER_INNER.format(of="x", to="u")
        + "    raw = view.dtype(u, u8)\n"
        + GATHER_OUTER.format(of="raw", to="v", **num)
        + "    y = view.dtype(v, f32)\n"
    )
    bytes_first = (
        "    raw = view.dtype(x, u8)\n"
        + GATHER_INNER.format(of="raw", to="u")
        + "    v = view.dtype(u, f32)\n"
        + GATHER_OUTER.format(of="v", to="y", **num)
    )
    bodies = {
        "flat": flat,
        "inner first": inner_first,
        "inner first, then bytes": bytes_last,
        "bytes of inner first": bytes_first,
        "outer first, sorted": outer_first + SORT.format(of="v", to="y", first=2, second=outer),
        "outer first, unsorted": outer_first + "    y = alias(v)\n",
    }
    return {name: graph(body, 2, outer) for name, body in bodies.items()}


def scatters(outer: int, op: str = "sum") -> dict[str, str]:
    num: dict[str, object] = {"outer": outer, "op": op}
    flat = f"    l = reduce_scatter(x, '{op}', {2 * outer}, 'all')\n    y = wait(l)\n"
    outer_first = SCATTER_OUTER.format(of="x", to="u", **num) + SCATTER_INNER.format(of="u", to="y", **num)
    inner_first = SCATTER_INNER.format(of="s", to="u", **num) + SCATTER_OUTER.format(of="u", to="y", **num)
    bodies = {
        "flat": flat,
        "outer first": outer_first,
        "inner first, sorted": SORT.format(of="x", to="s", first=outer, second=2) + inner_first,
        "inner first, unsorted": "    s = alias(x)\n" + inner_first,
    }
    return {name: graph(body, 4 * outer, outer) for name, body in bodies.items()}


def exchanges(outer: int) -> dict[str, str]:
    even = [1] * (2 * outer)
    flat = f"    l = all_to_all(x, {even}, {even}, 'all')\n    y = wait(l)\n"
    inner = EXCHANGE_INNER.format(of="s", to="u")
    last = EXCHANGE_OUTER.format(of="{of}", to="v", even=[1] * outer)

    def steps(is_sorted: bool) -> str:
        text = f"    p = view(x, [{outer}, 2, 3])\n    q = transpose.int(p, 0, 1)\n"
        text += "    s = clone(q, memory_format=memory_format.contiguous_format)\n" + inner
        if not is_sorted:
            return text + f"    w = view(u, [{outer}, 2, 3])\n" + last.format(of="w") + "    y = view(v, [-1, 3])\n"
        text += "    t = transpose.int(u, 0, 1)\n    w = clone(t, memory_format=memory_format.contiguous_format)\n"
        return text + last.format(of="w") + "    y = view(v, [-1, 3])\n"

    bodies = {"flat": flat, "sorted": steps(True), "unsorted": steps(False)}
    return {name: graph(body, 2 * outer, outer) for name, body in bodies.items()}


@pytest.mark.parametrize("outer", [2, 3])
@pytest.mark.parametrize("form", [form for form in gathers(2) if form != "flat"])
def test_gathers_over_both_axes_are_one_gather_where_the_parts_are_in_order(form: str, outer: int):
    texts = gathers(outer)
    before, after = weft.parse(texts["flat"]), weft.parse(texts[form])
    assert bool(prove(before, after)) == bool(prove(after, before)) == (form != "outer first, unsorted")
    assert weft.verify(before, after, ranks=2 * outer).bitwise == (form != "outer first, unsorted")


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
@pytest.mark.parametrize("outer", [2, 3])
@pytest.mark.parametrize("form", ["outer first", "inner first, sorted", "inner first, unsorted"])
def test_scatters_over_both_axes_are_one_scatter_in_real_arithmetic(form: str, outer: int, op: str):
    texts = scatters(outer, op)
    before, after = weft.parse(texts["flat"]), weft.parse(texts[form])
    is_same = form != "inner first, unsorted"
    assert bool(prove(before, after, reassociates=True)) == is_same
    assert not prove(before, after)
    assert bool(weft.verify(before, after, ranks=2 * outer)) == is_same


def test_scatters_by_different_operators_are_not_one():
    texts = scatters(2), scatters(2, "avg")
    mixed = texts[0]["outer first"].replace("'sum', 2, 'inner')", "'max', 2, 'inner')")
    for flat in (texts[0]["flat"], texts[1]["flat"]):
        assert not prove(weft.parse(flat), weft.parse(mixed), reassociates=True)


@pytest.mark.parametrize("outer", [2, 3])
def test_exchanges_over_both_axes_are_one_exchange_where_the_parts_are_in_order(outer: int):
    texts = exchanges(outer)
    flat = weft.parse(texts["flat"])
    for form in ("sorted", "unsorted"):
        other = weft.parse(texts[form])
        assert bool(prove(flat, other)) == weft.verify(flat, other, ranks=2 * outer).bitwise == (form == "sorted")


def test_a_sum_that_is_scattered_and_gathered_over_both_axes_in_turn_is_an_all_reduce():
    body = SCATTER_INNER.format(of="x", to="u", op="sum") + SCATTER_OUTER.format(of="u", to="v", op="sum", outer=2)
    body += GATHER_OUTER.format(of="v", to="w", outer=2) + GATHER_INNER.format(of="w", to="y")
    whole = "    l = all_reduce(x, 'sum', 'all')\n    y = wait(l)\n"
    assert prove(weft.parse(graph(whole, 8, 2)), weft.parse(graph(body, 8, 2)), reassociates=True)


def test_groups_that_are_no_axes_of_a_mesh_are_not_merged():
    """Two groups of neighbours: the second gather brings what the first has brought."""
    texts = {name: text.replace("'outer', size=2, stride=2", "'outer', size=2") for name, text in gathers(2).items()}
    assert not prove(weft.parse(texts["flat"]), weft.parse(texts["inner first"]))
