"""Products by rows in the symbolic witness: what is equal for all data is proved, what is not is not."""

from __future__ import annotations

import pytest

import weft
from weft.verification.symbolic.equivalence import prove

WHOLE = {
    "mm": ("a: f32[6, 4], b: f32[4, 3]", ["r = mm(a, b)"]),
    "addmm": ("a: f32[6, 4], b: f32[4, 3], c: f32[3]", ["r = addmm(c, a, b)"]),
    "linear": ("a: f32[6, 4], b: f32[3, 4], c: f32[3]", ["r = linear(a, b, c)"]),
    "matmul": ("a: f32[6, 2, 4], b: f32[4, 3]", ["r = matmul(a, b)"]),
    "mean": ("a: f32[6, 4]", ["r = mean.dim(a, [-1], True)"]),
    "broadcast": ("a: f32[6, 4], b: f32[4]", ["r = mul(a, b)"]),
    "norm": ("a: f32[6, 4], b: f32[4]", ["m = mean.dim(a, [-1], True)", "n = mul(a, m)", "r = mul(n, b)"]),
}


def graph(inputs: str, lines: list[str], result: str = "r") -> str:
    body = "".join(f"    {line}\n" for line in [*lines, f"return [{result}]"])
    return f"group('tp', size=2)\n\ndef graph({inputs}):\n{body}"


def by_rows(lines: list[str], starts: list[tuple[int, int]]) -> list[str]:
    """The lines once for each range of rows of `a`, and the results joined in that order."""
    made: list[str] = []
    for k, (start, end) in enumerate(starts):
        names = {line.split(" = ")[0] for line in lines} | {"a"}
        made.append(f"a{k} = slice(a, 0, {start}, {end})")
        for line in lines:
            for name in names:
                line = line.replace(f"{name} =", f"{name}{k} =").replace(f"({name},", f"({name}{k},")
                line = line.replace(f" {name},", f" {name}{k},").replace(f" {name})", f" {name}{k})")
            made.append(line)
    return [*made, f"r = cat([{', '.join(f'r{k}' for k in range(len(starts)))}])"]


@pytest.mark.parametrize("name", WHOLE)
def test_rows_in_their_order_are_proved(name: str):
    inputs, lines = WHOLE[name]
    before = weft.parse(graph(inputs, lines))
    after = weft.parse(graph(inputs, by_rows(lines, [(0, 2), (2, 6)])))
    assert prove(before, after, reassociates=True)


@pytest.mark.parametrize("name", WHOLE)
def test_rows_in_another_order_are_not(name: str):
    inputs, lines = WHOLE[name]
    before = weft.parse(graph(inputs, lines))
    after = weft.parse(graph(inputs, by_rows(lines, [(2, 4), (0, 2), (4, 6)])))
    assert not prove(before, after, reassociates=True)


def test_rows_are_not_taken_apart_where_every_bit_counts():
    inputs, lines = WHOLE["mm"]
    before = weft.parse(graph(inputs, lines))
    after = weft.parse(graph(inputs, by_rows(lines, [(0, 2), (2, 6)])))
    assert not prove(before, after)


def test_rows_of_several_pieces_are_told_by_all_of_them():
    inputs = "x: f32[4, 2], y: f32[4, 2], b: f32[4, 3]"
    before = graph(inputs, ["a = cat([x, y], 1)", "r = mm(a, b)"])
    parts = ["a0 = slice(x, 0, 0, 2)", "c0 = slice(y, 0, 0, 2)", "a1 = slice(x, 0, 2, 4)", "c1 = slice(y, 0, 2, 4)"]
    right = [*parts, "p0 = cat([a0, c0], 1)", "p1 = cat([a1, c1], 1)"]
    wrong = [*parts, "p0 = cat([a0, c1], 1)", "p1 = cat([a1, c0], 1)"]
    end = ["r0 = mm(p0, b)", "r1 = mm(p1, b)", "r = cat([r0, r1])"]
    assert prove(weft.parse(before), weft.parse(graph(inputs, [*right, *end])), reassociates=True)
    assert not prove(weft.parse(before), weft.parse(graph(inputs, [*wrong, *end])), reassociates=True)


def test_each_matrix_of_a_batch_goes_with_its_own():
    inputs = "a: f32[2, 3, 4], b: f32[2, 4, 5]"
    before = weft.parse(graph(inputs, ["r = bmm(a, b)"]))
    parts = [f"{n}{k} = slice({n}, 0, {k}, {k + 1})" for n in "ab" for k in range(2)]
    for pairs, proved in ((("a0, b0", "a1, b1"), True), (("a0, b1", "a1, b0"), False)):
        lines = [*parts, *(f"r{k} = bmm({pair})" for k, pair in enumerate(pairs)), "r = cat([r0, r1])"]
        assert bool(prove(before, weft.parse(graph(inputs, lines)), reassociates=True)) is proved


def test_another_weight_another_bias_or_another_operator_is_not_proved():
    inputs = "a: f32[6, 4], b: f32[4, 3], d: f32[4, 3], c: f32[3], e: f32[3]"
    before = weft.parse(graph(inputs, ["r = addmm(c, a, b)"]))
    for line in ("r = addmm(c, a, d)", "r = addmm(e, a, b)", "r = addmm(c, a, b, beta=2)"):
        assert not prove(before, weft.parse(graph(inputs, [line])), reassociates=True)


def test_transposing_twice_is_nothing():
    inputs = "a: f32[6, 4], b: f32[4, 3]"
    before = weft.parse(graph(inputs, ["r = mm(a, b)"]))
    after = weft.parse(graph(inputs, ["r0 = mm(a, b)", "t0 = t(r0)", "r = t(t0)"]))
    assert prove(before, after)


def test_rows_that_are_scattered_in_a_wrong_part_are_not_proved():
    inputs = "a: f32[8, 4], b: f32[4, 3]"
    before = weft.parse(graph(inputs, ["y = mm(a, b)", "rs = reduce_scatter(y, 'sum', 2, 'tp')", "r = wait(rs)"]))
    for order, proved in (((0, 2, 4, 6), True), ((0, 4, 2, 6), False)):
        slices = [f"s{k} = slice(a, 0, {start}, {start + 2})" for k, start in enumerate(order)]
        lines = [*slices, "a0 = cat([s0, s2])", "a1 = cat([s1, s3])"]
        for k in range(2):
            lines += [f"y{k} = mm(a{k}, b)", f"rs{k} = reduce_scatter(y{k}, 'sum', 2, 'tp')", f"w{k} = wait(rs{k})"]
        after = weft.parse(graph(inputs, [*lines, "r = cat([w0, w1])"]))
        assert bool(prove(before, after, reassociates=True)) is proved
